"""Once round a ring: each rank sends to its right, and receives from its left, one chunk after another.

Several rings, each with its part of the data, can take their steps side by side: one is the smallest case of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from d2lps.comm import Communicator, ReduceOp

Step = tuple[tuple[Tensor, int], tuple[Tensor, int]]  # send this to that rank, and receive there from that one


class Ring(NamedTuple):
    """What one rank of a ring sees: its neighbours, and the chunks in the order in which they pass it.

    The r-th rank of the ring sends chunk r in the first step, then r - 1, r - 2, ..., each after it has added its own part
    to it. The last that comes is chunk r + 1: then it has been everywhere.
    """

    right: int
    left: int
    passing: list[Tensor]

    @classmethod
    def of(cls, rank: int, ranks: Sequence[int], chunks: Sequence[Tensor]) -> "Ring":
        """The ring through `ranks` in that order, as `rank` sees it; one chunk for each of them."""
        r, size = ranks.index(rank), len(ranks)
        passing = [chunks[r - step] for step in range(size)]  # Python counts what is below 0 from the end
        return cls(ranks[(r + 1) % size], ranks[r - 1], passing)


def reduce_scatter_round(comm: Communicator, rings: Sequence[Ring], op: ReduceOp, keep: bool = False) -> None:
    """Every chunk is added to by each rank that it passes; afterwards `passing[-1]` holds the sum of all ranks.

    keep: leave the rank's own chunks as they are, and add them to what came in instead.
    """
    _play(comm, "reduce-scatter", rings, [_reduce_scatter(comm, ring, op, keep) for ring in rings])


def all_gather_round(comm: Communicator, rings: Sequence[Ring]) -> None:
    """`passing[-1]` is complete, and goes to all; afterwards all chunks are."""
    _play(comm, "all-gather", rings, map(_all_gather, rings))


def _play(comm: Communicator, name: str, rings: Sequence[Ring], schedules: Iterable[Iterator[Step]]) -> None:
    """A step of every ring at once, none goes ahead of the others; labels are "reduce-scatter 1/3" for that name and 4 ranks."""
    last = len(rings[0].passing) - 1
    for number, steps in enumerate(zip(*schedules, strict=True), 1):
        comm.step("{} {}/{}", name, number, last)
        sends, receives = zip(*steps)  # noqa: B905 - a step has two parts; to say so would cost a thirtieth of a message
        comm.exchange(sends, receives)


def _reduce_scatter(comm: Communicator, ring: Ring, op: ReduceOp, keep: bool) -> Iterator[Step]:
    right, left, passing = ring
    lengths = {chunk.numel() for chunk in passing}
    scratch = passing[0].new_empty(max(lengths))
    room = {length: scratch[:length] for length in lengths}  # for what comes in: one piece of memory, cut once a length
    for step in range(1, len(passing)):
        mine = passing[step]
        incoming = mine.new_empty(mine.shape) if keep else room[mine.numel()]
        yield (passing[step - 1], right), (incoming, left)
        passing[step], added = (incoming, mine) if keep else (mine, incoming)
        comm.combine(passing[step], added, op)


def _all_gather(ring: Ring) -> Iterator[Step]:
    right, left, passing = ring
    for outgoing, incoming in pairwise([passing[-1], *passing[:-1]]):
        yield (outgoing, right), (incoming, left)
