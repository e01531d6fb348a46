"""Where each node of a topology stands in its picture, so that it shows what kind of network it is."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import networkx as nx

MOST = 80  # nodes in a picture; more cannot be told apart

Places = dict[Hashable, tuple[float, float]]
_SQUARE: dict[str, Any] = {"scale": 0.44, "center": (0.5, 0.5)}  # for the layouts of networkx


@dataclass
class Layout:
    """Positions in the unit square, y up; the picture is `aspect` times as high as it is wide."""

    positions: Places
    aspect: float = 1.0
    bars: dict[Hashable, float] = field(default_factory=dict)  # switches as wide as what hangs below them: their widths
    boxes: dict[str, list[Hashable]] = field(default_factory=dict)  # what stands in one rack, pod or machine


def layout(graph: nx.DiGraph) -> Layout:
    """As its preset looks best; a topology of one's own, be it one with more nodes than its preset knows, by attraction
    and repulsion, the same every time.

    >>> from d2lps.topology import ring
    >>> {node: (round(x, 2), round(y, 2)) for node, (x, y) in layout(ring(4, 1e9).graph).positions.items()}
    {'gpu0': (0.5, 0.94), 'gpu1': (0.94, 0.5), 'gpu2': (0.5, 0.06), 'gpu3': (0.06, 0.5)}
    """
    found = _PRESETS.get(graph.graph.get("preset", ""), _free)(graph)
    apart = {(round(x, 3), round(y, 3)) for node, (x, y) in found.positions.items() if node in graph}
    if len(apart) < len(graph):
        found = _free(graph)
    return replace(found, positions={node: found.positions[node] for node in graph})


def _free(graph: nx.DiGraph) -> Layout:
    joined = graph.to_undirected()
    parts = [next(filter(part.__contains__, graph)) for part in nx.connected_components(joined)]  # in the order of its nodes
    joined.add_edges_from(pairwise(parts))  # parts that nothing joins would flee from one another
    placed = nx.spring_layout(joined, seed=0, iterations=200, weight=None, **_SQUARE)
    return Layout({node: (float(x), float(y)) for node, (x, y) in placed.items()}, 0.8)


def _circle(graph: nx.DiGraph) -> Layout:
    """The devices clockwise, from the top, and in their middle the switch, if there is one."""
    devices = [node for node, kind in graph.nodes(data="kind") if kind == "device"]
    around = nx.circular_layout(devices, **_SQUARE)  # counterclockwise, from the right
    return Layout({node: (0.5, 0.5) for node in graph} | {node: (float(y), float(x)) for node, (x, y) in around.items()})


# ---- a network in tiers -----------------------------------------------------------------------------------------------

# How high a picture is, and what the parts are called that only the top tier joins.
_TIERS = {"pcie": (0.35, ""), "nvswitch": (0.3, ""), "spine_leaf": (0.5, "rack"), "fat_tree": (0.55, "pod")}


def _tiers(graph: nx.DiGraph) -> Layout:
    """Devices and hosts at the bottom, tiers of switches above; what only the top tier joins is a column below it."""
    aspect, part = _TIERS[graph.graph["preset"]]
    tiers = list(nx.bfs_layers(graph, [node for node, kind in graph.nodes(data="kind") if kind != "switch"]))
    if len(tiers) < 2:
        return _free(graph)
    below = graph.copy()
    below.remove_nodes_from(tiers[-1])
    columns = list(nx.weakly_connected_components(below))
    found = Layout({}, aspect)
    for height, tier in enumerate(tiers):
        groups = columns if height < len(tiers) - 1 else [set(tier)]
        for index, group in enumerate(groups):
            row = [node for node in graph if node in group.intersection(tier)]
            for place, node in enumerate(row):
                across = 0.05 + 0.9 * (place + 0.5) / len(row)
                found.positions[node] = (index + across) / len(groups), 0.08 + 0.84 * height / (len(tiers) - 1)
    if part:
        found.boxes = {f"{part} {index}": [node for node in graph if node in column] for index, column in enumerate(columns)}
    else:
        found.bars = dict.fromkeys(tiers[-1], 1.0)
    return found


# ---- a DGX-1 ----------------------------------------------------------------------------------------------------------

# A cube, seen from above: gpu0, 4, 6 and 2 are the corners of its top, gpu1, 5, 7 and 3 those below them.
_DGX1_ROWS = {
    0.92: {"pcie0": 0.06, "gpu0": 0.26, "gpu4": 0.74, "pcie2": 0.94},
    0.69: {"gpu1": 0.43, "gpu5": 0.57},
    0.52: {"cpu0": 0.0, "cpu1": 1.0},
    0.31: {"gpu3": 0.36, "gpu7": 0.64},
    0.08: {"pcie1": 0.03, "gpu2": 0.19, "gpu6": 0.81, "pcie3": 0.97},
}


def _dgx1(_: nx.DiGraph) -> Layout:
    return Layout({node: (x, y) for y, row in _DGX1_ROWS.items() for node, x in row.items()}, 0.6)


# ---- many machines ----------------------------------------------------------------------------------------------------


def _multi_node(graph: nx.DiGraph) -> Layout:
    """Machines side by side under the network, to which their devices turn."""
    inner = layout(graph.graph["machine"])
    places = inner.positions | {"nic": (0.5, 1.12)}
    if inner.bars:  # upside down: what hangs below its switch faces the network
        places |= {node: (x, 1 - y) for node, (x, y) in inner.positions.items()}
    machines = list(dict.fromkeys(str(node).partition("/")[0] for node in graph if "/" in str(node)))
    width = 1 / max(len(machines), 1)
    found = Layout({"network": (0.5, 0.95)}, max(0.36, 0.2 + 0.95 * inner.aspect * width), {"network": 0.96})
    for index, machine in enumerate(machines):
        for name, (x, y) in places.items():
            found.positions[f"{machine}/{name}"] = width * (index + 0.1 + 0.8 * x), 0.04 + 0.68 * y
        found.bars |= {f"{machine}/{name}": 0.8 * width * wide for name, wide in inner.bars.items()}
        found.boxes[machine] = [node for node in graph if str(node).startswith(f"{machine}/")]
    return found


_PRESETS: dict[str, Callable[[nx.DiGraph], Layout]] = dict.fromkeys(_TIERS, _tiers) | {
    "switch": _circle, "ring": _circle, "dgx1": _dgx1, "multi_node": _multi_node,
}  # fmt: skip
