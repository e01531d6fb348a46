"""All ranks of a group meet: each says something, waits until all have spoken, and hears what they said.

Everything that is done together is made of this: a barrier (nothing to say), a comparison of calls, a split, and the
beginning and end of an all-reduce. Statements lie in two places in turn: nobody speaks for the next time but one before all
have come to the next, and so have heard this one.
"""

import struct
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from d2lps.comm.explain import disagreement
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import LINE, STATEMENT, Arena, MeetingLayout
from d2lps.sharedmemory.mailbox import Mailbox

_CALL = 128  # bytes of a statement: what all ranks must say alike; the others are the rank's own
_GONE = 8  # bytes from the start of a member's line: set when this member will never look here again
_REMEMBERED = 64  # kinds of small tensors; to make such views takes longer than to add them up


class Meeting:
    """One rank's seat at the meetings of a group. `members[r]` is rank r's number in the run; `begin` the place's offset."""

    def __init__(self, mailbox: Mailbox, members: Sequence[int], rank: int, begin: int) -> None:
        self.mailbox, self.waiting, self.arena = mailbox, mailbox.waiting, mailbox.arena
        self.words, self.memory, self.members, self.rank = self.arena.words, self.arena.memory, list(members), rank
        ranks, layout = range(len(members)), MeetingLayout(len(members))
        self.others = [other for other in ranks if other != rank]
        self._neighbours = [members[other] for other in self.others]
        self._came = [(begin + other * LINE) // 8 for other in ranks]
        starts = [begin + layout.statements + 2 * other * STATEMENT for other in ranks]
        self._statements = starts, [start + STATEMENT for start in starts]  # used in turn
        self._places, self.slot = [begin + layout.slots + 2 * other * layout.slot for other in ranks], layout.slot
        self._slots: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self.count = 0  # of the meetings so far
        self.unreadable: str | None = None  # why no rank reads another one's memory; not known before the first try
        # From now on, until this seat is garbage, the member is there.
        weakref.finalize(self, self.words.__setitem__, self._came[rank] + _GONE // 8, 1).atexit = False

    def exchange(self, call: str, mine: bytes = b"") -> list[bytes]:
        """Say what is called, which must be alike on all ranks, and something of one's own; what each rank said, as long."""
        self.complete()  # the last one, if this rank has not waited for its end
        said = call.encode().ljust(_CALL)
        begins, length = self._statements[(self.count + 1) % 2], _CALL + len(mine)
        self.memory[begins[self.rank] : begins[self.rank] + length] = said + mine
        self.meet()
        heard = [self.memory[begin : begin + length] for begin in begins]
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
        self.come()
        self.complete()

    def come(self) -> None:
        """Be there, without waiting for the others."""
        self.count += 1
        linux.ordering_fence()
        self.words[self._came[self.rank]] = self.count
        self.waiting.wake(self._neighbours, come=True)

    def complete(self) -> None:
        """Return when all have come."""
        for other in self.others:
            if self.words[self._came[other]] < self.count:
                only = None if self.mailbox.busy() else self.members[other]
                self.waiting.wait(partial(self._has_come, other), self._missing, only)
        linux.ordering_fence()

    def _has_come(self, other: int) -> bool:
        self.mailbox.progress()
        return self.words[self._came[other]] >= self.count

    def _missing(self) -> list[int]:
        return [self.members[other] for other in self.others if self.words[self._came[other]] < self.count]

    def is_over(self, number: int) -> bool:
        """Whether all have come to the meeting of that number."""
        return all(self.words[came] >= number for came in self._came)

    def slots(self, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """Where each rank puts a small tensor before the next meeting, to be read after it."""
        self.complete()
        turn = (self.count + 1) % 2
        key = turn, dtype, length
        if key not in self._slots:
            if len(self._slots) == _REMEMBERED:
                self._slots.clear()
            self._slots[key] = [self.arena.tensor(place + turn * self.slot, dtype, length) for place in self._places]
        return self._slots[key]


def new_place(arena: Arena, members: int) -> int:
    """Where a group of so many can meet: a piece of this rank's space, until the last of them has gone."""
    begin = arena.pool.take(MeetingLayout(members).size)
    arena.memory[begin : begin + members * LINE] = bytes(members * LINE)
    gone = [(begin + member * LINE + _GONE) // 8 for member in range(members)]
    arena.pool.give(begin, unused=lambda: all(arena.words[at] for at in gone))
    return begin
