"""The memory that all ranks of a run map: one file without a name, whose descriptor the launcher passes to every rank.

Every rank maps the whole file, so an offset means the same to all, and nothing has to be passed on, named or swept when a
tensor is made later. Nobody else can open it, and it is gone when the last process that maps it has ended.
"""

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from d2lps.comm.memory import of_this_machine
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.space import Space, pages

STATEMENT = 1024  # bytes: what a rank says at a meeting
_MOST_SLOT = 1 << 16  # bytes of a small tensor that it brings along; less where there are many ranks
_REMEMBERED = 1024  # views of the memory
LINE = 64  # bytes that a processor moves at once: words that different ranks write lie in different lines


def missing() -> str:
    """Why ranks cannot share memory on this machine; "" if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"memfd_create and futex are Linux's, and this is {sys.platform}"
    return "" if linux.has_futex else "how to call futex on this processor is not known"


def create(ranks: int) -> int:
    """A new file for a run of so many ranks, as a descriptor to be passed to them and then closed."""
    descriptor = os.memfd_create("d2lps")
    os.ftruncate(descriptor, Layout(ranks).end)
    return descriptor


class Layout:
    """What lies where in the file of a run; its length is far more than is ever used, and only used pages take memory.

    desks       a line for each rank: its bell, how many of its threads sleep, its process, and how that has ended
    posted      for each pair of ranks, the last message announced
    meeting     where all ranks of the run meet; smaller groups get theirs from the space of their first rank
    spaces      one for each rank: tensors, and messages under way
    """

    def __init__(self, ranks: int) -> None:
        self.posted = ranks * LINE
        self.meeting = pages(self.posted + 8 * ranks * ranks)
        self.spaces = self.meeting + Place(ranks).size
        self.space = 1 << math.ceil(math.log2(of_this_machine()))  # no rank can use more than the machine has
        self.end = self.spaces + ranks * self.space


class Place:
    """Where the ranks of a group meet: for each a line, and two seats of so many bytes, used in turn.

    On a seat lies what a rank says, and then a small tensor that it brings along.
    """

    def __init__(self, ranks: int) -> None:
        self.slot = min(_MOST_SLOT, pages((1 << 22) // ranks))
        self.seat = STATEMENT + self.slot
        self.size = pages(ranks * (LINE + 2 * self.seat))


class Arena:
    """The mapped file in one rank; `words` is the file as 64-bit numbers."""

    def __init__(self, descriptor: int, ranks: int, rank: int) -> None:
        self.layout, self.ranks, self.rank = Layout(ranks), ranks, rank
        sparse = getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.memory = mmap.mmap(descriptor, self.layout.end, flags=mmap.MAP_SHARED | sparse)
        self.bytes = memoryview(self.memory)
        self.words = self.bytes.cast("q")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.tensor = lru_cache(_REMEMBERED)(partial(_view, self.bytes))  # to make one takes longer than to add up a small one
        begin = self.layout.spaces + rank * self.layout.space
        self.space = Space(descriptor, self.memory, begin, begin + self.layout.space)

    def columns(self, begin: int, ranks: int, words: int) -> list[memoryview]:
        """The first words of the lines that ranks have from `begin` on: all that stand first, all that stand second, ..."""
        lines = self.words[begin // 8 : (begin + ranks * LINE) // 8]
        return [lines[word :: LINE // 8] for word in range(words)]

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where a tensor lies in the file; -1 if it does not."""
        offset = tensor.data_ptr() - self.base
        return offset if 0 <= offset < self.layout.end and tensor.device.type == "cpu" else -1

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in this rank's space, which goes back when the last view of it has gone."""
        nbytes = bytes_of(shape, dtype)
        offset = self.space.take(nbytes or 1)
        owner = np.frombuffer(self.bytes, np.uint8, nbytes, offset)
        weakref.finalize(owner, self.space.give, offset).atexit = False
        return torch.from_numpy(owner).view(dtype).view(shape)


def _view(memory: memoryview, offset: int, dtype: torch.dtype, length: int) -> torch.Tensor:
    """What lies at an offset as a flat tensor, without owning it."""
    with torch.inference_mode(False):  # it is remembered, and written to outside of that mode as well
        return torch.frombuffer(memory, dtype=dtype, count=length, offset=offset)


def bytes_of(shape: int | Sequence[int], dtype: torch.dtype) -> int:
    """`bytes_of((2, 3), torch.float32) == 24`; a shape that is none is an error that torch explains."""
    return torch.empty(shape, dtype=dtype, device="meta").nbytes
