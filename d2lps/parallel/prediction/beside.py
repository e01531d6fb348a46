"""Two collectives of a plan's mesh at the same time: how much longer each takes where they share links, simulated once.

Links are shared by messages, and not by collectives: an all-to-all with many messages under way leaves little of a link to a
ring that has one. So each of the two is slowed by a factor of its own.
"""

from collections.abc import Hashable, Sequence

from d2lps.comm import Communicator
from d2lps.parallel.prediction.prices import LARGE, MOST, TOGETHER, Group, Phase, Prices, axis_groups
from d2lps.simulator import simulate

Asked = tuple[str, str, int]  # an axis, a collective, and which phase of it
FEWER = MOST // 2  # ranks of a group that take part: what two do to one another hardly depends on how many there are


def slowed(prices: Prices, one: Asked, other: Asked) -> float:
    """How many times as long a phase of a collective takes beside one of another: 2, if they share all their links evenly.

    >>> prices = Prices(Plan(dp=8, tp=2, zero=3), multi_node(dgx_a100(), 2, ports="node"))                  # doctest: +SKIP
    >>> slowed(prices, ("dp", "all_gather", 0), ("dp", "reduce_scatter", 1))        # both across           # doctest: +SKIP
    2.0

    Both are simulated at once, in all groups that meet, with so many bytes that alone they would take equally long. Remembered
    for the cluster, as prices are.
    """
    groups = [axis_groups(prices.plan, axis) for axis, *_ in (one, other)]
    mesh = [(some[0], len(some), *asked[1:]) for some, asked in zip(groups, (one, other), strict=True)]
    if (key := ("slowed", *mesh)) not in prices.known:
        found = _slowed(prices, groups, (one, other))
        prices.known["slowed", mesh[1], mesh[0]], prices.known[key] = found[1], found[0]
    return prices.known[key]


def _slowed(prices: Prices, groups: list[list[Group]], both: Sequence[Asked]) -> tuple[float, float]:
    """From when each ends, which alone would both have ended at `whole`: the longer one is slowed until the other has ended."""
    alone = [(prices.price(*asked), number) for *asked, number in both]
    whole = max(price.phases(LARGE)[number] for price, number in alone)
    sizes = [round((whole - price.alphas[number]) / price.betas[number]) for price, number in alone]
    ends = _at_once(prices, _meeting(prices, groups), groups, [price.way[number] for price, number in alone], sizes)
    short, long = sorted(ends)
    found = max(1.0, short / whole), max(1.0, short / (whole - (long - short)))
    return found if ends[0] == short else (found[1], found[0])


def _meeting(prices: Prices, groups: list[list[Group]]) -> list[int]:
    """Ranks of one group, of those along its axis that share links with it, and of all that have a rank of these."""
    few = [[group[:FEWER] for group in some] for some in groups]
    ranks = {rank for group in prices.together(few[0][0], few[0]) for rank in group}
    for some in reversed(few):
        for group in [group for group in some if not ranks.isdisjoint(group)]:
            if len(ranks.union(group)) <= TOGETHER:
                ranks.update(group)
    return sorted(ranks)


def _at_once(
    prices: Prices, ranks: Sequence[int], groups: list[list[Group]], phases: Sequence[Phase], sizes: Sequence[int]
) -> list[float]:  # fmt: skip
    """When each of two phases that begin at the same time ends, among these ranks."""
    colors = [{rank: number for number, group in enumerate(some) for rank in group} for some in groups]

    def program(comm: Communicator) -> list[float]:
        ends = [0.0, 0.0]

        def one(comm: Communicator, number: int) -> None:
            if comm.size > 1:
                phases[number](comm, sizes[number])
            ends[number] = comm.now()

        works = [comm.split(color[ranks[comm.rank]]).start(one, number) for number, color in enumerate(colors)]
        for work in works:
            work.wait()
        return ends

    nodes: list[Hashable] = [prices.cluster.devices[rank] for rank in ranks]
    run = simulate(program, prices.reached.only(nodes), ranks=nodes, device="meta", trace=False)
    return [max(ends[number] for ends in run) for number in (0, 1)]
