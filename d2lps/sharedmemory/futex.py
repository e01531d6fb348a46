"""Sleep until a number in memory changes: Linux's futex, on which locks and semaphores are built.

    wait(address, seen, 0.1)    # sleep, unless the number at `address` is no longer `seen`
    wake(address)               # whoever sleeps there goes on

The kernel compares and falls asleep in one go, so a wake between the look and the sleep is not lost. A call takes about a
microsecond, a sleeper about ten more until it runs. Source: Franke, Russell, Kirkwood 2002; futex(2).
"""

import ctypes
import math
import platform
import sys
import threading

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "loongarch64": 98}  # of the system call
_WAIT, _WAKE, _EVERYONE = ctypes.c_long(0), ctypes.c_long(1), ctypes.c_long(2**31 - 1)
_ZERO = ctypes.c_long(0)

here = sys.platform == "linux" and platform.machine() in _NUMBERS
_number = ctypes.c_long(_NUMBERS.get(platform.machine(), -1))
# The one lets go of the interpreter's lock, so that other threads run while this one sleeps; the other is faster.
_sleeping = ctypes.CDLL(None).syscall if here else None
_passing = ctypes.PyDLL(None).syscall if here else None


class _Span(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def wait(address: ctypes.c_void_p, seen: int, seconds: float) -> None:
    """Sleep until woken, for `seconds` at most; not at all if the 32-bit number there is not `seen`. May wake for nothing."""
    assert _sleeping is not None
    fraction, whole = math.modf(seconds)
    span = _Span(int(whole), int(fraction * 1e9))
    _sleeping(_number, address, _WAIT, ctypes.c_long(seen), ctypes.byref(span), None, _ZERO)


def wake(address: ctypes.c_void_p) -> None:
    """Wake all that sleep at this address."""
    assert _passing is not None
    _passing(_number, address, _WAKE, _EVERYONE, None, None, _ZERO)


# ---- order ----------------------------------------------------------------------------------------------------------
# Processors reorder. On x86 stores are seen by others in the order in which they were made, and loads are made in order;
# only a load may overtake an earlier store. Elsewhere nothing is certain. Python has no memory barrier, but what takes a lock
# holds one, and so does every call of futex (its sleepers are looked up behind a full barrier in the kernel).

_lock = threading.Lock()
_word = ctypes.c_int(0)
_nobody = ctypes.c_void_p(ctypes.addressof(_word))
_ordered = platform.machine() == "x86_64"


def full_fence() -> None:
    """What was stored before this is seen by others before anything is loaded after it."""
    if _ordered:
        with _lock:
            pass
    else:
        wake(_nobody)


def ordering_fence() -> None:
    """What was stored before this is seen before what is stored after it; likewise for loads. Free on x86."""
    if not _ordered:
        wake(_nobody)
