"""All ranks of a group meet: each says something, waits until all have spoken, and hears what they said.

Everything that is done together is made of this: a barrier (nothing to say), a comparison of calls, a split, and the
beginning and end of an all-reduce. Statements lie in two places in turn: nobody speaks for the next time but one before all
have come to the next, and so have heard this one.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from d2lps.sharedmemory import futex
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE, STATEMENT, MeetingLayout
from d2lps.sharedmemory.mailbox import Mailbox

_SAID = struct.Struct("<4q3q")
_GONE = 8  # bytes from the start of a member's line: set when this member will never look here again
_CALL = 32  # bytes: what all ranks must say alike
_REMEMBERED = 64  # kinds of small tensors; to make such views takes longer than to add them up

Call = tuple[int, int, int, int]
Values = tuple[int, int, int]


class Meeting:
    """One rank's seat at the meetings of a group. `members[r]` is rank r's number in the run; `begin` the place's offset."""

    def __init__(self, arena: Arena, mailbox: Mailbox, members: Sequence[int], rank: int, begin: int) -> None:
        self.arena, self.mailbox, self.words, self.memory = arena, mailbox, arena.words, arena.memory
        self.members, self.rank, self.begin, self.layout = list(members), rank, begin, MeetingLayout(len(members))
        self.others = [other for other in range(len(members)) if other != rank]
        self._neighbours = [members[other] for other in self.others]
        self._came = [(begin + other * LINE) // 8 for other in range(len(members))]
        self.count = 0  # of the meetings so far
        self._slots: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}

    def exchange(self, call: Call, mine: Values = (0, 0, 0), text: bytes = b"") -> list[bytes]:
        """Say the same `call` as all others, and values of one's own; returns what each rank said (see `heard`)."""
        self.complete()  # the last one, if this rank has not waited for its end
        at = self._statement(self.rank, self.count + 1)
        self.memory[at : at + _SAID.size] = said = _SAID.pack(*call, *mine)
        if text:
            self.memory[at + _SAID.size : at + _SAID.size + len(text)] = text
        self.come()
        self.complete()
        heard = [said] * len(self.members)
        for other in self.others:
            at = self._statement(other, self.count)
            heard[other] = self.memory[at : at + _SAID.size]
        return heard

    def texts(self, length: int) -> list[bytes]:
        """The texts that the ranks gave with their last statements."""
        starts = [self._statement(rank, self.count) + _SAID.size for rank in range(len(self.members))]
        return [self.memory[start : start + length] for start in starts]

    def come(self) -> None:
        """Be there, without waiting for the others."""
        self.count += 1
        futex.ordering_fence()
        self.words[self._came[self.rank]] = self.count
        self.mailbox.waiting.wake_all(self._neighbours)

    def complete(self) -> None:
        """Return when all have come."""
        for other in self.others:
            if self.words[self._came[other]] < self.count:
                only = None if self.mailbox.busy() else self.members[other]
                self.mailbox.waiting.wait(partial(self._has_come, other), self._missing, only)
        futex.ordering_fence()

    def _missing(self) -> list[int]:
        return [self.members[other] for other in self.others if self.words[self._came[other]] < self.count]

    def has_all(self, number: int) -> bool:
        """Whether all have come to the meeting of that number."""
        return all(self.words[came] >= number for came in self._came)

    def wait_in_vain(self, other: int) -> None:
        """For one who will not come: an error, as soon as it is known why."""
        missing = self.members[other]
        self.mailbox.waiting.wait(lambda: False, lambda: [missing], missing)

    def _has_come(self, other: int) -> bool:
        self.mailbox.progress()
        return self.words[self._came[other]] >= self.count

    def _statement(self, rank: int, count: int) -> int:
        return self.begin + self.layout.statements + (2 * rank + count % 2) * STATEMENT

    def slots(self, turn: int, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """Where each rank puts a small tensor, every other time."""
        if (found := self._slots.get((turn, dtype, length))) is None:
            first, size = self.begin + self.layout.slots, self.layout.slot
            starts = [first + (2 * rank + turn) * size for rank in range(len(self.members))]
            if len(self._slots) == _REMEMBERED:
                self._slots.clear()
            self._slots[turn, dtype, length] = found = [self.arena.tensor(start, dtype, length) for start in starts]
        return found


class Places:
    """Where groups meet: made by the first member, and its own again when the last one has gone."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._made: list[tuple[int, int]] = []  # offset, members
        self._lock = threading.Lock()  # a rank may have several threads

    def new(self, members: int) -> int:
        """A place for a group of so many; its memory is zero."""
        with self._lock:
            self._clear_away()
            begin = self.arena.space.take(MeetingLayout(members).size)
            self._made.append((begin, members))
        return begin

    def enter(self, meeting: Meeting) -> None:
        """From now on, until this seat is garbage, the member is there."""
        word = (meeting.begin + meeting.rank * LINE + _GONE) // 8
        weakref.finalize(meeting, self.arena.words.__setitem__, word, 1).atexit = False

    def _clear_away(self) -> None:
        left = []
        for begin, members in self._made:
            if all(self.arena.words[(begin + member * LINE + _GONE) // 8] for member in range(members)):
                self.arena.space.give(begin, MeetingLayout(members).size)
            else:
                left.append((begin, members))
        self._made = left


def disagree(heard: Sequence[bytes]) -> bool:
    """Whether the ranks have called different things."""
    return len({said[:_CALL] for said in heard}) > 1


def call_of(said: bytes) -> Call:
    return _SAID.unpack(said)[:4]


def values_of(said: bytes) -> Values:
    return _SAID.unpack(said)[4:]
