"""What a collective of a plan's mesh takes on a described cluster: simulated once, message by message, and remembered.

All groups along an axis do the same at the same time; of those that are placed alike one is looked at, together with the groups
that share a link with it. What a collective takes is a time and a time for each byte, so two sizes tell those of all sizes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from d2lps.collectives import all_gather_into_tensor, all_reduce, all_to_all, reduce_scatter_tensor
from d2lps.collectives.all_reduce.placement import by_machine
from d2lps.comm import Communicator
from d2lps.parallel.training.plan import Plan
from d2lps.simulator import simulate
from d2lps.topology import Topology

Group = tuple[int, ...]  # ranks
MOST = 64  # ranks of a group that are simulated; what more of them take follows from two smaller groups
TOGETHER = 256  # ranks in all groups that are simulated at once
SMALL, LARGE = 1 << 20, 1 << 26  # bytes: the two sizes
AROUND, MADE_OF = 3, ("bandwidth", "latency")  # how many links away those are that may make a device's place another one


class Phase(NamedTuple):
    """A collective among all ranks of a group, among those "inside" a machine, or "across" machines, of what each then has."""

    collective: str
    level: str = "all"

    def __call__(self, comm: Communicator, nbytes: int) -> None:
        if self.level == "all":
            around(self.collective, comm, nbytes)
            return
        machines = by_machine(comm)
        mine = next(number for number, machine in enumerate(machines) if comm.rank in machine)
        place, count = machines[mine].index(comm.rank), len(machines[mine])
        group = comm.split(mine if self.level == "inside" else place)
        assert group is not None
        around(self.collective, group, nbytes if self.level == "inside" else nbytes // count)


Way = tuple[Phase, ...]  # a collective, one phase after another


class Price(NamedTuple):
    """Seconds, and seconds a byte of the whole tensor, by phase of the cheapest way. simulated: with so many ranks."""

    alphas: tuple[float, ...]
    betas: tuple[float, ...]
    simulated: int
    way: Way

    def __call__(self, nbytes: float) -> float:
        return sum(self.phases(nbytes))

    def phases(self, nbytes: float) -> list[float]:
        return [alpha + beta * nbytes for alpha, beta in zip(self.alphas, self.betas, strict=True)]

    def run(self, comm: Communicator, nbytes: int) -> None:
        for phase in self.way:
            phase(comm, nbytes)


class Prices:
    """Of one plan's mesh on one cluster: `prices("tp", "all_reduce", 100e6)` in seconds.

    Links have what collectives reach of them (`Topology.reached`). Of an axis's groups the one that takes longest stands for all.
    Of a collective that could go around one ring, or first within and then across machines, the cheaper way is taken, as
    communication libraries do. Up to 64 ranks a group is simulated; for more, alpha and beta are continued from those of its
    first 32 and 64 ranks (a slow link beyond them is not seen), and `continued` names the axis.
    ValueError if the cluster has too few devices.
    """

    def __init__(self, plan: Plan, cluster: Topology) -> None:
        if plan.ranks > len(cluster.devices):
            raise ValueError(f"a plan of {plan.ranks} ranks, and {cluster.name} has {len(cluster.devices)} devices")
        self.plan, self.cluster = plan, cluster
        self.known = cluster.remembered
        if "reached" not in self.known:
            self.known["reached"], self.known["places"] = cluster.reached(), list(_places(cluster))
        self.reached: Topology = self.known["reached"]
        self.places: list[tuple[Hashable, Hashable, Hashable]] = self.known["places"]
        self.continued: set[str] = set()
        self._prices: dict[tuple[str, str], Price] = {}
        self._groups: dict[str, list[Group]] = {}

    def __call__(self, axis: str, collective: str, nbytes: float) -> float:
        return self.price(axis, collective)(nbytes)

    def price(self, axis: str, collective: str) -> Price:
        if (axis, collective) not in self._prices:
            groups = self.groups(axis)
            self._prices[axis, collective] = self._slowest(groups, collective)
            if len(groups[0]) > MOST:
                self.continued.add(axis)
        return self._prices[axis, collective]

    def groups(self, axis: str) -> list[Group]:
        if axis not in self._groups:
            self._groups[axis] = axis_groups(self.plan, axis)
        return self._groups[axis]

    def between(self, here: int, there: int) -> Price:
        """Of the messages from one rank of the pipeline to another, all replicas at once."""
        if (key := (f"pp {here} {there}", "send")) not in self._prices:
            across = self.plan.ranks // self.plan.pp
            pairs = [(here * across + rank, there * across + rank) for rank in range(across)]
            self._prices[key] = self._slowest(pairs, "send")
        return self._prices[key]

    def _slowest(self, groups: Sequence[Group], collective: str) -> Price:
        """One of each kind of group, and of these the one that takes longest."""
        if (key := (groups[0], len(groups))) not in self.known:
            self.known[key] = {self._placed(group): group for group in reversed(groups)}
        kinds: dict[Hashable, Group] = self.known[key]
        found = [self._priced(group, kind, groups, collective, _ways(collective)) for kind, group in kinds.items()]
        return max(found, key=lambda price: price(LARGE))

    def _placed(self, group: Group) -> Hashable:
        """How a group lies: who are at one place, or below one switch, and where in it. Groups that lie alike cost the same."""
        where, order = [self.places[rank] for rank in group], dict[Hashable, int]()
        return tuple((order.setdefault(at, len(order)), within, order.setdefault(up, len(order))) for at, within, up in where)

    def _priced(
        self, group: Group, kind: Hashable, groups: Sequence[Group], collective: str, ways: Sequence[Way]
    ) -> Price:  # fmt: skip
        if len(group) == 1:
            return Price((0.0,), (0.0,), 1, ways[0])
        if (key := (kind, len(groups), collective)) not in self.known:
            found = [self._continued(way, group, groups) for way in ways if len(way) == 1 or self._even(group)]
            self.known[key] = min(found, key=lambda price: price(LARGE))
        return self.known[key]

    def _continued(self, way: Way, group: Group, groups: Sequence[Group]) -> Price:
        """Of more ranks than are simulated: a latency more for each, and bytes as (p - 1)/p of the whole, as around a ring."""
        if (size := len(group)) <= MOST:
            return self._fitted(way, group, groups, size)
        half, most = (self._fitted(way, group, groups, count) for count in (MOST // 2, MOST))
        alphas = _line(half.alphas, most.alphas, (size - MOST) / (MOST // 2))
        return most._replace(alphas=alphas, betas=_line(half.betas, most.betas, 1 - MOST / size))

    def _fitted(self, way: Way, group: Group, groups: Sequence[Group], count: int) -> Price:
        """count: so many of a group's ranks take part."""
        together = [one[:count] for one in self.together(group[:count], [one[:count] for one in groups])]
        nodes = [self.cluster.devices[rank] for one in together for rank in one]
        color = [number for number, one in enumerate(together) for _ in one]
        return two_sizes(way, self.reached.only(nodes), nodes, color, count)

    def _even(self, group: Group) -> bool:
        """Whether all its machines have as many of a group's ranks."""
        machines = Counter(str(self.cluster.devices[rank]).rpartition("/")[0] for rank in group)
        return len(set(machines.values())) == 1

    def together(self, group: Group, groups: Sequence[Group]) -> list[Group]:
        """A group, and those that share links with it, or with those that do, and so on."""
        here = {self.places[rank][0] for rank in group}
        near = [one for one in groups if any(self.places[rank][0] in here for rank in one)]
        topology = self.reached.only([self.cluster.devices[rank] for one in near for rank in one])
        used = {one: _links(topology, [self.cluster.devices[rank] for rank in one]) for one in near}
        found, links = [group], set(used[group])
        grown = True
        while grown:
            grown = False
            for one in near:
                if one not in found and used[one] & links and len(found) * len(group) < TOGETHER:
                    found.append(one)
                    links |= used[one]
                    grown = True
        return found


def axis_groups(plan: Plan, axis: str) -> list[Group]:
    """The groups along an axis, as `Mesh` makes them: tp innermost, then cp, dp, pp.

    >>> axis_groups(Plan(dp=2, tp=2), "tp"), axis_groups(Plan(dp=2, tp=2), "dp")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])

    dp: those with the same weights, cp's among them; with a zero_group "dp" is one such group, and "replicas" those that hold
    the same shard. edp: those with the same experts. ends: the first and the last stage.
    """
    data = plan.dp * plan.cp
    sharing = (plan.zero_group or data) if plan.zero else data
    stride, count = {
        "tp": (1, plan.tp), "cp": (plan.tp, plan.cp), "ep": (plan.tp, plan.ep), "edp": (plan.tp * plan.ep, data // plan.ep),
        "dp": (plan.tp, sharing), "replicas": (plan.tp * sharing, data // sharing), "pp": (plan.tp * data, plan.pp),
        "ends": (plan.tp * data * max(plan.pp - 1, 1), min(plan.pp, 2)),
    }[axis]  # fmt: skip
    first = [rank for rank in range(plan.ranks) if rank // stride % count == 0]
    if axis == "ends":
        first = list(range(plan.tp * data))
    return [tuple(range(rank, rank + stride * count, stride)) for rank in first]


def _places(cluster: Topology) -> Iterator[tuple[Hashable, Hashable, Hashable]]:
    """Of each device its machine, or switch, where it is there, and the switches above; devices with other links around them are
    somewhere else."""
    counted: Counter[Hashable] = Counter()
    graph = cluster.graph
    alike: dict[Hashable, int] = dict.fromkeys(graph, 0)
    for _ in range(AROUND):
        links = {node: sorted((alike[to], *map(data.get, MADE_OF)) for to, data in graph.adj[node].items()) for node in graph}
        alike = {node: hash((alike[node], *links[node])) for node in graph}
    above = defaultdict[Hashable, set[Hashable]](set)  # of a machine, or a switch: switches beside it
    machines = dict(graph.nodes(data="machine"))
    for here, there in graph.edges:
        if graph.nodes[there]["kind"] == "switch" and (machines[here] is None or machines[here] != machines[there]):
            above[machines[here] or here].add(there)
    for device in cluster.devices:
        machine = machines[device]
        inside = [other for other in graph.successors(device) if machines[other] == machine]
        place = machine or (inside[0] if len(inside) == 1 else cluster.name)
        yield place, (alike[device], counted[place] if len(inside) > 1 else 0), frozenset(above[place])
        counted[place] += 1


def _links(topology: Topology, nodes: list[Hashable]) -> set[int]:
    return {link for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True) for link in topology.route(here, there).links}


def _line(half: Sequence[float], most: Sequence[float], more: float) -> tuple[float, ...]:
    return tuple(there + more * (there - here) for here, there in zip(half, most, strict=True))


def two_sizes(way: Way, topology: Topology, nodes: list[Hashable], color: list[int], count: int) -> Price:
    """What two sizes take tells alpha and beta. color: of each node its group, of which so many ranks take part."""
    small, large = (_times(way, topology, nodes, color, nbytes) for nbytes in (SMALL, LARGE))
    betas = tuple((long - short) / (LARGE - SMALL) for short, long in zip(small, large, strict=True))
    return Price(tuple(short - beta * SMALL for short, beta in zip(small, betas, strict=True)), betas, count, way)


def _times(way: Way, topology: Topology, nodes: list[Hashable], color: list[int], nbytes: int) -> list[float]:
    """Seconds of each phase: from the end of the one before on all ranks to its own."""

    def program(comm: Communicator) -> list[float]:
        group = comm.split(color[comm.rank])
        assert group is not None
        return [(phase(group, nbytes), comm.now())[1] for phase in way]

    ends = [max(ended) for ended in zip(*simulate(program, topology, ranks=nodes, device="meta", trace=False), strict=True)]
    return [after - before for before, after in pairwise([0.0, *ends])]


# ---- collectives, as functions of a communicator ------------------------------------------------------------------

LEVELS = {
    "all_gather": (Phase("all_gather", "across"), Phase("all_gather", "inside")),
    "reduce_scatter": (Phase("reduce_scatter", "inside"), Phase("reduce_scatter", "across")),
    "all_reduce": (Phase("reduce_scatter", "inside"), Phase("all_reduce", "across"), Phase("all_gather", "inside")),
}  # within each machine first, or last, and across for what each rank then has: so every port of a machine is used


def _ways(collective: str) -> list[Way]:
    return [(Phase(collective),), *([LEVELS[collective]] if collective in LEVELS else [])]


def around(collective: str, comm: Communicator, nbytes: int) -> None:
    """One ring, or one exchange, of all ranks."""
    whole = torch.empty(nbytes // comm.size * comm.size, dtype=torch.uint8, device=comm.device)
    part = whole[: len(whole) // comm.size]
    if collective == "all_reduce":
        all_reduce(comm, whole, algorithm="ring")
    elif collective == "reduce_scatter":
        reduce_scatter_tensor(comm, part, whole)
    elif collective == "all_gather":
        all_gather_into_tensor(comm, whole, part)
    elif collective == "all_to_all":
        all_to_all(comm, list(torch.empty_like(whole).chunk(comm.size)), list(whole.chunk(comm.size)))
    elif collective == "pass_on":  # to the next, from the one before
        comm.sendrecv(whole, (comm.rank + 1) % comm.size, torch.empty_like(whole), (comm.rank - 1) % comm.size)
    elif comm.rank == 0:
        comm.send(whole, 1)
    else:
        comm.recv(whole, 0)
