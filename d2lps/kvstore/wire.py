"""How records travel between a worker and a server: as frames; and where both see the same memory, without their big tensors.

The processes of a run on one machine share a file (see `d2lps.sharedmemory`). A big tensor that a worker pushes stays in its
part of that file until the answer is there, and the server reads it where it lies; for one that it pulls the worker names a
place, into which the server writes. Such a frame has a reference in front of it and no value:

    reference   44 bytes (REFERENCE): where the value lies, where the answer's is wanted, how many bytes each; -1 for neither
    frame       as in `frame`

A place may be used again as soon as its request has been answered. Nobody writes into it or reads it after that: a server
executes a request once, and what is asked again, because an answer was lost, is answered in a frame (see `Server`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from d2lps.kvstore.events import Event, Reply, Request
from d2lps.kvstore.frame import FrameError, frame, parse
from d2lps.kvstore.log import Bytes, checksum
from d2lps.sharedmemory.arena import Arena

MAGIC = b"d2sm"
REFERENCE = struct.Struct("<4s4q2I")  # magic, value's offset and bytes, place's offset and bytes, 0, checksum
BIG = 1 << 15  # bytes from which a reference is worth it
NOWHERE = (-1, 0)


class Wire:
    """One process's end. arena: the file that it shares with those at the other ends, None if it shares none.

    checked: with checksums of the tensors that travel. limit: bytes of a record's tensors, at most.
    """

    def __init__(self, limit: int, checked: bool, arena: Arena | None = None) -> None:
        self.limit, self.checked, self.arena = limit, checked, arena

    def where(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """The offset of a tensor in the shared file, and its bytes; NOWHERE for one that is small, in pieces, or elsewhere."""
        if self.arena is None or tensor is None or tensor.nbytes < BIG or not tensor.is_contiguous():
            return NOWHERE
        offset = self.arena.offset_of(tensor)
        return (offset, tensor.nbytes) if offset >= 0 else NOWHERE

    def pack(self, record: Event | Reply) -> list[Bytes]:
        """The parts of a message; tensors are not copied, so must stay as they are until the answer is there."""
        buffers = frame(record, self.checked)
        value = self.where(getattr(record, "value", None))
        place = self.where(record.out if isinstance(record, Request) else None)
        if value == place == NOWHERE:
            return buffers
        if value != NOWHERE:
            buffers.pop()
        start = REFERENCE.pack(MAGIC, *value, *place, 0, 0)[:-4]
        return [start + struct.pack("<I", checksum(start)), *buffers]

    def unpack(self, parts: Sequence[Bytes]) -> Event | Reply:
        """The record of a message; its tensors lie where the parts lie, or in the shared file. FrameError if it is none."""
        if not parts or bytes(parts[0][:4]) != MAGIC:
            return parse(parts, self.limit)
        fields = REFERENCE.unpack(parts[0]) if len(parts[0]) == REFERENCE.size else None
        if fields is None or fields[-1] != checksum(parts[0][:-4]):
            raise FrameError(f"reference: {bytes(parts[0])!r:.200}; it has {REFERENCE.size} bytes, and a checksum of them")
        value, place = self._bytes(*fields[1:3]), self._bytes(*fields[3:5])
        record = parse([*parts[1:], *([] if value is None else [value])], self.limit)
        if place is not None and isinstance(record, Request):
            return replace(record, out=torch.frombuffer(place, dtype=torch.uint8))
        return record

    def _bytes(self, offset: int, nbytes: int) -> memoryview | None:
        """What a reference means. It may be wrong: it must lie where the workers have their tensors."""
        if (offset, nbytes) == NOWHERE:
            return None
        arena = self.arena
        if arena is None or not (BIG <= nbytes <= self.limit and arena.layout.spaces <= offset <= arena.layout.end - nbytes):
            raise FrameError(f"reference: {offset, nbytes}; no tensor of at most {self.limit} bytes can lie there")
        return arena.bytes[offset : offset + nbytes]
