"""What a rank writes down while it runs: a Recorder for each of its lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from d2lps.trace.buffers import Buffers
from d2lps.trace.table import Names, Table

ACTIONS = ("send", "recv", "barrier", "native", "agree", "split", "answer", "join", "serve")
KINDS = ("compute", "sleep", "memory")

_MESSAGE = ("seq", "done_seq", "group", "peer", "tag", "nbytes", "buffer", "offset", "length", "step", "posted", "done")
_LOCAL = ("seq", "op", "buffer", "offset", "length", "from_buffer", "from_offset", "from_length", "step", "start", "end")
_WAIT = ("seq", "action", "peer", "tag", "group", "nbytes", "step", "start", "end")
_SPAN = ("seq", "kind", "label", "flops", "nbytes", "start", "end")
_TIMES = {"posted", "done", "start", "end"}


@dataclass
class Vocabulary:
    """The strings that numbers in the tables stand for, and the memory that others do."""

    steps: Names = field(default_factory=Names)
    groups: Names = field(default_factory=Names)
    ops: Names = field(default_factory=Names)
    labels: Names = field(default_factory=Names)
    buffers: Buffers = field(default_factory=Buffers)


@dataclass
class Log:
    """What one lane has written, ready to travel: columns of numbers, and who wrote them."""

    rank: int
    lane: int
    name: str  # of the function that was started; "" for the rank's own thread of control
    thread: int  # counts the logs of a rank, from 0 for its own thread of control
    parent: int  # the thread that started it, -1 for none
    begins: int  # how many things its parent had done by then
    tables: dict[str, Table]
    vocabulary: Vocabulary
    started: float = 0.0
    ended: float = 0.0
    machine: str = ""


class Recorder:
    """The events of one lane in the order of its program; `seq` counts them."""

    def __init__(self, rank: int, now: Callable[[], float], vocabulary: Vocabulary | None = None) -> None:
        self.rank, self.now = rank, now
        self.vocabulary = vocabulary or Vocabulary()
        self.step: tuple[Any, ...] = ()  # a label and the numbers in it; see Communicator.step
        self.sends, self.recvs = Table(*_MESSAGE, times=_TIMES), Table(*_MESSAGE, times=_TIMES)
        self.locals, self.waits = Table(*_LOCAL, times=_TIMES), Table(*_WAIT, times=_TIMES)
        self.spans = Table(*_SPAN, times={"flops", "nbytes", *_TIMES})
        self.seq = 0
        self.lane, self.name, self.thread, self.parent, self.begins = 0, "", 0, -1, 0
        self.all = [self]  # the recorders of this rank, by thread

    def beside(self, lane: int, name: str) -> Recorder:
        """A recorder for what is started now."""
        other = Recorder(self.rank, self.now, self.vocabulary)
        other.lane, other.name, other.thread, other.parent = lane, name, len(self.all), self.thread
        other.begins, other.step, other.all = self.next(), self.step, self.all
        self.all.append(other)
        return other

    def next(self, number: int = 1) -> int:
        """The seq of the next event, and room for as many as are wanted."""
        self.seq += number
        return self.seq - number + 1

    def message(self, action: str, tensor: torch.Tensor, group: str, peer: int, tag: int) -> Callable[[], None]:
        """Note a posted send or receive; call what is returned when it is complete."""
        table, words = self.sends if action == "send" else self.recvs, self.vocabulary
        name, step = words.groups.number((group,)), words.steps.number(self.step)
        nbytes, part, posted = tensor.numel() * tensor.element_size(), words.buffers.part(self.rank, tensor), self.now()
        row = table.append(self.next(), -1, name, peer, tag, nbytes, *part, step, posted, float("nan"))

        def complete() -> None:
            table.set(row, "done_seq", self.next())
            table.set(row, "done", self.now())

        return complete

    def local(self, op: str, into: torch.Tensor, other: torch.Tensor, start: float, end: float) -> int:
        """Note that `into` was overwritten ("COPY") or combined with `other`; its row."""
        words = self.vocabulary
        parts = *words.buffers.part(self.rank, into), *words.buffers.part(self.rank, other)
        return self.locals.append(self.next(), words.ops.number((op,)), *parts, words.steps.number(self.step), start, end)

    def took(self, row: int, start: float | None, end: float) -> None:
        """What `local` has noted as `row` happened from `start`, if that is not known yet, to `end`."""
        cells, last = self.locals.cells, (row + 1) * len(_LOCAL) - 1
        cells[last] = end
        if start is not None:
            cells[last - 1] = start

    def span(
        self, kind: str, label: str, start: float, end: float, flops: float | None = None, nbytes: float | None = None
    ) -> None:
        """Note what went on from start to end: computing, sleep, or memory that was held."""
        number, unknown = self.vocabulary.labels.number((label,)), float("nan")
        known = [unknown if value is None else value for value in (flops, nbytes)]
        self.spans.append(self.next(), KINDS.index(kind), number, *known, start, end)

    def waited(self, action: str, group: str, peer: int, tag: int, nbytes: int, start: float) -> None:
        """Note a wait that began at `start` and ends now."""
        words = self.vocabulary
        name, step = words.groups.number((group,)), words.steps.number(self.step)
        self.waits.append(self.next(), ACTIONS.index(action), peer, tag, name, nbytes, step, start, self.now())

    def logs(self, started: float = 0.0, ended: float = 0.0, machine: str = "") -> list[Log]:
        """Everything so far, of this lane and of those that were started."""
        return [recorder._log(started, ended, machine) for recorder in self.all]

    def _log(self, started: float, ended: float, machine: str) -> Log:
        sides = ("sends", "recvs", "locals", "waits", "spans")
        tables = {side: getattr(self, side) for side in sides}
        who = (self.rank, self.lane, self.name, self.thread, self.parent, self.begins)
        return Log(*who, tables, self.vocabulary, started, ended, machine)
