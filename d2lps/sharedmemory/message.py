"""The two ends of a message, and the slip of paper between them.

The slip lies in the sender's space, and the bytes beside it. A tensor that lies in the shared file itself stays where it
is: the receiver copies it from there. Of another one the sender lays out a copy beside the slip, all of it if it is small;
a big one part by part, round and round in a room of 1 MB, while the receiver takes out what is there. The receiver writes
down what it expects, and how much it has taken: if that is all, or something else is expected, the slip is the sender's
again. Each word of a slip has one writer: nothing to lock.
"""

import ctypes
import struct

import torch

from d2lps.comm.rank import describe
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import LINE, Arena
from d2lps.sharedmemory.space import roomy

_ROOM = 1 << 20  # bytes of a message that lie beside its slip at one time
GROUP, TAG, _SENT, _BEGIN, _HELD, _LAID, BEFORE = range(7)  # the sender's words; BEFORE: the slip announced before this one
_EXPECTED, _TAKEN = range(8, 10)  # the receiver's, in a line of their own
_SLIP = struct.Struct("<6q16x2q")
_NOT_YET = -1  # is known what the other end has
# Every dtype has a number, the same in all ranks of a run: they use one torch.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}


class Message:
    """One end: `count` bytes have been copied, into or out of a room of `held` bytes that is used round and round."""

    count, theirs, lends = 0, _NOT_YET, False

    def __init__(self, arena: Arena, tensor: torch.Tensor, peer: int, tag: int, sends: bool) -> None:
        self.arena, self.peer, self.tag, self.sends = arena, peer, tag, sends
        self.tensor, self.nbytes, self.pointer = tensor, tensor.nbytes, tensor.data_ptr()
        self.mine = tensor.nbytes * len(_DTYPES) + _NUMBER[tensor.dtype]  # as `theirs`, if the two ends fit together

    def lay_out(self, group: int) -> int:
        """Write the sender's slip, with as much of the tensor as there is room for beside it; the slip's offset."""
        begin = self.arena.offset_of(self.tensor)
        if begin >= 0:
            self.slip = self.arena.space.take(2 * LINE)
            self.held = self.count = self.nbytes  # all is there already
            self.lends = True
        else:
            self.held = min(self.nbytes, _ROOM)
            self.slip = self.arena.space.take(roomy(2 * LINE + self.held))
            begin = self.slip + 2 * LINE
        _SLIP.pack_into(self.arena.memory, self.slip, group, self.tag, self.mine, begin, self.held, self.count, _NOT_YET, 0)
        self._open(self.slip)
        self.advance()
        return self.slip

    def take_up(self, slip: int) -> None:
        """This is the message that the receiver has waited for: say what was expected."""
        self._open(slip)
        self.held, self.theirs = self._words[_HELD], self._words[_SENT]
        linux.fence()
        self._words[_EXPECTED] = self.mine

    def _open(self, slip: int) -> None:
        self._words = self.arena.words[slip // 8 : (slip + 2 * LINE) // 8]
        self.room = self.arena.base + self._words[_BEGIN]

    def advance(self) -> bool:
        """Copy what can be copied; True if there was something, and the other end should know."""
        before = self.count
        while nbytes := self._ready():
            here, there = self.pointer + self.count, self.room + self.count % self.held
            ctypes.memmove(*((there, here) if self.sends else (here, there)), nbytes)
            self.count += nbytes
            linux.fence()
            self._words[_LAID if self.sends else _TAKEN] = self.count
        return self.count > before

    def _ready(self) -> int:
        """How many bytes can be copied at one go: up to what has been laid out, or taken, and up to the room's end."""
        if not self.moves():
            return 0
        end = min(self._words[_TAKEN] + self.held, self.nbytes) if self.sends else self._words[_LAID]
        linux.fence()
        return min(end - self.count, self.held - self.count % self.held)

    def moves(self) -> bool:
        """Whether bytes are still to be copied: neither when all have been, nor when the other end has something else."""
        return self.count < self.nbytes and self.theirs in (self.mine, _NOT_YET)

    def is_done(self) -> bool:
        """Whether all has arrived, or nothing will."""
        taken = self.count
        if self.sends:
            self.theirs, taken = self._words[_EXPECTED], self._words[_TAKEN]
        return self.theirs != _NOT_YET and (self.theirs != self.mine or taken == self.nbytes)


def spell(end: int) -> str:
    """`float32[4]`, from what one end has."""
    nbytes, number = divmod(end, len(_DTYPES))
    return describe(torch.empty(nbytes // _DTYPES[number].itemsize, dtype=_DTYPES[number], device="meta"))
