"""Where each node of a topology stands in its picture, so that it shows what kind of network it is."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx
import numpy as np

MOST = 80  # nodes in a picture; more cannot be told apart

Places = dict[Hashable, tuple[float, float]]
Bends = dict[tuple[Hashable, Hashable], float]


@dataclass
class Layout:
    """Positions in the unit square, y up; the picture is `aspect` times as high as it is wide."""

    positions: Places
    aspect: float = 1.0
    bars: dict[Hashable, float] = field(default_factory=dict)  # switches as wide as what hangs below them: their widths
    bends: Bends = field(default_factory=dict)  # links that go round something, by how much
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
    found.positions = {node: found.positions[node] for node in graph}
    return found


def _free(graph: nx.DiGraph) -> Layout:
    joined = graph.to_undirected()
    parts = [next(iter(part)) for part in nx.connected_components(joined)]
    joined.add_edges_from(pairwise(parts))  # parts that nothing joins would flee from one another
    placed = nx.spring_layout(joined, seed=0, iterations=200, weight=None)
    points = np.array(list(placed.values()), dtype=float)
    span = np.ptp(points, axis=0)
    shares = np.divide(0.88 * (points - points.min(axis=0)), span, out=np.full(points.shape, 0.44), where=span > 0)
    return Layout(dict(zip(placed, map(tuple, (0.06 + shares).tolist()), strict=True)), 0.8)


def _of_kind(graph: nx.DiGraph, wanted: str) -> list[Hashable]:
    return [node for node, kind in graph.nodes(data="kind") if kind == wanted]


def _circle(graph: nx.DiGraph) -> Layout:
    """The devices clockwise, from the top, and in their middle the switch, if there is one."""
    devices = _of_kind(graph, "device")
    turns = {node: 2 * math.pi * index / len(devices) for index, node in enumerate(devices)}
    around = {node: (0.5 + 0.44 * math.sin(turn), 0.5 + 0.44 * math.cos(turn)) for node, turn in turns.items()}
    return Layout(around | dict.fromkeys(_of_kind(graph, "switch"), (0.5, 0.5)))


# ---- a network in tiers -----------------------------------------------------------------------------------------------

_TIERS = {"pcie_tree": (0.35, ""), "nvswitch": (0.3, ""), "spine_leaf": (0.5, "rack"), "fat_tree": (0.55, "pod")}


def _tiers(graph: nx.DiGraph) -> Layout:
    """Devices and hosts at the bottom, each switch over the middle of what hangs below it."""
    aspect, group = _TIERS[graph.graph["preset"]]
    devices, hosts = _of_kind(graph, "device"), _of_kind(graph, "host")
    tiers = list(nx.bfs_layers(graph, devices + hosts))
    groups = _apart(graph, tiers[-1]) if group else [devices, hosts]
    positions = _row([[node for node in nodes if node in tiers[0]] for nodes in groups])
    found = Layout(positions, aspect, boxes={f"{group} {index}": nodes for index, nodes in enumerate(groups) if group})
    below = {leaf: {leaf} for leaf in tiers[0]}
    for height, (lower, tier) in enumerate(pairwise(tiers), 1):
        for switch in tier:
            below[switch] = set().union(*(below[node] for node in lower if graph.has_edge(node, switch)))
        for switch in tier:
            alike = [other for other in tier if below[other] == below[switch]]  # they share the room above these leaves
            xs = [positions[leaf][0] for leaf in below[switch]]
            span, middle = max(xs) - min(xs), (max(xs) + min(xs)) / 2
            room = span * len(xs) / (len(xs) - 1) if span else 0.5
            across = (alike.index(switch) + 0.5) / len(alike) - 0.5  # from -1/2 to 1/2
            positions[switch] = middle + room * across, 0.08 + 0.84 * height / (len(tiers) - 1)
            if not group:
                found.bars[switch] = span + 0.1
    return found


def _apart(graph: nx.DiGraph, top: list[Hashable]) -> list[list[Hashable]]:
    """What only the top tier joins: racks, or pods."""
    lower = graph.copy()
    lower.remove_nodes_from(top)
    return [[node for node in lower if node in part] for part in nx.weakly_connected_components(lower)]


def _row(groups: Sequence[list[Hashable]]) -> Places:
    """Evenly from left to right, with a gap between two groups."""
    at = [(node, 0.7 * gap) for gap, group in enumerate(filter(None, groups)) for node in group]
    width = len(at) + at[-1][1]
    return {node: (0.04 + 0.92 * (index + 0.5 + gap) / width, 0.08) for index, (node, gap) in enumerate(at)}


# ---- a DGX-1 ----------------------------------------------------------------------------------------------------------

# Two quads, mirrored: the links between them are straight for the inner four, and go round for the outer.
_DGX1_ROWS = {
    0.8: {"pcie0": 0.12, "gpu0": 0.29, "gpu1": 0.43, "gpu5": 0.57, "gpu4": 0.71, "pcie2": 0.88},
    0.34: {"pcie1": 0.16, "gpu2": 0.29, "gpu3": 0.43, "gpu7": 0.57, "gpu6": 0.71, "pcie3": 0.84},
    0.06: {"cpu0": 0.05, "cpu1": 0.95},
}
_DGX1_BENDS: Bends = {("gpu0", "gpu4"): 0.1, ("gpu2", "gpu6"): -0.1, ("gpu1", "pcie0"): 0.06, ("gpu5", "pcie2"): 0.06}
_DGX1_BENDS |= {("gpu3", "pcie1"): -0.06, ("gpu7", "pcie3"): -0.06}


def _dgx1(_: nx.DiGraph) -> Layout:
    return Layout({node: (x, y) for y, row in _DGX1_ROWS.items() for node, x in row.items()}, 0.6, bends=_DGX1_BENDS)


# ---- many machines ----------------------------------------------------------------------------------------------------


def _multi_node(graph: nx.DiGraph) -> Layout:
    """Machines side by side under the network, to which their devices turn."""
    inner = layout(graph.graph["machine"])
    if inner.bars:  # upside down: what hangs below its switch faces the network
        inner.positions = {node: (x, 1 - y) for node, (x, y) in inner.positions.items()}
    elif inner.bends:  # a DGX-1: half of it out of the way of the other half's links to the network
        for gpu in {"gpu2", "gpu3", "gpu6", "gpu7"} & inner.positions.keys():
            inner.positions[gpu] = inner.positions[gpu][0] - 0.065, inner.positions[gpu][1]
    machines = list(dict.fromkeys(str(node).partition("/")[0] for node in graph if "/" in str(node)))
    width = 1 / max(len(machines), 1)
    found = Layout({"network": (0.5, 0.95)}, max(0.36, 0.2 + 0.95 * inner.aspect * width), {"network": 0.96})
    for index, machine in enumerate(machines):
        for name, (x, y) in inner.positions.items():
            found.positions[f"{machine}/{name}"] = width * (index + 0.06 + 0.88 * x), 0.04 + 0.68 * y
        found.positions[f"{machine}/nic"] = width * (index + 0.5), 0.8
        found.bars |= {f"{machine}/{name}": 0.88 * width * wide for name, wide in inner.bars.items()}
        found.bends |= {(f"{machine}/{u}", f"{machine}/{v}"): 0.88 * width * bend for (u, v), bend in inner.bends.items()}
        found.boxes[machine] = [node for node in graph if str(node).startswith(f"{machine}/")]
    return found


_PRESETS: dict[str, Callable[[nx.DiGraph], Layout]] = dict.fromkeys(_TIERS, _tiers) | {
    "star": _circle, "ring": _circle, "dgx1": _dgx1, "multi_node": _multi_node,
}  # fmt: skip
