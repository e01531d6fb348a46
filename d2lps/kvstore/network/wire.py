"""What travels between a worker and a server: messages of several frames, and big tensors that stay where they are.

    card        who sends this, and where in that process its token lies (CARD)
    counts      in the same part, a byte for each record of the message: how many parts it has
    parts       the records' frames; a small one is one part

On one machine a big tensor does not travel. Its frame says at which address of the sender it lies, and the kernel copies it
from there to where it is wanted (process_vm_readv, see `sharedmemory.linux`): a push into memory that stays in the processor's
cache until it has been added up, a pulled value into the very tensor that was given for it.

Nobody ever writes into another process. A tensor is read as long as its request has no answer, or its answer is not
acknowledged; so long whoever has it leaves it as it is. Who reads too late, since a message was under way for long, reads
rubbish that is dropped with the message: a request is executed once, and an answer taken once. The process may have ended by
then, and its number may be another process's: so the token is read after each tensor, and if it differs, the tensor is dropped.

A worker tries once whether it may read a server, and until it has said so, values travel. For what it pushes it need not try:
what a server may not read is asked for again, and comes by frame.
"""

from __future__ import annotations

import os
import secrets
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from d2lps.kvstore.core.events import Event, Reply
from d2lps.kvstore.storage.frame import NOWHERE, frame, parse, wrong
from d2lps.kvstore.storage.log import Bytes
from d2lps.sharedmemory.linux import allow_siblings, read

# Process, address of its token, the token, and which process this one can read.
CARD = struct.Struct("<qq16sq")
NOBODY = CARD.pack(0, 0, b"", 0)
UNREADABLE = b"unreadable"  # a message: what you have told me to read I may not, so send it
Address = tuple[int, int, bytes, int]
BIG = 1 << 15  # bytes of a tensor from which it is worth it to leave it where it is; of a message, enough
MOST = 64  # records of a message


@dataclass
class RemoteTensor:
    """A tensor that lies in another process."""

    card: Address
    address: int

    def read(self, into: torch.Tensor) -> None:
        """ProcessLookupError if that process is no more, another OSError if it must not be read."""
        process, place, token, _ = self.card
        read(process, self.address, into)
        read(process, place, seen := torch.empty(len(token), dtype=torch.uint8))
        if seen.numpy().tobytes() != token:
            raise ProcessLookupError(f"process {process} is another one by now")


def in_one_piece(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes, as they lie in this process's memory, are its elements."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


class Wire:
    """One process's end. near: whether those at the other ends are on this machine.

    limit: bytes of a record's tensors, at most. No checksums of tensors: what leaves the machine is sealed by CURVE.
    """

    def __init__(self, limit: int, near: bool = False) -> None:
        self.limit, self.card, self.met = limit, NOBODY, 0
        if near and sys.platform == "linux":
            allow_siblings()
            self.token = torch.frombuffer(bytearray(token := secrets.token_bytes(16)), dtype=torch.uint8)
            self.card = CARD.pack(os.getpid(), self.token.data_ptr(), token, 0)

    def where(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """The address of a tensor and its bytes; NOWHERE for one that must travel."""
        if self.card == NOBODY or tensor is None or tensor.nbytes < BIG or not in_one_piece(tensor):
            return NOWHERE
        return tensor.data_ptr(), tensor.nbytes

    def packed(self, records: Iterable[Event | Reply], near: bool = True) -> Iterator[list[Bytes]]:
        """Messages, each as soon as it is long enough or there is no more; tensors are not copied, so must stay as they are.

        near: whether the other end can read this process.
        """
        parts, counts, nbytes = list[Bytes](), list[int](), 0
        for record in records:
            buffers = frame(record, where=self.where) if near else frame(record)
            size = sum(len(buffer) for buffer in buffers)
            parts += buffers if size >= BIG else [b"".join(buffers)]
            counts.append(len(buffers) if size >= BIG else 1)
            nbytes += size
            if nbytes >= BIG or len(counts) == MOST:
                yield [self.card + bytes(counts), *parts]
                parts, counts, nbytes = [], [], 0
        if counts:
            yield [self.card + bytes(counts), *parts]

    def meet(self, parts: Sequence[Bytes]) -> None:
        """Find out whether the sender of a message can be read, and from now on say so."""
        if self.card == NOBODY or not parts or len(parts[0]) < CARD.size:
            return
        theirs, mine = CARD.unpack_from(parts[0]), CARD.unpack(self.card)
        if theirs[0] != self.met:
            self.met = theirs[0]
            with suppress(OSError):
                RemoteTensor(theirs, theirs[1]).read(torch.empty(1, dtype=torch.uint8))
                self.card = CARD.pack(*mine[:-1], self.met)

    def unpack(self, parts: Sequence[Bytes]) -> Iterator[tuple[Event | Reply, RemoteTensor | None]]:
        """The records of a message, each as it is asked for; FrameError for what is none, PermissionError for an UNREADABLE.

        With a record whose tensor is still elsewhere comes where: until it has been read, there is only room for it.
        """
        lead = bytes(parts[0]) if parts else b""
        if lead == UNREADABLE:
            raise PermissionError("the other end may not read this process")
        if len(lead) <= CARD.size or sum(lead[CARD.size :]) != len(parts) - 1:
            wrong("card", lead, f"after {CARD.size} bytes come counts, and there are {len(parts) - 1} parts")
        begin, card = 1, CARD.unpack_from(lead)
        for count in lead[CARD.size :]:
            far = list[RemoteTensor]()
            record = parse(parts[begin : begin + count], self.limit, partial(self._lookup, card, far))
            begin += count
            yield record, far[0] if far and getattr(record, "value", None) is not None else None

    def _lookup(self, card: Address, far: list[RemoteTensor], address: int, nbytes: int) -> memoryview:
        """What a reference means."""
        if NOBODY in (self.card, CARD.pack(*card)) or not BIG <= nbytes <= self.limit:
            wrong("reference", (address, nbytes), f"it has {BIG} to {self.limit} bytes, and comes with a card from this machine")
        far.append(RemoteTensor(card, address))
        return torch.empty(nbytes, dtype=torch.uint8).numpy().data
