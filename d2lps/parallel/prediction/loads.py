"""What collectives put on links, and how fast those that are on some links at the same time get on.

A collective's messages wait for one another: around a ring none gets ahead. So all of one have the same rate; and links are
shared by messages, not by collectives. Rates rise together until a link is full, which stops all that go over it, and the others
go on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from d2lps.parallel.prediction.prices import MOST, SMALL, Group, Phase, Prices
from d2lps.topology import Topology

Link = tuple[Hashable, Hashable]
FIRST = 1024  # ranks of a stage whose groups are looked at: links farther away are shared as these are
LARGE = 4096  # devices of a cluster, in whose whole a single route takes a while to find


@dataclass(eq=False)
class LinkLoad:
    """share: what one byte of each message keeps each link busy for, in seconds. rate: of a message, bytes a second, if alone."""

    share: dict[Link, float]
    rate: float
    known: dict[LinkLoad, bool] = field(default_factory=dict)

    def meets(self, other: LinkLoad) -> bool:
        """Whether they have a link in common."""
        if other not in self.known:
            self.known[other] = other.known[self] = not self.share.keys().isdisjoint(other.share)
        return self.known[other]


def speeds(loads: Sequence[LinkLoad]) -> list[float]:
    """How fast each is beside the others: 1 is as fast as alone.

    >>> ring, other = LinkLoad({("a", "b"): 1.0}, 1.0), LinkLoad({("a", "b"): 1.0, ("b", "c"): 4.0}, 0.25)
    >>> speeds([ring, ring]), speeds([ring, other])     # the other one's messages wait elsewhere for most of the time
    ([0.5, 0.5], [0.75, 1.0])
    """
    room = dict.fromkeys((link for load in loads for link in load.share), 1.0)
    found, rising = [0.0] * len(loads), dict(enumerate(loads))
    while rising:
        wanted: Counter[Link] = Counter()
        for load in rising.values():
            wanted.update(load.share)
        full = {link: room[link] / share for link, share in wanted.items()}
        most = {number: min(load.rate, *map(full.__getitem__, load.share)) for number, load in rising.items()}
        least = min(most.values())
        for number in [number for number, rate in most.items() if rate <= least * (1 + 1e-12)]:
            load = rising.pop(number)
            found[number] = least / load.rate
            for link, share in load.share.items():
                room[link] -= least * share
    return found


class LinkLoads:
    """Of one plan's mesh on one cluster, by the place of a stage's ranks in the pipeline; remembered as prices are."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.across = prices.plan.ranks // prices.plan.pp
        self._loads: dict[tuple[int, str, str, int], LinkLoad] = {}

    def of(self, place: int, axis: str, collective: str, number: int) -> LinkLoad:
        """Of one phase of a collective, in all groups of a stage's ranks."""
        if (asked := (place, axis, collective, number)) not in self._loads:
            phase, first = self.prices.price(axis, collective).way[number], place * self.across
            here = range(first, first + min(self.across, FIRST))
            groups = [group[:MOST] for group in self.prices.groups(axis) if group[0] in here or axis == "ends"]
            self._loads[asked] = self._remembered(phase, groups)
        return self._loads[asked]

    def all(self, place: int, axis: str, collective: str) -> list[LinkLoad]:
        """Of all its phases that take any time."""
        seconds = self.prices.price(axis, collective).phases(SMALL)
        return [self.of(place, axis, collective, number) for number, time in enumerate(seconds) if time > 0]

    def between(self, here: int, there: int) -> LinkLoad:
        """Of the messages from a stage's ranks to those of another one."""
        if (asked := (here, "pp", "send", there)) not in self._loads:
            firsts = here * self.across, there * self.across
            pairs = [(firsts[0] + rank, firsts[1] + rank) for rank in range(min(self.across, FIRST))]
            self._loads[asked] = self._remembered(Phase("send"), pairs)
        return self._loads[asked]

    def _remembered(self, phase: Phase, groups: Sequence[Group]) -> LinkLoad:
        how = phase.collective if phase.collective in ("all_to_all", "send") else "ring"
        if (key := ("load", groups[0], len(groups), how, phase.level)) not in self.prices.known:
            self.prices.known[key] = self._counted(how, [part for group in groups for part in self._parts(group, phase.level)])
        load: LinkLoad = self.prices.known[key]
        return load

    def _parts(self, group: Group, level: str) -> Iterable[Sequence[int]]:
        """Who of a group take part in it with one another."""
        if level == "all":
            return [group]
        inside, across = defaultdict[str, list[int]](list), defaultdict[int, list[int]](list)
        for rank in group:
            machine = inside[str(self.prices.cluster.devices[rank]).rpartition("/")[0]]
            across[len(machine)].append(rank)
            machine.append(rank)
        return (inside if level == "inside" else across).values()

    def _counted(self, how: str, groups: Sequence[Sequence[int]]) -> LinkLoad:
        """Step by step: an all-to-all's take turns on a link, and count by how many there are at a time."""
        devices, topology = self.prices.cluster.devices, self._near({rank for group in groups for rank in group})
        shares: list[Counter[int]] = []
        for step in _steps(how, groups):
            shares.append(Counter())
            for here, there in step:
                for link in topology.route(devices[here], devices[there]).links:
                    shares[-1][link] += 1 / topology.bandwidth[link]  # type: ignore[assignment]
        busy = sum(max(step.values()) for step in shares)
        total = sum(shares, Counter())
        return LinkLoad({topology.links[link]: share / len(shares) for link, share in total.items()}, len(shares) / busy)

    def _near(self, ranks: set[int]) -> Topology:
        """Of a large cluster the first ranks of each stage alone, or these."""
        devices = self.prices.cluster.devices
        if len(devices) <= LARGE:
            return self.prices.reached
        firsts = range(0, self.prices.plan.ranks, self.across)
        near = {rank for first in firsts for rank in range(first, first + min(self.across, FIRST))}
        near = near if ranks <= near else ranks
        if (key := ("near", frozenset(near))) not in self.prices.known:
            self.prices.known[key] = self.prices.reached.only([devices[rank] for rank in near])
        found: Topology = self.prices.known[key]
        return found


def _steps(how: str, groups: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, int]]]:
    """Who sends to whom at a time."""
    most = max(map(len, groups))
    for ahead in range(1, most if how == "all_to_all" else 2):
        yield [
            (rank, group[(place + ahead) % len(group)])
            for group in groups
            for place, rank in enumerate(group[:1] if how == "send" else group)
            if ahead < len(group)
        ]
