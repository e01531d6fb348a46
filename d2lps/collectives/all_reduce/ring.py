"""All-reduce round a ring: every rank talks to two neighbours only, and all links are busy all the time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator, ReduceOp


def ring(comm: Communicator, data: torch.Tensor, op: ReduceOp) -> None:
    """Two times round: first every chunk collects all ranks' contributions, then every chunk's sum is passed to all.

    2(p - 1) steps; each rank sends 2(p - 1)/p n bytes, the least there is. Time: 2(p - 1) alpha + 2(p - 1)/p n beta.
    With 4 ranks and n beta = 10 ms: 15 ms. Source: Patarasuk, Yuan 2009.
    """
    around(comm, data, op, range(comm.size))


def around(comm: Communicator, data: torch.Tensor, op: ReduceOp, ranks: Sequence[int]) -> None:
    """All-reduce among some ranks, in the order of the ring that they form."""
    seat = Seat.of(comm.rank, ranks, comm.chunks(data, len(ranks)))
    reduce_scatter(comm, seat, op)
    divide(seat.passing[-1], op, comm.size)
    all_gather(comm, seat)


class Seat(NamedTuple):
    """What one rank of a ring sees: its neighbours, and the chunks in the order in which they pass it.

    The rank at place r of the ring sends chunk r in the first step, then r - 1, r - 2, ..., each after it has added its
    own part to it. The last that comes is chunk r + 1: then it has been everywhere.
    """

    right: int
    left: int
    passing: list[torch.Tensor]

    @classmethod
    def of(cls, rank: int, ranks: Sequence[int], chunks: Sequence[torch.Tensor]) -> "Seat":
        place, size = ranks.index(rank), len(ranks)
        passing = [chunks[place - step] for step in range(size)]  # Python counts negative places from the end
        return cls(ranks[(place + 1) % size], ranks[place - 1], passing)


def reduce_scatter(comm: Communicator, seat: Seat, op: ReduceOp) -> None:
    """Once round: afterwards `passing[-1]` holds the sum of all ranks."""
    right, left, passing = seat
    room = rooms(passing)
    for step, (outgoing, mine) in enumerate(pairwise(passing), 1):
        comm.step("reduce-scatter {}/{}", step, len(passing) - 1)
        incoming = room[mine.numel()]
        comm.sendrecv(outgoing, right, incoming, left)
        comm.combine(mine, incoming, op)


def all_gather(comm: Communicator, seat: Seat) -> None:
    """Once round again: `passing[-1]` is complete, and what comes from the left is too."""
    right, left, passing = seat
    for step, (outgoing, incoming) in enumerate(pairwise([passing[-1], *passing[:-1]]), 1):
        comm.step("all-gather {}/{}", step, len(passing) - 1)
        comm.sendrecv(outgoing, right, incoming, left)


def rooms(chunks: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Room to receive any one of the chunks, by their length: one piece of memory, cut once for each length."""
    lengths = {chunk.numel() for chunk in chunks}
    scratch = chunks[0].new_empty(max(lengths))
    return {length: scratch[:length] for length in lengths}
