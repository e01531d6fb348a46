"""The two ends of a message, and the slip of paper between them.

The slip lies in the sender's space, and the bytes beside it. A tensor that lies in the shared file itself stays where it
is: the receiver copies it from there. Of another one the sender lays out a copy beside the slip, all of it if it is small;
a big one piece by piece, round and round in a room of 1 MB, while the receiver takes out what is there. The receiver ends
with a verdict, and from then on the slip is the sender's again. Each word of a slip has one writer: nothing to lock.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from d2lps.sharedmemory import futex
from d2lps.sharedmemory.arena import DTYPES, NUMBER, Arena

SLIP = 128  # bytes: a line that the sender writes, and one that the receiver writes
ROOM = 1 << 20  # bytes of a message that lie beside its slip at one time
PIECE = 1 << 18  # bytes that are copied before the other end is told
GROUP, TAG, NBYTES, DTYPE, BEGIN, HELD, LAID = range(7)  # the sender's words
TAKEN, VERDICT, WANTED, EXPECTED = range(8, 12)  # the receiver's
_PENDING, _DELIVERED, _REFUSED = range(3)
_SLIP = struct.Struct("<16q")


class Sending:
    """The sender's end."""

    def __init__(self, arena: Arena, slip: int, tensor: torch.Tensor, group: int, tag: int) -> None:
        self.words, self.slip, self.at = arena.words, slip, slip // 8
        self.tensor, self.nbytes = tensor, tensor.nbytes  # held, for its bytes are read until the verdict
        offset = arena.offset_of(tensor)
        self.laid = self.nbytes if offset >= 0 else 0
        self.begin = offset if offset >= 0 else slip + SLIP
        self.held = beside(tensor, offset)
        self._room, self._source = arena.base + self.begin, tensor.data_ptr()
        words = (group, tag, self.nbytes, NUMBER[tensor.dtype], self.begin, self.held, self.laid)
        _SLIP.pack_into(arena.memory, slip, *words, *[0] * 9)
        self.advance()

    def advance(self) -> bool:
        """Lay out what there is room for; True if there was some for a piece, and the receiver should know."""
        left = self.nbytes - self.laid
        nbytes = min(left, self.held - (self.laid - self.words[self.at + TAKEN])) if left else 0
        if not nbytes or nbytes < min(PIECE, left):
            return False
        into, first = self.laid % self.held, self.held - self.laid % self.held  # the bytes before the room's end
        ctypes.memmove(self._room + into, self._source + self.laid, min(first, nbytes))
        if nbytes > first:
            ctypes.memmove(self._room, self._source + self.laid + first, nbytes - first)
        self.laid += nbytes
        futex.ordering_fence()
        self.words[self.at + LAID] = self.laid
        return True

    def moves(self) -> bool:
        """Whether bytes are still to be laid out."""
        return self.laid < self.nbytes and not self.is_done()

    def is_done(self) -> bool:
        return self.words[self.at + VERDICT] != _PENDING

    def refused(self) -> str:
        """What the receiver expects, if it does not take the message."""
        if self.words[self.at + VERDICT] != _REFUSED:
            return ""
        return spell(self.words[self.at + WANTED], self.words[self.at + EXPECTED])


class Receiving:
    """The receiver's end; `slip` is known once a message has been announced that fits it."""

    def __init__(self, arena: Arena, tensor: torch.Tensor) -> None:
        self.words, self.base, self.tensor, self.nbytes = arena.words, arena.base, tensor, tensor.nbytes
        self.at, self.taken, self.done, self.sent = -1, 0, False, ""

    def take_up(self, slip: int) -> None:
        """This is the message: see whether it is what was expected, and take what is there of it."""
        self.at = slip // 8
        nbytes, dtype = self.words[self.at + NBYTES], self.words[self.at + DTYPE]
        self._room, self.held = self.base + self.words[self.at + BEGIN], self.words[self.at + HELD]
        if (nbytes, dtype) != (self.nbytes, NUMBER[self.tensor.dtype]):
            self.sent = spell(nbytes, dtype)
            self.words[self.at + WANTED], self.words[self.at + EXPECTED] = self.nbytes, NUMBER[self.tensor.dtype]
            self._judge(_REFUSED)
        elif not self.nbytes:
            self._judge(_DELIVERED)

    def advance(self) -> bool:
        """Take what is there; True if there was something, and the sender should know."""
        nbytes = self.words[self.at + LAID] - self.taken if not self.done else 0
        if not nbytes:
            return False
        futex.ordering_fence()
        source, first = self.taken % self.held, self.held - self.taken % self.held
        into = self.tensor.data_ptr() + self.taken
        ctypes.memmove(into, self._room + source, min(first, nbytes))
        if nbytes > first:
            ctypes.memmove(into + first, self._room, nbytes - first)
        self.taken += nbytes
        futex.ordering_fence()
        if self.taken == self.nbytes:
            self._judge(_DELIVERED)
        else:
            self.words[self.at + TAKEN] = self.taken
        return True

    def _judge(self, verdict: int) -> None:
        """From here on the slip is the sender's."""
        self.done = True
        futex.ordering_fence()
        self.words[self.at + VERDICT] = verdict

    def moves(self) -> bool:
        return not self.done

    def is_done(self) -> bool:
        return self.done


def beside(tensor: torch.Tensor, offset: int) -> int:
    """How many bytes there is room for at one time: all of a tensor that lies in the file, 1 MB of another."""
    return tensor.nbytes if offset >= 0 else min(tensor.nbytes, ROOM)


def spell(nbytes: int, dtype: int) -> str:
    """`float32[4]`, from a slip's numbers."""
    kind = DTYPES[dtype]
    return f"{str(kind).removeprefix('torch.')}[{nbytes // kind.itemsize}]"

