"""Memory that comes and goes with every message: keep it, for the kernel takes long to give it."""

import ctypes
import sys
from contextlib import suppress

# From malloc.h. What is freed stays with the process, whatever its size up to 32 MB, and all threads share it.
_SETTINGS = {-8: 1, -3: 32 << 20, -1: (1 << 31) - 1}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def keep_freed_memory() -> None:
    """Linux (glibc): a process that receives 2 MB again and again gets the same 2 MB, without 512 page faults each time.

    A fresh tensor of 2 MB takes 1 ms to fill, one whose memory was there before 0.1 ms. In return a process never becomes
    smaller than it once was. To be called before a process has other threads.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            for name, value in _SETTINGS.items():
                ctypes.CDLL(None).mallopt(name, value)
