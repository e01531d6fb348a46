"""Prices on a cluster whose machines share links, and so predictions for it, up to 100,000 devices.

All groups of an axis do the same at the same time. So a link that K messages pass is to each of them what a link of a K-th of its
bandwidth would be; and where k of them are simulated, one of k/K. No more than a few groups have to be, however many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

from d2lps.parallel import Calibration, Plan, Prediction, Transformer
from d2lps.parallel.prediction.predict import check_memory, described
from d2lps.parallel.prediction.prices import Group, Price, Prices, Way, two_sizes
from d2lps.topology import Topology


def predict_on_pods(
    transformer: Transformer, plan: Plan, cluster: Topology, batch: int, calibration: Calibration | None = None
) -> Prediction:
    """As `parallel.predict`, and with its errors, on a cluster of `pods`.

    >>> from d2lps.planning import pods
    >>> small = Transformer(layers=2, hidden=1024, heads=16, vocab=51200, sequence=512)
    >>> predict_on_pods(small, Plan(dp=2, tp=8, pp=2), pods(2, per_pod=2, oversubscription=7), batch=8)
    <Prediction of dp=2 tp=8 pp=2: 0.01388 s, MFU 0.4%, 0.175 GB>

    Cost: half a second to some 15 seconds for 100,000 devices, and a GB for the cluster; less for a second plan on it.
    """
    job = described(transformer, plan, cluster, batch, calibration)
    check_memory(job, cluster)
    return Prediction(job, cluster, SharedPrices(plan, cluster))


class SharedPrices(Prices):
    """Prices that know of links from pods to the core. Of more than 64 ranks, some of each of their pods are simulated."""

    def __init__(self, plan: Plan, cluster: Topology) -> None:
        super().__init__(plan, cluster)
        self.known = self.known.setdefault("shared", {name: self.known[name] for name in ("reached", "places")})

    @cached_property
    def pods(self) -> list[Hashable]:
        """Of each device the switch outside of its machine; of another cluster, None."""
        if "pods" not in self.known:
            graph = self.cluster.graph
            ups = {node for node, kind in graph.nodes(data="kind") if kind == "switch" and "core" in graph.adj[node]}
            self.known["pods"] = [next((to for to in graph.adj[node] if to in ups), None) for node in self.cluster.devices]
        pods: list[Hashable] = self.known["pods"]
        return pods

    def _fitted(self, way: Way, group: Group, groups: Sequence[Group], count: int) -> Price:
        """As Prices does it, with the links to the core as narrow as all groups leave them."""
        places = self._sample(group, count)
        sampled = [tuple(one[place] for place in places) for one in groups]
        together = self.together(tuple(group[place] for place in places), sampled)
        nodes = [self.cluster.devices[rank] for one in together for rank in one]
        color = [number for number, one in enumerate(together) for _ in one]
        return two_sizes(way, self._narrowed(self.reached.only(nodes), way, together, groups), nodes, color, count)

    def _sample(self, group: Group, count: int) -> list[int]:
        """So many places in a group, of each of its pods about as many, the first of each."""
        by_pod: dict[Hashable, list[int]] = {}
        for place, rank in enumerate(group):
            by_pod.setdefault(self.pods[rank], []).append(place)
        few = -(-count // len(by_pod))
        return sorted(place for places in by_pod.values() for place in places[:few])[:count]

    def _narrowed(self, topology: Topology, way: Way, some: Sequence[Group], all_groups: Sequence[Group]) -> Topology:
        here, everywhere = (Counter(self._through(way, groups)) for groups in (some, all_groups))
        for link, messages in here.items():
            topology = topology.slowed(link, everywhere[link] / messages)
        return topology

    def _through(self, way: Way, groups: Sequence[Group]) -> Iterator[tuple[Hashable, Hashable]]:
        """The links to the core, one for each message that leaves a pod while all ranks send to their next."""
        for group in groups:
            for here, there in _edges(way, group, self.places):
                if self.pods[here] != self.pods[there]:
                    yield self.pods[here], "core"


def _edges(way: Way, group: Group, places: Sequence[tuple[Hashable, ...]]) -> Iterator[tuple[int, int]]:
    """Who sends to whom, in one step of a collective: around a ring, or from machine to machine all that have the same place."""
    machines: dict[Hashable, list[int]] = {}
    for rank in group:
        machines.setdefault(places[rank][0], []).append(rank)
    alike = len({len(ranks) for ranks in machines.values()}) == 1
    if len(way) > 1 and alike:
        for ring in zip(*machines.values(), strict=True):
            yield from zip(ring, ring[1:] + ring[:1], strict=True)
    else:
        yield from zip(group, group[1:] + group[:1], strict=True)
