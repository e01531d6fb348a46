"""Who holds how much of a device's memory."""

import os
from collections import Counter

from d2lps.comm.errors import OutOfMemory


class Memory:
    """An account of what is held, not the memory itself: a thousand described devices have none.

    >>> memory = Memory("gpu0", limit=16e9)
    >>> memory.hold(12_000_000_000, "weights")
    >>> memory.hold(6_000_000_000, "activations")
    Traceback (most recent call last):
    d2lps.comm.errors.OutOfMemory: 'activations' needs 6,000,000,000 B, gpu0 has 4,000,000,000 of 16,000,000,000 B left; held there: weights 12,000,000,000 B
    """  # noqa: E501

    def __init__(self, device: str, limit: float) -> None:
        self.device, self.limit = device, limit  # bytes
        self.held: Counter[str] = Counter()  # label -> bytes
        self.peak: Counter[str] = Counter()  # what was held when most was

    def hold(self, nbytes: int, label: str) -> None:
        """Take so many bytes; OutOfMemory, with who holds what, if there are not so many left."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int | float) or not 0 <= nbytes < float("inf"):
            raise ValueError(f"nbytes={nbytes!r} is not a number of bytes from 0 up")
        left = self.limit - self.held.total()
        if nbytes > left:
            holders = ", ".join(f"{name} {held:,} B" for name, held in self.held.most_common() if held) or "nothing"
            room = f"{self.device} has {left:,.0f} of {self.limit:,.0f} B left"
            raise OutOfMemory(f"{label!r} needs {nbytes:,} B, {room}; held there: {holders}")
        self.held[label] += nbytes
        if self.held.total() > self.peak.total():
            self.peak = self.held.copy()

    def release(self, nbytes: int, label: str) -> None:
        self.held[label] -= nbytes


def of_this_machine() -> float:
    """Bytes of memory that the machine has."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
