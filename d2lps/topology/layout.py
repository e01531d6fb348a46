"""Where the nodes of a topology stand in a picture, so that it shows what kind of network it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

from d2lps.topology.curves import Point
from d2lps.topology.graph import Node, Topology


@dataclass
class Layout:
    """Places in the unit square, y up; the picture is `aspect` times as high as it is wide."""

    places: dict[Node, Point]
    aspect: float = 1.0
    bars: dict[Node, float] = field(default_factory=dict)  # switches as wide as what hangs below them: their widths
    bends: dict[tuple[Node, Node], float] = field(default_factory=dict)  # links that go round something, by how much
    boxes: dict[str, list[Node]] = field(default_factory=dict)  # what stands in one rack, pod or machine


def positions(topology: Topology) -> dict[Node, Point]:
    """{node: (x, y)} in the unit square, y up.

    >>> from d2lps.topology import ring
    >>> {node: (round(x, 2), round(y, 2)) for node, (x, y) in positions(ring(4, 1e9)).items()}
    {'gpu0': (0.5, 0.94), 'gpu1': (0.94, 0.5), 'gpu2': (0.5, 0.06), 'gpu3': (0.06, 0.5)}
    """
    return layout(topology).places


def layout(topology: Topology) -> Layout:
    """As its preset looks best; a topology of one's own, be it one with more nodes than its preset knows, by attraction
    and repulsion, the same every time."""
    arrange = _PRESETS.get(topology.graph.graph.get("preset", ""), _free)
    found = arrange(topology)
    places = {found.places.get(node) for node in topology.nodes}
    if None in places or len(places) < len(topology.nodes):
        found = _free(topology)
    found.places = {node: found.places[node] for node in topology.nodes}
    return found


# ---- one machine ------------------------------------------------------------------------------------------------------


def _star(topology: Topology) -> Layout:
    return Layout(_circle(topology.devices) | {switch: (0.5, 0.5) for switch in topology.switches})


def _ring(topology: Topology) -> Layout:
    return Layout(_circle(topology.devices))


def _circle(nodes: Sequence[Node]) -> dict[Node, Point]:
    """Clockwise, from the top."""
    turns = [2 * math.pi * index / max(len(nodes), 1) for index in range(len(nodes))]
    return {node: (0.5 + 0.44 * math.sin(turn), 0.5 + 0.44 * math.cos(turn)) for node, turn in zip(nodes, turns, strict=True)}


def _pcie_tree(topology: Topology) -> Layout:
    places = _row([topology.devices, topology.hosts], 0.15, gap=0.7)
    return _under_a_bar(topology, places, aspect=0.42)


def _nvswitch(topology: Topology) -> Layout:
    return _under_a_bar(topology, _row([topology.devices], 0.15), aspect=0.36)


def _under_a_bar(topology: Topology, places: dict[Node, Point], aspect: float) -> Layout:
    wide = max((x for x, _ in places.values()), default=0.5) - min((x for x, _ in places.values()), default=0.5) + 0.1
    bars = dict.fromkeys(topology.switches, wide)
    return Layout(places | {switch: (0.5, 0.85) for switch in topology.switches}, aspect, bars)


# Two quads, mirrored: the links between them are straight for the inner four, and go round for the outer.
_DGX1_PLACES: dict[Node, Point] = {
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


def _dgx1(topology: Topology) -> Layout:
    return Layout(dict(_DGX1_PLACES), 0.6, bends=dict(_DGX1_BENDS))


# ---- many machines ----------------------------------------------------------------------------------------------------


def _spine_leaf(topology: Topology) -> Layout:
    spines = [node for node in topology.switches if str(node).startswith("spine")]
    leaves = [node for node in topology.switches if node not in spines]
    racks = [_below(topology, leaf, topology.devices) for leaf in leaves]
    places = _row(racks, 0.08, gap=0.7)
    for leaf, rack in zip(leaves, racks, strict=True):
        places[leaf] = _over(rack, places, 0.42)
    places |= _row([spines], 0.92, left=0.2, right=0.8)
    boxes = {f"rack {index}": [leaf, *rack] for index, (leaf, rack) in enumerate(zip(leaves, racks, strict=True))}
    return Layout(places, 0.5, boxes=boxes)


def _fat_tree(topology: Topology) -> Layout:
    pods: dict[str, list[Node]] = {}
    for node in topology.switches:
        kind = str(node).partition(".")[0]
        if not kind.startswith("core"):
            pods.setdefault(kind.removeprefix("edge").removeprefix("agg"), []).append(node)
    edges = {pod: [node for node in nodes if str(node).startswith("edge")] for pod, nodes in pods.items()}
    below = {pod: [device for edge in edges[pod] for device in _below(topology, edge, topology.devices)] for pod in pods}
    places = _row(list(below.values()), 0.08, gap=0.7)
    for pod, nodes in pods.items():
        for edge, other in zip(edges[pod], [node for node in nodes if node not in edges[pod]], strict=False):
            x, _ = places[edge] = _over(_below(topology, edge, topology.devices), places, 0.34)
            places[other] = x, 0.62
    places |= _row([[node for node in topology.switches if node not in places]], 0.93, left=0.15, right=0.85)
    return Layout(places, 0.55, boxes={f"pod {pod}": nodes + below[pod] for pod, nodes in pods.items()})


def _multi_node(topology: Topology) -> Layout:
    """Machines side by side under the network, to which their devices turn."""
    machines: dict[str, list[Node]] = {}
    for node in topology.nodes:
        machine, slash, _ = str(node).partition("/")
        if slash:
            machines.setdefault(machine, []).append(node)
    width = 1 / max(len(machines), 1)
    found = Layout({"network": (0.5, 0.95)}, 0.5, {"network": 0.96})
    for index, (machine, nodes) in enumerate(machines.items()):
        inner = _machine(topology, machine, nodes)
        found.aspect = max(0.36, 0.2 + 0.95 * inner.aspect * width)
        place = {node: (width * (index + 0.06 + 0.88 * x), 0.04 + 0.68 * y) for node, (x, y) in inner.places.items()}
        nic = f"{machine}/nic"
        if nic in topology.graph:
            place[nic] = width * (index + 0.5), 0.8
        found.places |= place
        found.bars |= {node: 0.88 * width * wide for node, wide in inner.bars.items()}
        found.bends |= {link: 0.88 * width * bend for link, bend in inner.bends.items()}
        found.boxes[machine] = list(place)
    return found


def _machine(topology: Topology, machine: str, nodes: Iterable[Node]) -> Layout:
    """The layout of one machine of many, by its own preset, with its nodes' full names."""
    full = {str(node).removeprefix(f"{machine}/"): node for node in nodes if node != f"{machine}/nic"}
    graph = nx.relabel_nodes(topology.graph.subgraph(full.values()), {node: name for name, node in full.items()})
    graph.graph["preset"] = topology.graph.graph.get("machine", "")
    inner = layout(Topology(_in_order(graph, list(full)), machine))
    if inner.bars:  # upside down: what hangs below its switch faces the network
        inner.places = {node: (x, 1 - y) for node, (x, y) in inner.places.items()}
    elif graph.graph["preset"] == "dgx1":  # half of it out of the way of the other half's links to the network
        inner.places |= {gpu: (x - 0.065, y) for gpu, (x, y) in inner.places.items() if gpu in ("gpu2", "gpu3", "gpu6", "gpu7")}
    return Layout(
        {full[str(node)]: place for node, place in inner.places.items()},
        inner.aspect,
        {full[str(node)]: wide for node, wide in inner.bars.items()},
        {(full[str(u)], full[str(v)]): bend for (u, v), bend in inner.bends.items() if {u, v} <= full.keys()},
    )


def _in_order(graph: nx.DiGraph, nodes: list[str]) -> nx.DiGraph:
    ordered = nx.DiGraph(**graph.graph)
    ordered.add_nodes_from((node, graph.nodes[node]) for node in nodes)
    ordered.add_edges_from(graph.edges(data=True))
    return ordered


def _free(topology: Topology) -> Layout:
    graph = topology.graph.to_undirected()
    parts = [next(iter(part)) for part in nx.connected_components(graph)]
    graph.add_edges_from(pairwise(parts))  # parts that nothing joins would flee from one another
    places = nx.spring_layout(graph, seed=0, iterations=200, weight=None)
    xs, ys = ([float(place[axis]) for place in places.values()] for axis in (0, 1))
    return Layout({node: (_between(float(x), xs), _between(float(y), ys)) for node, (x, y) in places.items()}, 0.8)


# ---- helpers ----------------------------------------------------------------------------------------------------------


def _between(value: float, values: list[float]) -> float:
    span = max(values) - min(values)
    return 0.06 + 0.88 * (value - min(values)) / span if span else 0.5


def _row(
    groups: Sequence[Sequence[Node]], y: float, gap: float = 0.0, left: float = 0.04, right: float = 0.96
) -> dict[Node, Point]:
    """Evenly from left to right, with `gap` places left free between two groups."""
    groups = [group for group in groups if group]
    count = sum(map(len, groups)) + gap * (len(groups) - 1)
    places, at = {}, 0.5
    for group in groups:
        for node in group:
            places[node] = left + (right - left) * at / count, y
            at += 1
        at += gap
    return places


def _below(topology: Topology, switch: Node, wanted: Sequence[Node]) -> list[Node]:
    return [node for node in wanted if topology.graph.has_edge(switch, node) or topology.graph.has_edge(node, switch)]


def _over(nodes: Sequence[Node], places: dict[Node, Point], y: float) -> Point:
    return sum(places[node][0] for node in nodes) / len(nodes) if nodes else 0.5, y


_PRESETS: dict[str, Callable[[Topology], Layout]] = {
    "star": _star,
    "ring": _ring,
    "pcie_tree": _pcie_tree,
    "dgx1": _dgx1,
    "nvswitch": _nvswitch,
    "spine_leaf": _spine_leaf,
    "fat_tree": _fat_tree,
    "multi_node": _multi_node,
}
