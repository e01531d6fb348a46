"""Where ordinary tensors pass by: three pieces of memory in each rank's space that all ranks read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE
from d2lps.sharedmemory.meeting import Meeting, values_of

BUFFERS = 3  # a piece goes in, one is added up, one comes out
_ALL = 1 << 23  # bytes of all ranks' pieces of one step: three such fit into the cache that processors share


class Stage:
    """This rank's stage, and for the time of one collective everyone else's."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self._own = arena, (-1, 0)
        self._last: Meeting | None = None
        self._starts: list[int] = []

    def prepare(self, ranks: int) -> int:
        """This rank's offset; nobody reads what an earlier collective has left there any more."""
        if self._last is not None:
            self._last.complete()
            self._last = None
        offset, size = self._own
        if size < (wanted := BUFFERS * piece_bytes(ranks)):
            if size:
                self.arena.space.give(offset, size)
            self._own = offset, size = self.arena.space.take(wanted), wanted
        return offset

    def open(self, meeting: Meeting, heard: Sequence[bytes]) -> None:
        """From the offsets that the ranks have told one another."""
        self._last, self._starts = meeting, [values_of(said)[1] for said in heard]

    def at(self, rank: int, step: int, like: torch.Tensor) -> torch.Tensor:
        """Where a rank's piece is in some step."""
        place = self._starts[rank] + step % BUFFERS * piece_bytes(len(self._starts))
        return self.arena.tensor(place, like.dtype, like.numel())


def piece_bytes(ranks: int) -> int:
    """`piece_bytes(4) == 2_097_152`."""
    return max(1 << 17, (_ALL // ranks) // LINE * LINE)
