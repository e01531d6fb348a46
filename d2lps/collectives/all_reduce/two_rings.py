"""All-reduce round several rings at once: where there is a cable each way, or a mesh, one ring leaves links idle."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from d2lps.collectives.all_reduce.ring import Seat, rooms
from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator, ReduceOp


def two_rings(
    comm: Communicator,
    data: torch.Tensor,
    op: ReduceOp,
    *,
    rings: Sequence[Sequence[int]] | None = None,
    shares: Sequence[float] | None = None,
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
    cut = zip(rings, _cut(data, shares), strict=True)
    seats = [Seat.of(comm.rank, order, comm.chunks(part, comm.size)) for order, part in cut]
    _reduce_scatter(comm, seats, op)
    for seat in seats:
        divide(seat.passing[-1], op, comm.size)
    _all_gather(comm, seats)


def _reduce_scatter(comm: Communicator, seats: list[Seat], op: ReduceOp) -> None:
    """A step of every ring at once; none goes ahead of the others."""
    spare = [rooms(seat.passing) for seat in seats]
    for step in range(1, comm.size):
        comm.step(f"reduce-scatter {step}/{comm.size - 1}")
        mine = [seat.passing[step] for seat in seats]
        incoming = [room[chunk.numel()] for room, chunk in zip(spare, mine, strict=True)]
        sends = [(seat.passing[step - 1], seat.right) for seat in seats]
        comm.exchange(sends, [(chunk, seat.left) for chunk, seat in zip(incoming, seats, strict=True)])
        for chunk, other in zip(mine, incoming, strict=True):
            comm.combine(chunk, other, op)


def _all_gather(comm: Communicator, seats: list[Seat]) -> None:
    for step in range(comm.size - 1):
        comm.step(f"all-gather {step + 1}/{comm.size - 1}")
        sends = [(seat.passing[step - 1], seat.right) for seat in seats]
        comm.exchange(sends, [(seat.passing[step], seat.left) for seat in seats])


def _cut(data: torch.Tensor, shares: Sequence[float]) -> list[torch.Tensor]:
    """`[len(part) for part in _cut(torch.empty(9), (2, 1))] == [6, 3]`"""
    ends = [round(data.numel() * upto / sum(shares)) for upto in accumulate(shares)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _check(rings: Sequence[Sequence[int]], shares: Sequence[float], every: list[int]) -> None:
    for order in rings:
        if sorted(order) != every:
            raise ValueError(f"a ring must pass each of the ranks 0 to {every[-1]} once, not {list(order)}")
    if len(shares) != len(rings) or not all(share >= 0 for share in shares) or not sum(shares) > 0:
        raise ValueError(f"shares={shares!r}: {len(rings)} rings need as many numbers from 0 up, not all of them 0")
