"""How records travel between a worker and a server: as frames; and where both see the same memory, without their big tensors.

The processes of a run on one machine share a file (see `d2lps.sharedmemory`). A big tensor that a worker pushes stays in its
part of that file until the answer is there, and the server reads it where it lies; for one that it pulls the worker names a
place, into which the server writes. The frame says only where.

A place may be used again as soon as its request has been answered. Nobody writes into it or reads it after that: a server
executes a request once, and what is asked again, because an answer was lost, is answered in a frame (see `Server`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from d2lps.kvstore.core.events import Event, Reply
from d2lps.kvstore.storage.frame import NOWHERE, frame, parse, wrong
from d2lps.kvstore.storage.log import Bytes
from d2lps.sharedmemory.arena import Arena

BIG = 1 << 15  # bytes from which it is worth it


class Wire:
    """One process's end. arena: the file that it shares with those at the other ends, None if it shares none.

    limit: bytes of a record's tensors, at most. No checksums of tensors: what leaves the machine is sealed by CURVE.
    """

    def __init__(self, limit: int, arena: Arena | None = None) -> None:
        self.limit, self.arena = limit, arena

    def where(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """The offset of a tensor in the shared file, and its bytes; NOWHERE for one that is small, in pieces, or elsewhere."""
        if self.arena is None or tensor is None or tensor.nbytes < BIG or not tensor.is_contiguous():
            return NOWHERE
        offset = self.arena.offset_of(tensor)
        return (offset, tensor.nbytes) if offset >= 0 else NOWHERE

    def pack(self, record: Event | Reply) -> list[Bytes]:
        """The parts of a message; tensors are not copied, so must stay as they are until the answer is there."""
        return frame(record, where=self.where)

    def unpack(self, parts: Sequence[Bytes]) -> Event | Reply:
        """The record of a message; its tensors lie where the parts lie, or in the shared file. FrameError if it is none."""
        return parse(parts, self.limit, self._bytes)

    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        """What a reference means. It may be wrong: it must lie where the workers have their tensors."""
        arena = self.arena
        if arena is None or not (BIG <= nbytes <= self.limit and arena.layout.spaces <= offset <= arena.layout.end - nbytes):
            wrong("reference", (offset, nbytes), f"no tensor of at most {self.limit} bytes can lie there")
        return arena.bytes[offset : offset + nbytes]


class Slots:
    """A worker's places for tensors that come and go with messages; one is free again when nobody holds its tensor, or a view.

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
