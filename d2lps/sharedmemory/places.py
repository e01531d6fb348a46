"""Where groups meet: made by the first member, and its own again when the last one has gone."""

from __future__ import annotations

import threading
import weakref

from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE, MeetingLayout
from d2lps.sharedmemory.meeting import Meeting

_GONE = 8  # bytes from the start of a member's line: set when this member will never look here again


class Places:
    """The places that this rank has made."""

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
