"""A cluster as a directed graph, and the routes that messages take through it."""

import math
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import networkx as nx

from d2lps.topology.device import Device, is_number

Link = tuple[Hashable, Hashable]
KINDS = ("device", "host", "switch")
HOP = 10**24  # how long a link is, besides its picoseconds: so much that fewer links are always shorter


class Route(NamedTuple):
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
        _check(graph)
        self.graph, self.name = graph, name
        self.nodes: list[Hashable] = list(graph)
        self.devices, self.hosts, self.switches = ([n for n, kind in graph.nodes(data="kind") if kind == k] for k in KINDS)
        self.links: list[Link] = list(graph.edges)
        self.bandwidth = [float(bandwidth) for *_, bandwidth in graph.edges(data="bandwidth")]
        self.latency = [float(latency) for *_, latency in graph.edges(data="latency")]
        self._number = {node: number for number, node in enumerate(self.nodes)}
        self._link_number = {link: number for number, link in enumerate(self.links)}
        self._length = {link: HOP + round(1e12 * latency) for link, latency in zip(self.links, self.latency, strict=True)}
        self._distances: dict[tuple[Hashable, str | None], dict[Hashable, int]] = {}
        self._routes: dict[Link, Route] = {}
        self.remembered: dict[Hashable, Any] = {}  # what others have found out about it at some cost: forgotten with it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"remembered": {}}  # a copy for another rank finds out what it needs

    def __repr__(self) -> str:
        kinds = zip((self.devices, self.hosts, self.switches), KINDS, ("s", "s", "es"), strict=True)
        listed = ", ".join(f"{len(nodes)} {kind}{plural * (len(nodes) > 1)}" for nodes, kind, plural in kinds if nodes)
        return f"<Topology {self.name}: {listed}, {len(self.links)} links>"

    def device(self, node: Hashable) -> Device | None:
        """What a node can do; None where nobody has said.

        >>> from d2lps.topology import dgx1
        >>> dgx1().device("gpu3").memory_bandwidth / 1e9
        900.0
        """
        return self.graph.nodes[self._known(node)].get("device")

    def _known(self, node: Hashable) -> Hashable:
        if node not in self._number:
            more = f", ... ({len(self.nodes)} in all)" if len(self.nodes) > 8 else ""
            raise ValueError(f"{node!r} is not a node of {self.name}; it has {', '.join(map(repr, self.nodes[:8]))}{more}")
        return node

    # ---- routes ---------------------------------------------------------------------------------------------------

    def route(self, src: Hashable, dst: Hashable) -> Route:
        """How a message gets from one node to another; ValueError if it cannot."""
        if (src, dst) not in self._routes:
            links = tuple(self._link_number[link] for link in pairwise(self._way(self._known(src), self._known(dst))))
            latency = math.fsum(self.latency[link] for link in links)
            self._routes[src, dst] = Route(links, latency, min((self.bandwidth[link] for link in links), default=math.inf))
        return self._routes[src, dst]

    def _way(self, src: Hashable, dst: Hashable) -> list[Hashable]:
        """The nodes of a route, within one machine if that is possible."""
        home, other = (self.graph.nodes[node].get("machine") for node in (src, dst))
        nodes = self._walk(src, dst, home if home == other else None) or self._walk(src, dst, None)
        if not nodes:
            raise ValueError(f"{self.name} has no route from {src!r} to {dst!r}")
        return nodes

    def _walk(self, src: Hashable, dst: Hashable, machine: str | None) -> list[Hashable]:
        """The nodes from one to another, all of them in `machine` if it is given; empty if there is no way."""
        rest, nodes, digits = self._distances_to(dst, machine), [src], self.graph.nodes[dst].get("number", self._number[dst])
        while nodes[-1] != dst:
            here = nodes[-1]
            ways = {node: rest[node] + self._length[here, node] for node in self.graph.successors(here) if node in rest}
            if not ways:
                return []
            best = min(ways.values())
            nearer = [node for node, way in ways.items() if way == best]
            digits, choice = divmod(digits, len(nearer))
            nodes.append(nearer[choice])
        return nodes

    def _distances_to(self, dst: Hashable, machine: str | None) -> dict[Hashable, int]:
        """From each node that passes messages on, and from `dst` itself, to `dst`."""
        if (dst, machine) not in self._distances:
            find = self._dijkstra if self.graph.nodes[dst]["forwards"] else self._last_link
            self._distances[dst, machine] = find(dst, machine)
        return self._distances[dst, machine]

    def _last_link(self, dst: Hashable, machine: str | None) -> dict[Hashable, int]:
        """Nothing passes through `dst`: the way there is by a switch beside it, whose distances serve all that hang there."""
        rest = {dst: 0}
        for switch in self.graph.predecessors(dst):
            if self._passes_on(switch, machine):
                for node, length in self._distances_to(switch, machine).items():
                    way = length + self._length[switch, dst]
                    rest[node] = min(way, rest.get(node, way))
        return rest

    def _dijkstra(self, dst: Hashable, machine: str | None) -> dict[Hashable, int]:
        def length(here: Hashable, before: Hashable, _: Any) -> int | None:  # from `dst` backwards
            return self._length[before, here] if self._passes_on(before, machine) else None

        return dict(nx.single_source_dijkstra_path_length(self.graph.reverse(copy=False), dst, weight=length))

    def _passes_on(self, node: Hashable, machine: str | None) -> bool:
        data = self.graph.nodes[node]
        return bool(data["forwards"]) and machine in (None, data.get("machine"))

    # ---- other clusters like this one -----------------------------------------------------------------------------

    def without(self, *nodes_or_links: Any) -> "Topology":
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

    def only(self, devices: Iterable[Hashable]) -> "Topology":
        """A copy without all other devices that pass nothing on: messages between these go the same ways as before.

        >>> from d2lps.topology import dgx_a100_pod
        >>> dgx_a100_pod(128).only(["node0/gpu0", "node77/gpu0"])
        <Topology 128 x DGX A100: 2 devices, 3 switches, 8 links>
        """
        kept = {self._known(device) for device in devices}
        machines = {self.graph.nodes[device].get("machine") for device in kept}
        graph = nx.DiGraph(**self.graph.graph)
        for node, data in self.graph.nodes(data=True):
            mine = data.get("machine") is None or data["machine"] in machines
            if node in kept or (mine and data["forwards"]):
                graph.add_node(node, **{"number": self._number[node]} | data)
        around = ((src, dst, data) for src in list(graph) for dst, data in self.graph.adj[src].items() if dst in graph)
        graph.add_edges_from(around)  # of the kept alone: of 100,000 devices most links are not looked at
        return Topology(graph, self.name)

    def reached(self) -> "Topology":
        """A copy whose links have what collectives reach of their bandwidth, where `reached`, a share of it, is known of a link.

        >>> from d2lps.topology import dgx_a100
        >>> dgx_a100().reached().route("gpu0", "gpu1").bandwidth / 1e9      # of 300
        231.0
        """
        graph = self.graph.copy()
        for *_, data in graph.edges(data=True):
            data["bandwidth"] *= data.pop("reached", 1.0)
        return Topology(graph, self.name)

    def slowed(self, link: Link, factor: float) -> "Topology":
        """A copy in which one link, in both directions, has `1 / factor` of its bandwidth."""
        return self._slower(self._both_ways(link), factor)

    def straggler(self, node: Hashable, factor: float) -> "Topology":
        """A copy in which every link of one node has `1 / factor` of its bandwidth."""
        self._known(node)
        return self._slower([link for link in self.links if node in link], factor)

    def _slower(self, links: Iterable[Link], factor: float) -> "Topology":
        if not factor > 0:
            raise ValueError(f"factor={factor!r} is not above 0")
        graph = self.graph.copy()
        for link in links:
            graph.edges[link]["bandwidth"] /= factor
        return Topology(graph, self.name)

    def _both_ways(self, link: Any) -> list[Link]:
        pair = tuple(link) if isinstance(link, tuple | list) else ()
        links = [each for each in (pair, pair[::-1]) if each in self._link_number]
        if not links:
            raise ValueError(f"{link!r} is neither a node nor a link of {self.name}")
        return links

    def draw(self, ax: Any = None, **options: Any) -> Any:
        """A picture, as matplotlib's Axes: devices, hosts and switches look different, and thicker links are faster."""
        from d2lps.topology.drawing import draw  # here, since matplotlib takes a while to import

        return draw(self.graph, self.name, ax, **options)


def _check(graph: nx.DiGraph) -> None:
    """Name the node or link that is not as it must be; fill in who forwards."""
    parallel = isinstance(graph, nx.MultiGraph)  # a MultiDiGraph is one, and a DiGraph too
    if not isinstance(graph, nx.DiGraph) or parallel:
        more = ": of parallel links make one, whose bandwidth is their sum" if parallel else ""
        raise TypeError(f"a topology is a networkx.DiGraph, not a {type(graph).__name__}{more}")
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


def connect(graph: nx.DiGraph, one: Hashable, other: Hashable, bandwidth: float, latency: float, **data: Any) -> None:
    """A full-duplex cable: a link each way. An end that the graph does not have yet is a switch."""
    graph.add_nodes_from([node for node in (one, other) if node not in graph], kind="switch")
    for src, dst in ((one, other), (other, one)):
        graph.add_edge(src, dst, bandwidth=bandwidth, latency=latency, **data)
