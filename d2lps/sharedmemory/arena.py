"""The memory that all ranks of a run map: one file without a name, whose descriptor the launcher passes to every rank.

Every rank maps the whole file, so an offset means the same to all, and nothing has to be passed on, named or swept when a
tensor is made later. Nobody else can open it, and it is gone when the last process that maps it has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from d2lps.sharedmemory import futex
from d2lps.sharedmemory.layout import Layout
from d2lps.sharedmemory.space import Space

# Every dtype has a number, the same in all ranks of a run: they use one torch.
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}


def missing() -> str:
    """Why ranks cannot share memory on this machine; "" if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"memfd_create and futex are Linux's, and this is {sys.platform}"
    return "" if futex.here else "how to call futex on this processor is not known"


def create(ranks: int) -> int:
    """A new file for a run of so many ranks, as a descriptor to be passed to them and then closed."""
    descriptor = os.memfd_create("d2lps")
    os.ftruncate(descriptor, Layout(ranks).end)
    return descriptor


class Arena:
    """The mapped file in one rank; `words` and `ints` are the file as 64- and 32-bit numbers."""

    def __init__(self, descriptor: int, ranks: int, rank: int) -> None:
        self.layout, self.ranks, self.rank = Layout(ranks), ranks, rank
        sparse = getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.memory = mmap.mmap(descriptor, self.layout.end, flags=mmap.MAP_SHARED | sparse)
        self.bytes = memoryview(self.memory)
        self.words, self.ints = self.bytes.cast("q"), self.bytes.cast("i")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        begin = self.layout.spaces + rank * self.layout.space
        self.space = Space(descriptor, self.memory, begin, begin + self.layout.space)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where a tensor lies in the file; -1 if it does not."""
        offset = tensor.data_ptr() - self.base
        return offset if 0 <= offset < self.layout.end and tensor.device.type == "cpu" else -1

    def tensor(self, offset: int, dtype: torch.dtype, length: int) -> torch.Tensor:
        """What lies at an offset as a flat tensor, without owning it."""
        return torch.frombuffer(self.bytes, dtype=dtype, count=length, offset=offset)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in this rank's space, which goes back when the last view of it has gone."""
        nbytes = bytes_of(shape, dtype)
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        offset = self.space.take(nbytes)
        owner = np.frombuffer(self.bytes, np.uint8, nbytes, offset)
        weakref.finalize(owner, self.space.give, offset, nbytes).atexit = False
        return torch.from_numpy(owner).view(dtype).view(shape)


def bytes_of(shape: int | Sequence[int], dtype: torch.dtype) -> int:
    """`bytes_of((2, 3), torch.float32) == 24`; a shape that is none is an error that torch explains."""
    return torch.empty(shape, dtype=dtype, device="meta").nbytes
