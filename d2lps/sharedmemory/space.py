"""A rank's own part of the shared file: which bytes are taken, and whether the machine has memory for more.

The file is far longer than the memory of the machine, and a page of it takes memory only once it was asked for. Asking is
what can fail: a page that the kernel cannot provide at the moment when it is touched would kill the process.
"""

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PAGE = 4096
_SMALL = 1 << 20  # not worth a look at the machine's memory
_REMOVE = getattr(mmap, "MADV_REMOVE", 9)
_GROUPS = Path("/sys/fs/cgroup")
# A container's limit, and how much of it is used: in the second version of control groups, and in the first.
_LIMITS = {"memory.max": "memory.current", "memory/memory.limit_in_bytes": "memory/memory.usage_in_bytes"}


class Space:
    """First fit over a list of holes.

    >>> space = Space(descriptor, memory, begin=0, end=1 << 40)             # doctest: +SKIP
    >>> space.take(5000), space.take(100)                                   # doctest: +SKIP
    (0, 8192)
    """

    def __init__(self, descriptor: int, memory: mmap.mmap, begin: int, end: int) -> None:
        self.descriptor, self.memory = descriptor, memory
        self._taken: dict[int, int] = {}  # from which offset on, and how many bytes
        self._kept: defaultdict[int, list[tuple[int, Callable[[], bool]]]] = defaultdict(list)  # by size
        self._holes, self._given = [(begin, end)], list[tuple[int, int]]()
        self._lock = threading.Lock()  # a rank may have several threads

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` with real memory behind them; MemoryError, with the bytes, where there is not enough.

        They hold whatever they held.
        """
        size = pages(nbytes)
        with self._lock:
            kept = self._kept.get(size, [])  # the last that came back is still in the processor's cache
            if (last := next((at for at in reversed(range(len(kept))) if kept[at][1]()), -1)) >= 0:
                return kept.pop(last)[0]
            if size > (free := self.free(nbytes)):
                raise MemoryError(f"{nbytes:,} bytes of shared memory are needed; {free:,} are left")
            self._merge()
            index = next((index for index, (begin, end) in enumerate(self._holes) if end - begin >= size), -1)
            if index < 0:
                raise MemoryError(f"{nbytes:,} bytes of shared memory are needed; nowhere are so many left in a row")
            begin, end = self._holes[index]
            try:
                os.posix_fallocate(self.descriptor, begin, size)
            except OSError as error:
                raise MemoryError(f"{size:,} bytes of shared memory are needed: {error.strerror}") from None
            self._holes[index] = (begin + size, end)
            self._taken[begin] = size
        return begin

    def free(self, nbytes: int) -> int:
        """How many bytes may be taken, as far as that matters to one who wants `nbytes`: to look takes 0.1 ms."""
        return available() if nbytes > _SMALL else 1 << 62

    def give(self, begin: int) -> None:
        """Hand back what was taken; its pages are the machine's again at once. May come whenever garbage is collected."""
        size = self._taken.pop(begin)
        self.memory.madvise(_REMOVE, begin, size)
        self._given.append((begin, begin + size))  # the list of holes may be in somebody's hands just now

    def keep(self, begin: int, unused: Callable[[], bool] = lambda: True) -> None:
        """Hand back what somebody will soon want again, as `roomy`: to take new pages costs more than a message.

        Others may still use it, until `unused()`.
        """
        with self._lock:
            self._kept[self._taken[begin]].append((begin, unused))

    def _merge(self) -> None:
        """Put what came back since beside the holes that it touches."""
        given, self._given = self._given, []
        holes, self._holes = sorted(self._holes + given), []
        for begin, end in holes:
            if self._holes and self._holes[-1][1] == begin:
                begin = self._holes.pop()[0]
            self._holes.append((begin, end))


def pages(nbytes: int) -> int:
    """`pages(5000) == 8192`."""
    return -(-nbytes // PAGE) * PAGE


def roomy(nbytes: int) -> int:
    """At least so many bytes, and a few more: there are few such sizes, so that what was kept is used again."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def available() -> int:
    """The bytes that this process may still use: the machine's, or what is left of a container's limit."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in _LIMITS.items():
        with suppress(OSError, ValueError):  # no such file, or "max"
            free = min(free, int((_GROUPS / limit).read_text()) - int((_GROUPS / used).read_text()))
    return max(free, 0)
