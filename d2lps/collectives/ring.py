"""Once round a ring: each rank sends to its right, and receives from its left, one chunk after another.

The two schedules yield a rank's messages, step by step. Who waits for them is another matter: `play` does for one ring;
several rings can take their steps side by side.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from d2lps.comm import Communicator, ReduceOp

Step = tuple[Tensor, int, Tensor, int]  # send this to that rank, and receive there from that one


class Ring(NamedTuple):
    """What one rank of a ring sees: its neighbors, and the chunks in the order in which they pass it.

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


def reduce_scatter_steps(comm: Communicator, ring: Ring, op: ReduceOp, keep: bool = False) -> Iterator[Step]:
    """Every chunk is added to by each rank that it passes; afterwards `passing[-1]` holds the sum of all ranks.

    keep: leave the rank's own chunks as they are, and add them to what came in instead.
    """
    right, left, passing = ring
    lengths = {chunk.numel() for chunk in passing}
    scratch = passing[0].new_empty(max(lengths))
    room = {length: scratch[:length] for length in lengths}  # for what comes in: one piece of memory, cut once a length
    for step in range(1, len(passing)):
        mine = passing[step]
        incoming = mine.new_empty(mine.shape) if keep else room[mine.numel()]
        yield passing[step - 1], right, incoming, left
        if keep:
            comm.combine(incoming, mine, op)
            passing[step] = incoming
        else:
            comm.combine(mine, incoming, op)


def all_gather_steps(ring: Ring) -> Iterator[Step]:
    """`passing[-1]` is complete; so is what comes from the left."""
    right, left, passing = ring
    for outgoing, incoming in pairwise([passing[-1], *passing[:-1]]):
        yield outgoing, right, incoming, left


def play(comm: Communicator, name: str, size: int, steps: Iterator[Step]) -> None:
    """Take the steps of one ring of `size` ranks; labels are "reduce-scatter 1/3" for that name and 4 ranks."""
    for number, (outgoing, right, incoming, left) in enumerate(steps, 1):
        comm.step("{} {}/{}", name, number, size - 1)
        comm.sendrecv(outgoing, right, incoming, left)
