"""What a rank writes down while it runs: a Recorder for each of its lanes, in columns of numbers that grow by rows.

A simulated run has millions of messages. A row as a Python object costs hundreds of bytes, as numbers in one long `array`
8 bytes a column; numpy then looks at the same memory.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Hashable
from math import nan
from struct import Struct
from threading import Lock
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from d2lps.trace.buffers import Buffers

ACTIONS = ("send", "recv", "barrier", "native", "agree", "split", "answer", "serve", "start", "join", "event")
KINDS = ("compute", "sleep", "memory")


def _kinds(whole: str, others: str) -> dict[str, type[np.generic]]:
    """The columns of a table: those of whole numbers, of which bytes may be beyond 2**31, and behind them the others."""
    numbers = {name: np.int64 if name.endswith(("nbytes", "offset", "length")) else np.int32 for name in whole.split()}
    return numbers | dict.fromkeys(others.split(), np.float64)


COLUMNS = {
    "ends": _kinds("seq done_seq stream nbytes buffer offset length step", "posted waited done"),
    "locals": _kinds("seq op buffer offset length from_buffer from_offset from_length step", "start end"),
    "waits": _kinds("seq action peer tag group nbytes step", "start end"),
    "spans": _kinds("seq kind label", "flops nbytes start end"),
}
SEQ, _DONE_SEQ, STREAM, POSTED, WAITED, DONE, _END = 0, 1, 2, 8, 9, 10, 11  # where they stand in a row of "ends", and its length
_pack = Struct("11d").pack
_new = Lock()  # the lanes of a rank are threads, and no two labels may get one number


class About(NamedTuple):
    """What messages carry: a tensor, and which piece of it each rank of their group has before and after them.

    >>> str(About("block0 weights", "dp", "P_*", "P")), str(About("x", "tp", "B T D", "B T_* D", partial=True))
    ('block0 weights[P_dp] → weights[P]', 'x[B, T, D]{tp} → x[B, T_tp, D]')
    """

    name: str  # the last word is the tensor's own, also with "grad" before it; the others say which one it is
    axis: str  # of the group
    before: str | None = None  # a letter for each dimension; "T_*" is cut along the axis; a number has none; None: no tensor
    after: str | None = None  # None: what one rank has goes to another as it is
    partial: bool = False  # before, it is a sum of which each rank has a summand

    @property
    def tensor(self) -> str:
        which, _, own = self.name.rpartition(" ")
        return self.name if which == "grad" else own

    def __str__(self) -> str:
        begin = self.name + self._dimensions(self.before) + (f"{{{self.axis}}}" if self.partial else "")
        return begin if self.after is None else f"{begin} → {self.tensor}{self._dimensions(self.after)}"

    def _dimensions(self, letters: str | None) -> str:
        return "" if letters is None else f"[{', '.join(letters.replace('*', self.axis).split())}]"


class Names(dict[tuple[Hashable, ...], int]):
    """Labels as small integers, so that a column can hold them; one with numbers in it is put together when it is read.

    >>> names = Names()
    >>> names["step {}/{}", 1, 3], names["tree",], names["step {}/{}", 1, 3]
    (0, 1, 0)
    >>> names.strings
    ['step 1/3', 'tree']
    """

    def __missing__(self, label: tuple[Hashable, ...]) -> int:
        with _new:
            return self.setdefault(label, len(self))

    @property
    def strings(self) -> list[str]:
        return [str(label[0]).format(*label[1:]) if label[1:] else str(label[0]) if label else "" for label in self]


def axis_of(group: str) -> str:
    """The axis of a mesh along which a group of this name lies: `axis_of("world/tp1.0/start2") == "tp"`, else ""."""
    return next(iter(re.findall(r"/([^/\d]+)\d+\.", group)[::-1]), "")


Where = Callable[[FrameType | None], tuple[str, int, str]]


class Vocabulary:
    """The strings that numbers in the tables stand for, the streams of messages, and the memory."""

    def __init__(self) -> None:
        self.step, self.group, self.op, self.label = Names(), Names(), Names(), Names()
        self.line = Names()  # (file, number)
        self.stream = Names()  # (group, source, destination, tag): messages of one meet in the order of their posting
        self.buffers = Buffers()


class Recorder:
    """The events of one lane in the order of its program; `seq` counts them.

    where: of a frame, the file and the number of the line that shall be noted with each end of a message, as `readers_line`.
    """

    def __init__(
        self, rank: int, now: Callable[[], float], vocabulary: Vocabulary | None = None, where: Where | None = None
    ) -> None:
        self.rank, self.now, self.where = rank, now, where
        self.lines = array("i")  # one for each row of `ends`, or none
        self.vocabulary = vocabulary or Vocabulary()
        self.step: tuple[Any, ...] = ()  # a label and the numbers in it; see Communicator.step
        self.about: About | None = None  # what labels begin with; see Communicator.about
        self.tables = {name: array("d") for name in COLUMNS}  # row by row; a double holds whole numbers up to 2**53
        self.ends = self.tables["ends"]
        self.seq = 0
        self.lane, self.name = 0, ""  # the name of the function that was started; "" for the rank's own thread of control
        self.thread, self.parent, self.begins = 0, -1, 0  # which of `all`, which has started it, and its `seq` by then
        self.started, self.machine = 0.0, ""
        self.all = [self]  # the recorders of this rank

    def __getstate__(self) -> dict[str, Any]:
        """To other processes it travels as a log, without its clock."""
        return self.__dict__ | {"now": None, "where": None, "all": []}

    def beside(self, lane: int, name: str) -> Recorder:
        """A recorder for what is started now."""
        other = Recorder(self.rank, self.now, self.vocabulary, self.where)
        other.lane, other.name, other.thread, other.parent = lane, name, len(self.all), self.thread
        other.begins, other.step, other.about, other.all = self.next(), self.step, self.about, self.all
        self.all.append(other)
        return other

    def next(self, number: int = 1) -> int:
        """The seq of the next event, and room for as many as are wanted."""
        self.seq += number
        return self.seq - number + 1

    def end(self, tensor: torch.Tensor, stream: int, posted: float = nan) -> int:
        """Note one end of a message; where its row begins in `ends`."""
        words, row = self.vocabulary, len(self.ends)
        buffer, offset, length = words.buffers.part(self.rank, tensor)
        step, self.seq = words.step[self.step], self.seq + 1
        if self.where is not None:
            self.lines.append(words.line[self.where(sys._getframe(1))[:2]])
        # Half the time of `extend`.
        self.ends.frombytes(_pack(self.seq, -1, stream, tensor.nbytes, buffer, offset, length, step, posted, nan, nan))
        return row

    def done(self, row: int) -> None:
        """The message of this row has been waited for; before that, the wait itself has a place in the program."""
        self.ends[row + _DONE_SEQ] = self.next(2) + 1

    def all_done(self, count: int) -> None:
        """The same for the last ends to be noted, which were posted together."""
        ends, seq = self.ends, self.next(2 * count) + 1
        for k in range(count):
            ends[(k - count) * _END + _DONE_SEQ] = seq + 2 * k

    def message(self, action: str, tensor: torch.Tensor, group: str, peer: int, tag: int) -> Callable[[], None]:
        """Note a posted send or receive; call what is returned when it is complete."""
        src, dst = (self.rank, peer) if action == "send" else (peer, self.rank)
        row = self.end(tensor, self.vocabulary.stream[group, src, dst, tag], self.now())

        def complete() -> None:
            self.ends[row + _DONE_SEQ], self.ends[row + DONE] = self.next(), self.now()

        return complete

    def local(self, op: str, into: torch.Tensor, other: torch.Tensor, start: float, end: float) -> int:
        """Note that `into` was overwritten ("COPY") or combined with `other`; where its times will stand in the cells."""
        words, cells = self.vocabulary, self.tables["locals"]
        parts = words.buffers.part(self.rank, into) + words.buffers.part(self.rank, other)
        cells.frombytes(_pack(self.next(), words.op[op,], *parts, words.step[self.step], start, end))
        return len(cells) - 2

    def span(
        self, kind: str, label: str, start: float, end: float, flops: float | None = None, nbytes: float | None = None
    ) -> int:
        """Note what went on from start to end: computing, sleep, or memory that was held; the row's end in the cells."""
        known = [nan if value is None else value for value in (flops, nbytes)]
        self.tables["spans"].extend((self.next(), KINDS.index(kind), self.vocabulary.label[label,], *known, start, end))
        return len(self.tables["spans"])

    def waited(self, action: str, group: str, peer: int, tag: int, nbytes: int, start: float) -> None:
        """Note a wait that began at `start` and ends now."""
        words = self.vocabulary
        row = self.next(), ACTIONS.index(action), peer, tag, words.group[group,], nbytes, words.step[self.step]
        self.tables["waits"].extend((*row, start, self.now()))

    def logs(self, started: float = 0.0, ended: float = 0.0, machine: str = "") -> list[Recorder]:
        """Everything so far, of this lane and of those that were started."""
        for recorder in self.all:
            recorder.started, recorder.machine = started, machine
        return self.all
