"""What lies beneath a player's cards: the cluster that the run was simulated on, and the machines that its nodes stand in."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from d2lps.topology import Topology
from d2lps.topology.layout import layout
from d2lps.trace import Trace

Places = Sequence[tuple[float, float]]
_MOST_NODES, _MOST_BESIDE = 40, 8  # of a cluster that is drawn without being asked for; of cards in one line


def circle(ranks: int) -> Places:
    """Places on a circle in the unit square, the first at the top, then clockwise."""
    angles = [2 * math.pi * rank / ranks for rank in range(ranks)]
    return [(0.5 + 0.5 * math.sin(a), 0.5 - 0.5 * math.cos(a)) for a in angles]


def board(trace: Trace, places: Places | None, wanted: bool | None, boxes: Mapping[str, Sequence[int]] | None) -> dict[str, Any]:
    """{"places": of the ranks, "nodes", "links", "routes", "groups"}: the last four where there is something to draw.

    wanted: draw the cluster (True), do not (False), or do where each rank has a node of its own, and a place in a picture
    that people can read (None). Other nodes lie where the topology's own picture has them; where the ranks' places are given, in
    the middle of their neighbors. ValueError if it is wanted, and the run was not simulated.
    """
    topology = trace.topology
    if wanted and topology is None:
        raise ValueError("topology=True needs a simulated run: a real one does not know its cluster")
    drawn = wanted if wanted is not None else topology is not None and places is None and _readable(trace)
    found: dict[str, Any] = {"places": places or circle(trace.ranks)}
    if drawn:
        assert topology is not None
        found = _cluster(trace, topology, places)
    groups = {name: list(ranks) for name, ranks in boxes.items()} if boxes is not None else found.pop("boxes", {})
    if strangers := {rank for ranks in groups.values() for rank in ranks} - set(range(trace.ranks)):
        raise ValueError(f"groups has {sorted(strangers)}, but the ranks are 0 to {trace.ranks - 1}")
    found.pop("boxes", None)
    return found | ({"groups": [{"name": name, "ranks": ranks} for name, ranks in groups.items() if ranks]} if groups else {})


def _readable(trace: Trace) -> bool:
    topology = trace.topology
    if len(set(trace.nodes)) < trace.ranks or len(topology.graph) > _MOST_NODES:
        return False
    where = layout(topology.graph).positions
    return max(Counter(round(where[node][1], 2) for node in trace.nodes).values()) <= _MOST_BESIDE


def _cluster(trace: Trace, topology: Topology, places: Places | None) -> dict[str, Any]:
    """Ranks come first among the nodes, by number; a node that holds several is the first of them."""
    found, holders = layout(topology.graph), list(dict.fromkeys(trace.nodes))
    others = [node for node in topology.graph if node not in holders]
    number = {node: trace.ranks + index for index, node in enumerate(others)}
    number |= {node: trace.nodes.index(node) for node in holders}
    if places is None:
        where = {node: (x, 1 - y) for node, (x, y) in found.positions.items()}  # y down, as in a page
    else:
        where = _between(topology, {node: places[number[node]] for node in holders})
    kinds = dict(topology.graph.nodes(data="kind"))
    nodes = [{"name": str(node).rpartition("/")[2], "kind": kinds[node], "x": _short(where[node][0]), "y": _short(where[node][1])}
             for node in others]  # fmt: skip
    links = sorted({(min(number[a], number[b]), max(number[a], number[b])) for a, b in topology.graph.edges})
    ranks = {name: [number[node] for node in inside if number[node] < trace.ranks] for name, inside in found.boxes.items()}
    return {
        "places": places or [where[node] for node in trace.nodes], "nodes": nodes, "boxes": ranks,
        "links": " ".join(f"{a} {b}" for a, b in links), "routes": _routes(trace, topology, number),
    }  # fmt: skip


def _routes(trace: Trace, topology: Topology, number: Mapping[Hashable, int]) -> dict[str, str]:
    """{"0 1": "0 4 1"}: of each pair of ranks that exchanged something the nodes on the way."""
    found = {}
    for src, dst in trace.bytes_by_link():
        links = [topology.links[link] for link in topology.route(trace.nodes[src], trace.nodes[dst]).links]
        if links:
            found[f"{src} {dst}"] = " ".join(str(number[node]) for node in [links[0][0], *(after for _, after in links)])
    return found


def _between(topology: Topology, fixed: Mapping[Hashable, tuple[float, float]]) -> dict[Hashable, tuple[float, float]]:
    """Every other node in the middle of its neighbors, as springs would draw it there (Tutte 1963)."""
    where = {node: fixed.get(node, (0.5, 0.5)) for node in topology.graph}
    neighbors = topology.graph.to_undirected()
    for _ in range(100):
        for node in where:
            if node not in fixed and neighbors.degree(node):
                xs, ys = zip(*(where[other] for other in neighbors[node]), strict=True)
                where[node] = sum(xs) / len(xs), sum(ys) / len(ys)
    return where


def _short(x: float) -> float:
    return round(x, 3)
