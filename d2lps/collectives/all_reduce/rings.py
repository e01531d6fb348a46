"""All-reduce round a ring: every rank talks to two neighbors only, and all links are busy all the time.

Or round several rings at once: where there is a cable each way, or a mesh, one ring leaves links idle.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from d2lps.collectives.arguments import divide
from d2lps.collectives.ring import Ring, Step, all_gather_steps, play, reduce_scatter_steps
from d2lps.comm import Communicator, ReduceOp

Orders = Sequence[Sequence[int]]  # of ranks, one for each ring


def ring(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """Two times round: first every chunk collects all ranks' contributions, then every chunk's sum is passed to all.

    2(p - 1) steps; each rank sends 2(p - 1)/p n bytes, the least there is. Time: 2(p - 1) alpha + 2(p - 1)/p n beta.
    With 4 ranks and n beta = 10 ms: 15 ms. Source: Patarasuk, Yuan 2009.
    """
    around(comm, data, op, range(comm.size))


def around(comm: Communicator, data: Tensor, op: ReduceOp, ranks: Sequence[int]) -> None:
    """All-reduce among some ranks, in the order of the ring that they form."""
    ring = Ring.of(comm.rank, ranks, comm.chunks(data, len(ranks)))
    play(comm, "reduce-scatter", len(ranks), reduce_scatter_steps(comm, ring, op))
    divide(ring.passing[-1], op, comm.size)
    play(comm, "all-gather", len(ranks), all_gather_steps(ring))


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
    parts = zip(rings, _cut(data, shares), strict=True)
    seen = [Ring.of(comm.rank, order, comm.chunks(part, comm.size)) for order, part in parts]
    _side_by_side(comm, "reduce-scatter", [reduce_scatter_steps(comm, ring, op) for ring in seen])
    for ring in seen:
        divide(ring.passing[-1], op, comm.size)
    _side_by_side(comm, "all-gather", map(all_gather_steps, seen))


def _side_by_side(comm: Communicator, name: str, rings: Iterable[Iterator[Step]]) -> None:
    """A step of every ring at once; none goes ahead of the others."""
    for number, steps in enumerate(zip(*rings, strict=True), 1):
        comm.step("{} {}/{}", name, number, comm.size - 1)
        comm.exchange([step[:2] for step in steps], [step[2:] for step in steps])


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
