"""Where the nodes of a topology stand in a picture, so that it shows what kind of network it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

Node = Hashable
Point = tuple[float, float]


@dataclass
class Layout:
    """Positions in the unit square, y up; the picture is `aspect` times as high as it is wide."""

    positions: dict[Node, Point]
    aspect: float = 1.0
    bars: dict[Node, float] = field(default_factory=dict)  # switches as wide as what hangs below them: their widths
    bends: dict[tuple[Node, Node], float] = field(default_factory=dict)  # links that go round something, by how much
    boxes: dict[str, list[Node]] = field(default_factory=dict)  # what stands in one rack, pod or machine


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
    xs, ys = ([float(point[axis]) for point in placed.values()] for axis in (0, 1))
    return Layout({node: (_between(float(x), xs), _between(float(y), ys)) for node, (x, y) in placed.items()}, 0.8)


def _between(value: float, values: list[float]) -> float:
    span = max(values) - min(values)
    return 0.06 + 0.88 * (value - min(values)) / span if span else 0.5


def _of_kind(graph: nx.DiGraph, kind: str) -> list[Node]:
    return [node for node, data in graph.nodes(data=True) if data["kind"] == kind]


def _circle(graph: nx.DiGraph) -> Layout:
    """The devices clockwise, from the top, and in their middle the switch, if there is one."""
    devices = _of_kind(graph, "device")
    turns = [2 * math.pi * index / max(len(devices), 1) for index in range(len(devices))]
    around = {node: (0.5 + 0.44 * math.sin(turn), 0.5 + 0.44 * math.cos(turn)) for node, turn in zip(devices, turns, strict=True)}
    return Layout(around | dict.fromkeys(_of_kind(graph, "switch"), (0.5, 0.5)))


# ---- a network in tiers -----------------------------------------------------------------------------------------------

_TIERS = {"pcie_tree": (0.35, ""), "nvswitch": (0.3, ""), "spine_leaf": (0.5, "rack"), "fat_tree": (0.55, "pod")}


def _tiers(graph: nx.DiGraph) -> Layout:
    """Devices and hosts at the bottom, each switch over the middle of what hangs below it."""
    aspect, group = _TIERS[graph.graph["preset"]]
    devices, hosts = _of_kind(graph, "device"), _of_kind(graph, "host")
    tiers = list(nx.bfs_layers(graph, devices + hosts))
    groups = _apart(graph, tiers[:-1]) if group else [devices, hosts]
    positions = _row([[node for node in nodes if node in tiers[0]] for nodes in groups])
    below: dict[Node, list[Node]] = {leaf: [leaf] for leaf in tiers[0]}
    found = Layout(positions, aspect, boxes={f"{group} {index}": nodes for index, nodes in enumerate(groups) if group})
    for height, (lower, tier) in enumerate(pairwise(tiers), 1):
        for switch in tier:
            neighbours = [node for node in lower if graph.has_edge(node, switch)]
            below[switch] = list(dict.fromkeys(leaf for node in neighbours for leaf in below[node]))
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


def _apart(graph: nx.DiGraph, tiers: Sequence[Iterable[Node]]) -> list[list[Node]]:
    """What only the tier above these joins: racks, or pods."""
    number = {node: index for index, node in enumerate(graph)}
    parts = nx.weakly_connected_components(graph.subgraph(node for tier in tiers for node in tier))
    return sorted((sorted(part, key=number.__getitem__) for part in parts), key=lambda nodes: number[nodes[0]])


def _row(groups: Sequence[Sequence[Node]]) -> dict[Node, Point]:
    """Evenly from left to right, with a gap between two groups."""
    groups = [group for group in groups if group]
    count = sum(map(len, groups)) + 0.7 * (len(groups) - 1)
    positions, at = {}, 0.5
    for group in groups:
        for node in group:
            positions[node] = 0.04 + 0.92 * at / count, 0.08
            at += 1
        at += 0.7
    return positions


# ---- a DGX-1 ----------------------------------------------------------------------------------------------------------

# Two quads, mirrored: the links between them are straight for the inner four, and go round for the outer.
_DGX1: dict[Node, Point] = {
    "gpu0": (0.29, 0.8),
    "gpu1": (0.43, 0.8),
    "gpu2": (0.29, 0.34),
    "gpu3": (0.43, 0.34),
    "gpu5": (0.57, 0.8),
    "gpu4": (0.71, 0.8),
    "gpu7": (0.57, 0.34),
    "gpu6": (0.71, 0.34),
    "pcie0": (0.12, 0.8),
    "pcie1": (0.16, 0.34),
    "pcie2": (0.88, 0.8),
    "pcie3": (0.84, 0.34),
    "cpu0": (0.05, 0.06),
    "cpu1": (0.95, 0.06),
}
_DGX1_BENDS: dict[tuple[Node, Node], float] = {("gpu0", "gpu4"): 0.1, ("gpu2", "gpu6"): -0.1}
_DGX1_BENDS |= {("gpu1", "pcie0"): 0.06, ("gpu5", "pcie2"): 0.06, ("gpu3", "pcie1"): -0.06, ("gpu7", "pcie3"): -0.06}


def _dgx1(graph: nx.DiGraph) -> Layout:
    return Layout(dict(_DGX1), 0.6, bends=dict(_DGX1_BENDS))


# ---- many machines ----------------------------------------------------------------------------------------------------


def _multi_node(graph: nx.DiGraph) -> Layout:
    """Machines side by side under the network, to which their devices turn."""
    machines: dict[str, list[Node]] = {}
    for node in graph:
        machine, slash, _ = str(node).partition("/")
        if slash:
            machines.setdefault(machine, []).append(node)
    width = 1 / max(len(machines), 1)
    found = Layout({"network": (0.5, 0.95)}, 0.5, {"network": 0.96})
    for index, (machine, nodes) in enumerate(machines.items()):
        inner = _machine(graph, {node: str(node).removeprefix(f"{machine}/") for node in nodes})
        found.aspect = max(0.36, 0.2 + 0.95 * inner.aspect * width)
        for name, (x, y) in inner.positions.items():
            found.positions[f"{machine}/{name}"] = width * (index + 0.06 + 0.88 * x), 0.04 + 0.68 * y
        if f"{machine}/nic" in graph:
            found.positions[f"{machine}/nic"] = width * (index + 0.5), 0.8
        found.bars |= {f"{machine}/{name}": 0.88 * width * wide for name, wide in inner.bars.items()}
        found.bends |= {(f"{machine}/{u}", f"{machine}/{v}"): 0.88 * width * bend for (u, v), bend in inner.bends.items()}
        found.boxes[machine] = nodes
    return found


def _machine(graph: nx.DiGraph, names: dict[Node, str]) -> Layout:
    """The layout of one machine of many, by its own preset; names: of its nodes within it."""
    inside = nx.DiGraph(preset=graph.graph.get("machine", ""))
    inside.add_nodes_from((name, graph.nodes[node]) for node, name in names.items() if name != "nic")
    links = ((names.get(u), names.get(v)) for u, v in graph.edges)
    inside.add_edges_from(link for link in links if inside.has_node(link[0]) and inside.has_node(link[1]))
    found = layout(inside)
    if found.bars:  # upside down: what hangs below its switch faces the network
        found.positions = {node: (x, 1 - y) for node, (x, y) in found.positions.items()}
    elif inside.graph["preset"] == "dgx1":  # half of it out of the way of the other half's links to the network
        for gpu in {"gpu2", "gpu3", "gpu6", "gpu7"} & found.positions.keys():
            found.positions[gpu] = found.positions[gpu][0] - 0.065, found.positions[gpu][1]
    return found


_PRESETS: dict[str, Callable[[nx.DiGraph], Layout]] = dict.fromkeys(_TIERS, _tiers) | {
    "star": _circle,
    "ring": _circle,
    "dgx1": _dgx1,
    "multi_node": _multi_node,
}
