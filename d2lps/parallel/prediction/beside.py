"""Two collectives of a plan's mesh at the same time: how much longer each takes where they share links, simulated once.

Links are shared by messages, and not by collectives: an all-to-all with many messages under way leaves little of a link to a
ring that has one. So each of the two is slowed by a factor of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import permutations

from d2lps.comm import Communicator
from d2lps.parallel.prediction.prices import LARGE, MOST, TOGETHER, Group, Phase, Prices, axis_groups
from d2lps.simulator import simulate

Asked = tuple[str, str, int]  # an axis, a collective, and which phase of it
FEWER = MOST // 4  # ranks of a group that take part: what two do to one another hardly depends on how many there are


def slowed(prices: Prices, one: Asked, other: Asked) -> float:
    """How many times as long a phase of a collective takes beside one of another: 2, if they share all their links evenly.

    >>> prices = Prices(Plan(dp=8, tp=2, zero=3), multi_node(dgx_a100(), 2, ports="node"))                  # doctest: +SKIP
    >>> slowed(prices, ("dp", "all_gather", 0), ("dp", "reduce_scatter", 1))        # both across           # doctest: +SKIP
    2.0

    Each is simulated alone and both at once, in all groups that meet, with so many bytes that they take about equally long; and
    not at all, if no message of one could take a link that a message of the other could. Remembered for the cluster, as prices
    are.
    """
    groups = [axis_groups(prices.plan, axis) for axis, *_ in (one, other)]
    mesh = [(some[0], len(some), *asked[1:]) for some, asked in zip(groups, (one, other), strict=True)]
    if (key := ("slowed", *mesh)) not in prices.known:
        found = _slowed(prices, groups, (one, other))
        prices.known["slowed", mesh[1], mesh[0]], prices.known[key] = found[1], found[0]
    return prices.known[key]


def _slowed(prices: Prices, groups: list[list[Group]], both: Sequence[Asked]) -> tuple[float, float]:
    """From when each ends alone, and beside the other: the longer one is slowed until the other has ended."""
    ways = [(prices.price(*asked), number) for *asked, number in both]
    whole = max(price.phases(LARGE)[number] for price, number in ways)
    sizes = [round((whole - price.alphas[number]) / price.betas[number]) for price, number in ways]
    todo = [(price.way[number], nbytes) for (price, number), nbytes in zip(ways, sizes, strict=True)]
    ranks = _meeting(prices, groups)
    if _links(prices, ranks, groups[0], todo[0][0]).isdisjoint(_links(prices, ranks, groups[1], todo[1][0])):
        return 1.0, 1.0
    alone = [_ends(prices, ranks, [some], [one])[0] for some, one in zip(groups, todo, strict=True)]
    ends = _ends(prices, ranks, groups, todo)
    short, long = sorted((0, 1), key=ends.__getitem__)
    done = alone[long] - (ends[long] - ends[short])  # of the longer one, when the shorter one ends
    found = {short: max(1.0, ends[short] / alone[short]), long: max(1.0, ends[short] / done)}
    return found[0], found[1]


def _meeting(prices: Prices, groups: list[list[Group]]) -> list[int]:
    """Ranks of one group, of those along its axis that share links with it, and of all that have a rank of these."""
    few = [[group[:FEWER] for group in some] for some in groups]
    ranks = {rank for group in prices.together(few[0][0], few[0]) for rank in group}
    for some in reversed(few):
        for group in [group for group in some if not ranks.isdisjoint(group)]:
            if len(ranks.union(group)) <= TOGETHER:
                ranks.update(group)
    return sorted(ranks)


def _links(prices: Prices, ranks: Sequence[int], groups: list[Group], phase: Phase) -> set[int]:
    """All that messages of a phase could take, whichever two of those that take part together send one another any."""
    taking_part = defaultdict[Hashable, list[Hashable]](list)
    for number, group in enumerate(groups):
        places: Counter[str] = Counter()
        for rank in (rank for rank in group if rank in ranks):
            machine = str(prices.cluster.devices[rank]).rpartition("/")[0]
            level = {"all": 0, "inside": machine, "across": places[machine]}[phase.level]
            taking_part[number, level].append(prices.cluster.devices[rank])
            places[machine] += 1
    pairs = [pair for nodes in taking_part.values() for pair in permutations(nodes, 2)]
    return {link for here, there in pairs for link in prices.reached.route(here, there).links}


def _ends(
    prices: Prices, ranks: Sequence[int], groups: list[list[Group]], todo: Sequence[tuple[Phase, int]]
) -> list[float]:  # fmt: skip
    """When each of some phases of so many bytes ends, if they begin at the same time, among these ranks."""
    colors = [{rank: number for number, group in enumerate(some) for rank in group} for some in groups]

    def program(comm: Communicator) -> list[float]:
        ends = [0.0] * len(todo)

        def one(comm: Communicator, number: int) -> None:
            phase, nbytes = todo[number]
            if comm.size > 1:
                phase(comm, nbytes)
            ends[number] = comm.now()

        meshes = [comm.split(color[ranks[comm.rank]]) for color in colors]
        for work in [mesh.start(one, number) for number, mesh in enumerate(meshes) if mesh is not None]:
            work.wait()
        return ends

    nodes: list[Hashable] = [prices.cluster.devices[rank] for rank in ranks]
    run = simulate(program, prices.reached.only(nodes), ranks=nodes, device="meta", trace=False)
    return [max(ends[number] for ends in run) for number in range(len(todo))]
