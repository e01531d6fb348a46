"""The two ends of a message, and the slip of paper between them.

The slip lies in the sender's space, and the bytes beside it. A tensor that lies in the shared file itself stays where it
is: the receiver copies it from there. Of another one the sender lays out a copy beside the slip, all of it if it is small;
a big one piece by piece, round and round in a room of 1 MB, while the receiver takes out what is there. The receiver ends
with a verdict, and from then on the slip is the sender's again. Each word of a slip has one writer: nothing to lock.
"""

import ctypes
import struct
from collections.abc import Callable

import torch

from d2lps.comm.rank import describe
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import LINE, Arena

_ROOM = 1 << 20  # bytes of a message that lie beside its slip at one time
_PIECE = 1 << 18  # bytes that are copied before the other end is told
GROUP, TAG, NBYTES, DTYPE, BEGIN, HELD, LAID, BEFORE = range(8)  # the sender's words; BEFORE: the slip announced before this one
TAKEN, VERDICT, WANTED, EXPECTED = range(8, 12)  # the receiver's, in a line of their own
_PENDING, _DELIVERED, _REFUSED = range(3)
_SLIP = struct.Struct("<16q")
# Every dtype has a number, the same in all ranks of a run: they use one torch.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}


class Message:
    """One end: `count` bytes have been copied, into or out of a room of `held` bytes that is used round and round."""

    sends: bool
    is_done: Callable[[], bool]
    differs: Callable[[], str]  # what the other end has, if it is not the same: "float32[4]"
    _ready: Callable[[], int]  # how many bytes can be copied
    _copy: Callable[[int, int, int], None]  # between the room and the tensor, so many
    _tell: Callable[[], None]  # write down how many have been copied
    slip, at, room, held, count = -1, -1, -1, 1, 0

    def __init__(self, arena: Arena, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.arena, self.words, self.peer, self.tag = arena, arena.words, peer, tag
        self.tensor, self.nbytes, self.pointer = tensor, tensor.nbytes, tensor.data_ptr()

    def advance(self) -> bool:
        """Copy what can be copied; True if there was something, and the other end should know."""
        if not (ready := self._ready()):
            return False
        while ready:
            at = self.count % self.held
            nbytes = min(ready, self.held - at)  # up to the room's end
            self._copy(self.room + at, self.pointer + self.count, nbytes)
            self.count += nbytes
            ready -= nbytes
        linux.ordering_fence()
        self._tell()
        return True

    def moves(self) -> bool:
        """Whether bytes are still to be copied."""
        return self.count < self.nbytes and not self.is_done()


class Sending(Message):
    """The sender's end."""

    sends = True

    def __init__(self, arena: Arena, tensor: torch.Tensor, dst: int, group: int, tag: int) -> None:
        super().__init__(arena, tensor, dst, tag)
        begin = arena.offset_of(tensor)
        if begin >= 0:
            self.slip, self.held, self.count = arena.pool.take(2 * LINE), self.nbytes, self.nbytes  # all is there already
        else:
            self.held = min(self.nbytes, _ROOM)
            self.slip = arena.pool.take(2 * LINE + self.held)
            begin = self.slip + 2 * LINE
        self.at, self.room = self.slip // 8, arena.base + begin
        words = (group, tag, self.nbytes, _NUMBER[tensor.dtype], begin, self.held, self.count)
        _SLIP.pack_into(arena.memory, self.slip, *words, *[0] * 9)
        self.advance()

    def _ready(self) -> int:
        left = self.nbytes - self.count
        ready = min(left, self.held - (self.count - self.words[self.at + TAKEN])) if left else 0
        return ready if ready >= min(_PIECE, left) else 0

    def _copy(self, room: int, tensor: int, nbytes: int) -> None:
        ctypes.memmove(room, tensor, nbytes)

    def _tell(self) -> None:
        self.words[self.at + LAID] = self.count

    def is_done(self) -> bool:
        return self.words[self.at + VERDICT] != _PENDING

    def differs(self) -> str:
        if self.words[self.at + VERDICT] != _REFUSED:
            return ""
        return _spell(self.words[self.at + WANTED], self.words[self.at + EXPECTED])


class Receiving(Message):
    """The receiver's end; `slip` is known once a message has been announced that fits it."""

    sends, done, sent = False, False, ""

    def take_up(self, slip: int) -> None:
        """This is the message: see whether it is what was expected."""
        self.slip, self.at = slip, slip // 8
        self.room, self.held = self.arena.base + self.words[self.at + BEGIN], self.words[self.at + HELD]
        sent, expected = (self.words[self.at + NBYTES], self.words[self.at + DTYPE]), (self.nbytes, _NUMBER[self.tensor.dtype])
        if sent != expected:
            self.sent = _spell(*sent)
            self.words[self.at + WANTED], self.words[self.at + EXPECTED] = expected
            self._judge(_REFUSED)
        elif not self.nbytes:
            self._judge(_DELIVERED)

    def _ready(self) -> int:
        ready = 0 if self.done else self.words[self.at + LAID] - self.count
        linux.ordering_fence()
        return ready

    def _copy(self, room: int, tensor: int, nbytes: int) -> None:
        ctypes.memmove(tensor, room, nbytes)

    def _tell(self) -> None:
        if self.count == self.nbytes:
            self._judge(_DELIVERED)
        else:
            self.words[self.at + TAKEN] = self.count

    def _judge(self, verdict: int) -> None:
        """From here on the slip is the sender's."""
        self.done = True
        linux.ordering_fence()
        self.words[self.at + VERDICT] = verdict

    def is_done(self) -> bool:
        return self.done

    def differs(self) -> str:
        return self.sent


def _spell(nbytes: int, dtype: int) -> str:
    """`float32[4]`, from a slip's numbers."""
    return describe(torch.empty(nbytes // _DTYPES[dtype].itemsize, dtype=_DTYPES[dtype], device="meta"))
