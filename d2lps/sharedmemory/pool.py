"""Pieces of a rank's space that come and go with every message: kept for the next one, by their size."""

from collections import defaultdict

from d2lps.sharedmemory.layout import PAGE
from d2lps.sharedmemory.space import Space


class Pool:
    """As many pieces of a size as were ever out at one time."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._idle: defaultdict[int, list[int]] = defaultdict(list)
        self._size: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """The offset of a piece of at least so many bytes."""
        size = rounded(nbytes)
        if idle := self._idle[size]:
            return idle.pop()  # the last that came back is still in the processor's cache
        begin = self.space.take(size)
        self._size[begin] = size
        return begin

    def give(self, begin: int) -> None:
        self._idle[self._size[begin]].append(begin)


def rounded(nbytes: int) -> int:
    """Few sizes, so that a piece is used again: `rounded(128) == 4096`, `rounded(5000) == 8192`."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
