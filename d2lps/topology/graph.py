"""A cluster as a directed graph, and the routes that messages take through it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import networkx as nx

from d2lps.topology.device import Device, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Node = Hashable
KINDS = ("device", "host", "switch")


@dataclass(frozen=True)
class Route:
    """The links that a message passes, as indices into `topology.links`, and what they amount to."""

    links: tuple[int, ...]
    latency: float  # seconds, of all links together
    bandwidth: float  # bytes per second, of the slowest link; infinite within one node


class Topology:
    """A networkx.DiGraph whose edges have `bandwidth` (bytes/s, one direction) and `latency` (s).

    >>> from d2lps.topology import star
    >>> cluster = star(3, bandwidth=1e9, latency=1e-6)
    >>> cluster.devices, cluster.switches
    (['gpu0', 'gpu1', 'gpu2'], ['switch'])
    >>> cluster.route("gpu0", "gpu2")
    Route(links=(0, 5), latency=2e-06, bandwidth=1000000000.0)

    Nodes have a `kind`: "device" (a rank lives on each by default), "host" (a CPU and its memory) or "switch"; and
    perhaps a `device`, a `Device` that says how fast they compute and how much they hold.
    A route is a shortest one, in links, and among those one of least latency. Switches and hosts pass messages on,
    devices only where a preset says so (`forwards=True`). Where several next hops are equally good, the destination's
    number chooses, its lowest digit at the first such place, the next digit at the next: the same way in every run,
    and spread over the links. Nodes may name the `machine` that they are part of: a message between two nodes of one
    machine stays inside if there is a way, be it longer.
    """

    def __init__(self, graph: nx.DiGraph, name: str = "topology") -> None:
        self.graph, self.name = graph, name
        _check(graph)
        self.nodes: list[Node] = list(graph)
        self.devices = self._of_kind("device")
        self.hosts = self._of_kind("host")
        self.switches = self._of_kind("switch")
        self.links: list[tuple[Node, Node]] = list(graph.edges)
        self.bandwidth: list[float] = [float(graph.edges[link]["bandwidth"]) for link in self.links]
        self.latency: list[float] = [float(graph.edges[link]["latency"]) for link in self.links]
        self._number = {node: number for number, node in enumerate(self.nodes)}
        self._link_number = {link: number for number, link in enumerate(self.links)}
        self._distances: dict[tuple[Node, str | None], dict[Node, tuple[int, float]]] = {}
        self._routes: dict[tuple[Node, Node], Route] = {}

    def __repr__(self) -> str:
        counts = ((len(self.devices), "device"), (len(self.hosts), "host"), (len(self.switches), "switch"))
        plural = {"device": "devices", "host": "hosts", "switch": "switches"}
        listed = ", ".join(f"{n} {word if n == 1 else plural[word]}" for n, word in counts if n)
        return f"<Topology {self.name}: {listed}, {len(self.links)} links>"

    def _of_kind(self, kind: str) -> list[Node]:
        return [node for node, data in self.graph.nodes(data=True) if data["kind"] == kind]

    def device(self, node: Node) -> Device | None:
        """What a node can do; None where nobody has said.

        >>> from d2lps.topology import dgx1
        >>> dgx1().device("gpu3").memory_bandwidth / 1e9
        900.0
        """
        found: Device | None = self.graph.nodes[self._known(node)].get("device")
        return found

    def _known(self, node: Node) -> Node:
        if node not in self._number:
            raise ValueError(f"{node!r} is not a node of {self.name}; it has {_some(self.nodes)}")
        return node

    # ---- routes ---------------------------------------------------------------------------------------------------

    def route(self, src: Node, dst: Node) -> Route:
        """How a message gets from one node to another; ValueError if it cannot."""
        if (src, dst) not in self._routes:
            self._routes[src, dst] = self._find_route(src, dst)
        return self._routes[src, dst]

    def _find_route(self, src: Node, dst: Node) -> Route:
        src, dst = self._known(src), self._known(dst)
        machine = self._machine(src) if self._machine(src) == self._machine(dst) else None
        nodes = self._walk(src, dst, machine) or self._walk(src, dst, None)
        if not nodes:
            raise ValueError(f"{self.name} has no route from {src!r} to {dst!r}")
        links = tuple(self._link_number[link] for link in pairwise(nodes))
        latency = math.fsum(self.latency[link] for link in links)
        return Route(links, latency, min((self.bandwidth[link] for link in links), default=math.inf))

    def _walk(self, src: Node, dst: Node, machine: str | None) -> list[Node]:
        """The nodes from one to another, all of them in `machine` if it is given; empty if there is no way."""
        nodes, digits = [src], self._number[dst]
        while nodes[-1] != dst:
            nearer = self._next_hops(nodes[-1], dst, machine)
            if not nearer:
                return []
            digits, choice = divmod(digits, len(nearer))
            nodes.append(nearer[choice])
        return nodes

    def _machine(self, node: Node) -> str | None:
        return self.graph.nodes[node].get("machine")

    def _next_hops(self, here: Node, dst: Node, machine: str | None) -> list[Node]:
        """The neighbours of `here` through which the rest of the way is best."""
        distances = self._distances_to(dst, machine)
        ways = [(self._beyond(here, node, distances), node) for node in self.graph.successors(here) if node in distances]
        best = min((way for way, _ in ways), default=None)
        return [node for way, node in ways if way == best]

    def _beyond(self, here: Node, there: Node, distances: dict[Node, tuple[int, float]]) -> tuple[int, float]:
        """(links, seconds) from `here` to the destination by way of its neighbour `there`; picoseconds are noise."""
        links, latency = distances[there]
        return links + 1, round(latency + self.latency[self._link_number[here, there]], 12)

    def _distances_to(self, dst: Node, machine: str | None) -> dict[Node, tuple[int, float]]:
        """From each node that passes messages on, and from `dst` itself, to `dst`: breadth first, layer by layer."""
        if (dst, machine) not in self._distances:
            distances: dict[Node, tuple[int, float]] = {dst: (0, 0.0)}
            frontier = [dst]
            while frontier:
                layer: dict[Node, tuple[int, float]] = {}
                for far in frontier:
                    for node in self.graph.predecessors(far):
                        if node not in distances and self._passes_on(node, machine):
                            layer[node] = min(self._beyond(node, far, distances), layer.get(node, (len(self.nodes), 0.0)))
                distances |= layer
                frontier = list(layer)
            self._distances[dst, machine] = distances
        return self._distances[dst, machine]

    def _passes_on(self, node: Node, machine: str | None) -> bool:
        return bool(self.graph.nodes[node]["forwards"]) and machine in (None, self._machine(node))

    # ---- other clusters like this one -----------------------------------------------------------------------------

    def without(self, *nodes_or_links: Any) -> Topology:
        """A copy without some links (pairs of nodes, both directions) or nodes.

        >>> from d2lps.topology import ring
        >>> ring(4, 1e9).without(("gpu0", "gpu1")).route("gpu0", "gpu1").links      # the long way round
        (0, 4, 2)
        """
        graph = self.graph.copy()
        for what in nodes_or_links:
            if what in graph:
                graph.remove_node(what)
            else:
                graph.remove_edges_from(self._both_ways(what))
        return Topology(graph, self.name)

    def slowed(self, link: tuple[Node, Node], factor: float) -> Topology:
        """A copy in which one link, in both directions, has `1 / factor` of its bandwidth."""
        if not factor > 0:
            raise ValueError(f"factor={factor!r} is not above 0")
        graph = self.graph.copy()
        for edge in self._both_ways(link):
            graph.edges[edge]["bandwidth"] /= factor
        return Topology(graph, self.name)

    def straggler(self, node: Node, factor: float) -> Topology:
        """A copy in which every link of one node has `1 / factor` of its bandwidth."""
        slower = self
        for neighbour in sorted({*nx.all_neighbors(self.graph, self._known(node))}, key=str):
            slower = slower.slowed((node, neighbour), factor)
        return slower

    def _both_ways(self, link: Any) -> list[tuple[Node, Node]]:
        pair = tuple(link) if isinstance(link, tuple | list) else ()
        edges = [edge for edge in (pair, pair[::-1]) if edge in self._link_number]
        if not edges:
            raise ValueError(f"{link!r} is neither a node nor a link of {self.name}")
        return edges

    def draw(self, ax: Axes | None = None, **options: Any) -> Axes:
        """A picture in which devices, hosts and switches look different and thicker links are faster."""
        from d2lps.topology.drawing import draw  # here, since matplotlib takes a while to import

        return draw(self.graph, self.name, ax, **options)


def _check(graph: nx.DiGraph) -> None:
    """Name the node or link that is not as it must be; fill in who forwards."""
    if not isinstance(graph, nx.DiGraph):
        raise TypeError(f"a topology is a networkx.DiGraph, not a {type(graph).__name__}")
    for node, data in graph.nodes(data=True):
        if data.get("kind") not in KINDS:
            raise ValueError(f"node {node!r} has kind={data.get('kind')!r}, which is none of {', '.join(KINDS)}")
        if not isinstance(data.get("device"), Device | None):
            raise TypeError(f"node {node!r} has device={data['device']!r}, which is no Device")
        data.setdefault("forwards", data["kind"] != "device")
    for src, dst, data in graph.edges(data=True):
        for name, above in (("bandwidth", "above 0"), ("latency", "0 or above")):
            value = data.get(name)
            if not is_number(value) or (name == "bandwidth" and not value):
                raise ValueError(f"link {src!r} -> {dst!r} has {name}={value!r}; it must be a number {above}")


def _some(nodes: Iterable[Node], most: int = 8) -> str:
    listed = [repr(node) for node in nodes]
    return ", ".join(listed[:most]) + (f", ... ({len(listed)} in all)" if len(listed) > most else "")


def connect(graph: nx.DiGraph, one: Node, other: Node, bandwidth: float, latency: float, **data: Any) -> None:
    """A full-duplex cable: a link each way."""
    for src, dst in ((one, other), (other, one)):
        graph.add_edge(src, dst, bandwidth=bandwidth, latency=latency, **data)
