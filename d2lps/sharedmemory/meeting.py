"""All ranks of a group meet: each says something, waits until all have spoken, and hears what they said.

Everything that is done together is made of this: a barrier (nothing to say), a comparison of calls, a split, and the
beginning and end of an all-reduce. Statements lie in two places in turn: nobody speaks for the next time but one before all
have come to the next, and so have heard this one.
"""

import struct
import weakref
from collections.abc import Sequence

import torch

from d2lps.comm.explain import disagreement
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import LINE, STATEMENT, Arena, Place
from d2lps.sharedmemory.mailbox import Mailbox

_CALL = 128  # bytes of a statement: what all ranks must say alike; the others are the rank's own


class Meeting:
    """One rank's part in the meetings of a group. `members[r]` is rank r's number in the run; `begin` the place's offset."""

    def __init__(self, mailbox: Mailbox, members: Sequence[int], rank: int, begin: int) -> None:
        self.mailbox, self.waiting, self.arena = mailbox, mailbox.waiting, mailbox.arena
        self.memory, self.members, self.rank = self.arena.memory, list(members), rank
        place, ranks = Place(len(members)), range(len(members))
        self.slot, self.others = place.slot, [other for other in ranks if other != rank]
        first = begin + len(members) * LINE
        self._seats = [[first + (2 * other + turn) * place.seat for other in ranks] for turn in range(2)]
        self.count = 0  # of the meetings so far
        self.unreadable: str | None = None  # why no rank reads another one's memory; not known before the first try
        self.came, gone = self.arena.columns(begin, len(members), 2)
        weakref.finalize(self, gone.__setitem__, rank, 1).atexit = False  # until this is garbage, the member is there

    def exchange(self, call: str, mine: bytes = b"") -> list[bytes]:
        """Say what is called, which must be alike on all ranks, and something of one's own; what each rank said, as long."""
        seats, length = self._seats[(self.count + 1) % 2], _CALL + len(mine)
        self.memory[seats[self.rank] : seats[self.rank] + length] = call.encode().ljust(_CALL) + mine
        self.meet()
        heard = [self.memory[seat : seat + length] for seat in seats]
        if len({words[:_CALL] for words in heard}) > 1:
            self._disagree([words[:_CALL].decode().rstrip() for words in heard])
        return [words[_CALL:] for words in heard] if mine else []

    def exchange_numbers(self, call: str, *mine: int) -> list[tuple[int, ...]]:
        numbers = struct.Struct(f"<{len(mine)}q")
        return [numbers.unpack(said) for said in self.exchange(call, numbers.pack(*mine))]

    def _disagree(self, calls: list[str]) -> None:
        if len({call.partition("(")[0] for call in calls}) > 1:  # one at a barrier, one at a split: neither is ever complete
            self.waiting.wait_in_vain()  # as in every world: the launcher will see, and explain
        raise disagreement(calls, self.members)

    def meet(self) -> None:
        """Come, and return when all have; the last one wakes the others."""
        self.count += 1
        linux.fence()
        self.came[self.rank] = self.count
        linux.fence(full=True)  # of two that come at the same time, one at least sees both
        if self._is_over():
            self.waiting.wake([self.members[other] for other in self.others])
        else:
            self.waiting.wait(self._look, self._missing)
        linux.fence()

    def _look(self) -> bool:
        self.mailbox.progress()
        return self._is_over()

    def _is_over(self) -> bool:
        return min(self.came) >= self.count

    def _missing(self) -> list[int]:
        return [self.members[other] for other in self.others if self.came[other] < self.count]

    def slots(self, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """Where each rank puts a small tensor before the next meeting, to be read after it."""
        return [self.arena.tensor(seat + STATEMENT, dtype, length) for seat in self._seats[(self.count + 1) % 2]]


def new_place(arena: Arena, members: int) -> int:
    """Where a group of so many can meet: a piece of this rank's space, until the last of them has gone."""
    begin = arena.space.take(Place(members).size)
    arena.memory[begin : begin + members * LINE] = bytes(members * LINE)
    _, gone = arena.columns(begin, members, 2)
    arena.space.keep(begin, unused=lambda: all(gone))
    return begin
