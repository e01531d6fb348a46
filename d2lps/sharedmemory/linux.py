"""What only Linux has: sleep until a number in memory changes, read another process's memory, look at processes, keep memory.

    wait(address, seen, 0.1)    # sleep, unless the number at `address` is no longer `seen`
    wake(address)               # whoever sleeps there goes on

That is futex, on which locks and semaphores are built. The kernel compares and falls asleep in one go, so a wake between the
look and the sleep is not lost. A call takes about a microsecond, a sleeper about ten more until it runs.

process_vm_readv copies from another process's memory to here. Only reading, and on purpose: a rank that lags behind can at
worst read rubbish from one that has given up and gone on, and the next meeting tells it so. A write would spoil whatever that
one keeps there by now. The kernel allows it among processes of one user. It refuses after setuid, in some containers, and
where Yama watches without having been told who may: so every rank tells it, and every group tries before it relies on it. A
call costs about 3 us, and half a microsecond for each page of 4 KB.

Source: Franke, Russell, Kirkwood 2002; futex(2), process_vm_readv(2), ptrace(2), proc(5).
"""

import ctypes
import mmap
import os
import platform
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "loongarch64": 98}  # of the system call
_FUTEX = ctypes.c_long(_NUMBERS.get(platform.machine(), -1))
_WAIT, _WAKE, _EVERYONE = ctypes.c_long(0), ctypes.c_long(1), ctypes.c_long(2**31 - 1)
_PR_SET_PTRACER = 0x59616D61
_Pair = ctypes.c_long * 2  # seconds and nanoseconds, or an address and how many bytes
# The one lets go of the interpreter's lock, so that other threads run while this one sleeps; the other is faster.
_libc, _passing = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None)

has_futex = platform.machine() in _NUMBERS


def wait(address: ctypes.c_void_p, seen: int, seconds: float) -> None:
    """Sleep until woken, for `seconds` at most; not at all if the 32-bit number there is not `seen`. May wake for nothing."""
    span = _Pair(int(seconds), int(seconds % 1 * 1e9))
    _libc.syscall(_FUTEX, address, _WAIT, ctypes.c_long(seen), span)


def wake(address: ctypes.c_void_p) -> None:
    """Wake all that sleep at this address."""
    _passing.syscall(_FUTEX, address, _WAKE, _EVERYONE)


# ---- order ----------------------------------------------------------------------------------------------------------
# Processors reorder. On x86 stores are seen by others in the order in which they were made, and loads are made in order;
# only a load may overtake an earlier store. Elsewhere nothing is certain. Python has no memory barrier, but what takes a lock
# holds one, and so does every call of futex (its sleepers are looked up behind a full barrier in the kernel).

_lock = threading.Lock()
_word = ctypes.c_int(0)
_nobody = ctypes.c_void_p(ctypes.addressof(_word))
_ordered = platform.machine() == "x86_64"


def fence(full: bool = False) -> None:
    """What was stored before this is seen before what is stored after it; likewise for loads. Free on x86.

    full: also, what was stored before this is seen by others before anything is loaded after it.
    """
    if not _ordered:
        wake(_nobody)
    elif full:
        with _lock:
            pass


# ---- other processes --------------------------------------------------------------------------------------------------


def allow_siblings() -> None:
    """Tell Yama that the children of this process's parent, the other ranks, may read this one."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # an error where there is no Yama, and then no need


def read(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a flat tensor from an address of another process; OSError if that is refused, or there is nothing.

    >>> there = torch.tensor([1.0, 2.0])
    >>> read(os.getpid(), there.data_ptr(), into := torch.empty(2)); into
    tensor([1., 2.])
    """
    done = 0
    while done < into.nbytes:  # the kernel takes 2 GB at a time
        here, there = _Pair(into.data_ptr() + done, into.nbytes - done), _Pair(address + done, into.nbytes - done)
        count = _libc.process_vm_readv(process, here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0))
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{os.strerror(error)} (process_vm_readv: {into.nbytes - done:,} bytes of process {process})")
        done += count


def state_and_parent(pid: int) -> tuple[str, int]:
    """`("R", 1)`: R runs, S sleeps, T is stopped, Z has ended but is not buried yet; "" if it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, or by a debugger."""
    return state_and_parent(pid)[0] in ("T", "t")


def is_alive(pid: int) -> bool:
    """A process that has ended is gone from /proc, or is there as a zombie until it is buried."""
    return state_and_parent(pid)[0] not in ("", "Z", "X")


# ---- memory that comes and goes with every message: the kernel takes long to give it ----------------------------------

# From malloc.h. What is freed stays with the process, whatever its size up to 32 MB, and all threads share it.
_SETTINGS = {-8: 1, -3: 32 << 20, -1: (1 << 31) - 1}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
_MMAP_MAX, _USUAL = -4, 65536  # how many pieces of memory may come from elsewhere than the heap
_HEAP = 1 << 30  # bytes


def keep_freed_memory() -> None:
    """Linux (glibc): a process that receives 2 MB again and again gets the same 2 MB, without 512 page faults each time.

    A fresh tensor of 2 MB takes 1 ms to fill, one whose memory was there before 0.1 ms. In return a process never becomes
    smaller than it once was. To be called before a process has other threads.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            for name, value in _SETTINGS.items():
                libc.mallopt(name, value)
            if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":
                _ask_for_huge_pages(libc)


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """For the heap's next gigabyte, none of which is taken yet: PyTorch asks only for tensors from 2 MB on, each by itself."""
    libc.malloc.restype, libc.mallopt.restype = ctypes.c_size_t, ctypes.c_int
    libc.mallopt(_MMAP_MAX, 0)
    if begin := libc.malloc(ctypes.c_size_t(_HEAP)):  # 0 where a limit forbids it
        page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(begin + _HEAP - page), mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(begin))
    libc.mallopt(_MMAP_MAX, _USUAL)
