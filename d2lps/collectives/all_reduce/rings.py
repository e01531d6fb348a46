"""All-reduce round a ring: every rank talks to two neighbours only, and all links are busy all the time.

Or round several rings at once: where there is a cable each way, or a mesh, one ring leaves links idle.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from d2lps.collectives.arguments import divide
from d2lps.collectives.ring import Ring, all_gather_round, reduce_scatter_round
from d2lps.comm import Communicator, ReduceOp

Orders = Sequence[Sequence[int]]  # of ranks, one for each ring


def ring(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """Two times round: first every chunk collects all ranks' contributions, then every chunk's sum is passed to all.

    2(p - 1) steps; each rank sends 2(p - 1)/p n bytes, the least there is. Time: 2(p - 1) alpha + 2(p - 1)/p n beta.
    With 4 ranks and n beta = 10 ms: 15 ms. Source: Patarasuk, Yuan 2009.
    """
    around(comm, [data], op, [range(comm.size)])


def around(comm: Communicator, parts: Sequence[Tensor], op: ReduceOp, orders: Orders) -> None:
    """All-reduce among some ranks: each part of the data round a ring through them, all rings side by side."""
    ways = zip(orders, parts, strict=True)
    rings = [Ring.of(comm.rank, order, comm.chunks(part, len(order))) for order, part in ways]
    reduce_scatter_round(comm, rings, op)
    for ring in rings:
        divide(ring.passing[-1], op, comm.size)
    all_gather_round(comm, rings)


def two_rings(
    comm: Communicator, data: Tensor, op: ReduceOp, *, rings: Orders | None = None, shares: Sequence[float] | None = None
) -> None:
    """Cut the data in two, and send one half round each way; or a share of it round each of the `rings` given.

    rings: orders of all ranks; shares: how much of the data each takes, as 2:1 on a DGX-1, whose first ring has doubled
    links: `all_reduce(comm, tensor, algorithm="two_rings", rings=dgx1_rings(), shares=(2, 1))`.
    2(p - 1) steps; each rank sends 2(p - 1)/p n bytes. Time, if the rings share no link, and ring i has share s_i:
    2(p - 1) alpha + 2(p - 1)/p n max(s_i beta_i). On a DGX-1, 160 MB and 18 GB/s a link: 2 * 7/8 * 160 MB / 54 GB/s =
    5.185 ms. Source: Zhang et al., Dive into Deep Learning, "Parameter Servers" (the DGX-1's rings).
    """
    every = list(range(comm.size))
    rings = [every, every[::-1]] if rings is None else rings
    shares = [1.0] * len(rings) if shares is None else shares
    _check(rings, shares, every)
    around(comm, _cut(data, shares), op, rings)


def _cut(data: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """`[len(part) for part in _cut(torch.empty(9), (2, 1))] == [6, 3]`"""
    ends = [round(data.numel() * upto / sum(shares)) for upto in accumulate(shares)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _check(rings: Orders, shares: Sequence[float], every: list[int]) -> None:
    for order in rings:
        if sorted(order) != every:
            raise ValueError(f"a ring must pass each of the ranks 0 to {every[-1]} once, not {list(order)}")
    if len(shares) != len(rings) or not all(share >= 0 for share in shares) or not sum(shares) > 0:
        raise ValueError(f"shares={shares!r}: {len(rings)} rings need as many numbers from 0 up, not all of them 0")
