"""A worker's places in shared memory for tensors that come and go with messages: the same ones again and again."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch

from d2lps.sharedmemory.arena import Arena


class Slots:
    """Tensors that servers can reach; a slot is free again as soon as nobody holds its tensor or a view of it.

    >>> slots = Slots(arena)                                # doctest: +SKIP
    >>> slots.copy(torch.ones(100_000)), len(slots.lent)    # doctest: +SKIP
    (tensor([1., 1., 1.,  ..., 1., 1., 1.]), 1)

    For one thread, but tensors may go in any. Sizes are powers of two. Memory that was taken once stays: for a fresh page the
    kernel takes longer than a copy does. Raises MemoryError, with the bytes, when the machine has no more.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # by size: offsets
        self.lent: set[int] = set()  # offsets

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape and dtype, its values whatever they are."""
        size = 1 << (tensor.nbytes - 1).bit_length()
        offset = self.free[size].pop() if self.free[size] else self.arena.space.take(size)
        self.lent.add(offset)
        owner = np.frombuffer(self.arena.bytes, np.uint8, tensor.nbytes, offset)
        weakref.finalize(owner, self._give, size, offset).atexit = False
        return torch.from_numpy(owner).view(tensor.dtype).view(tensor.shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor."""
        return self.like(tensor).copy_(tensor)

    def _give(self, size: int, offset: int) -> None:
        self.lent.discard(offset)
        self.free[size].append(offset)
