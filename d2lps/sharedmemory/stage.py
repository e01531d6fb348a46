"""Where ordinary tensors pass by: pieces of a rank's space, where it lays out what the others read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.meeting import Meeting

PIECE = 1 << 22  # bytes: those of a few ranks fit together into the cache that processors share


class Stage:
    """As many pieces of 4 MB as were ever in use at one time."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self._idle = arena, list[int]()
        self._left: list[tuple[int, Meeting, int]] = []  # offset; the meeting after which nobody reads there any more
        self._lock = threading.Lock()  # a rank may have several threads, each with a group of its own

    @contextmanager
    def piece(self, meeting: Meeting) -> Iterator[int]:
        """The offset of a piece, while this rank reads the others' pieces. They may still read its own: nobody waits for them."""
        with self._lock:
            offset = self._taken()
        try:
            yield offset
        finally:
            meeting.come()
            with self._lock:
                self._left.append((offset, meeting, meeting.count))

    def _taken(self) -> int:
        left, self._left = self._left, []
        for offset, meeting, number in left:
            if meeting.has_all(number):
                self._idle.append(offset)
            else:
                self._left.append((offset, meeting, number))
        return self._idle.pop() if self._idle else self.arena.space.take(PIECE)
