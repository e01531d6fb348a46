"""What one rank writes down while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from d2lps.trace.buffers import Buffer, Buffers
from d2lps.trace.table import Names, Table

ACTIONS = ("send", "recv", "barrier", "native", "agree", "split", "answer")
_MESSAGE = {name: "q" for name in ("seq", "done_seq", "group", "peer", "tag", "nbytes", "buffer", "offset", "length", "step")}
_LOCAL = {name: "q" for name in ("seq", "op", "buffer", "offset", "length", "from_buffer", "from_offset", "from_length", "step")}
_WAIT = {name: "q" for name in ("seq", "action", "peer", "tag", "group", "nbytes", "step")}


@dataclass
class Log:
    """A rank's record, ready to travel: columns of numbers, and the strings that some of them stand for."""

    rank: int
    started: float
    ended: float
    machine: str
    sends: dict[str, Any]
    recvs: dict[str, Any]
    locals: dict[str, Any]
    waits: dict[str, Any]
    buffers: list[Buffer]
    steps: list[str]
    groups: list[str]
    ops: list[str]


class Recorder:
    """The events of one rank in the order of its program; `seq` counts them."""

    def __init__(self, rank: int, now: Callable[[], float]) -> None:
        self.rank = rank
        self.now = now
        self.step = ""
        self.sends = Table(**_MESSAGE, posted="d", done="d")
        self.recvs = Table(**_MESSAGE, posted="d", done="d")
        self.locals = Table(**_LOCAL, start="d", end="d")
        self.waits = Table(**_WAIT, start="d", end="d")
        self.buffers = Buffers(rank)
        self.steps, self.groups, self.ops = Names(), Names(), Names()
        self._seq = 0

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def message(self, action: str, tensor: torch.Tensor, group: str, peer: int, tag: int) -> Callable[[], None]:
        """Note a posted send or receive; call what is returned when it is complete."""
        table = self.sends if action == "send" else self.recvs
        buffer, offset, length = self.buffers.part(tensor)
        row = table.append(
            seq=self._next(),
            done_seq=-1,
            group=self.groups.number(group),
            peer=peer,
            tag=tag,
            nbytes=tensor.numel() * tensor.element_size(),
            buffer=buffer,
            offset=offset,
            length=length,
            step=self.steps.number(self.step),
            posted=self.now(),
            done=float("nan"),
        )
        return lambda: table.set(row, done_seq=self._next(), done=self.now())

    def local(self, op: str, into: torch.Tensor, other: torch.Tensor, start: float) -> None:
        """Note that `into` was overwritten ("COPY") or combined with `other` between `start` and now."""
        buffer, offset, length = self.buffers.part(into)
        from_buffer, from_offset, from_length = self.buffers.part(other)
        self.locals.append(
            seq=self._next(),
            op=self.ops.number(op),
            buffer=buffer,
            offset=offset,
            length=length,
            from_buffer=from_buffer,
            from_offset=from_offset,
            from_length=from_length,
            step=self.steps.number(self.step),
            start=start,
            end=self.now(),
        )

    def waited(self, action: str, group: str, peer: int, tag: int, nbytes: int, start: float) -> None:
        """Note a wait that began at `start` and ends now."""
        self.waits.append(
            seq=self._next(),
            action=ACTIONS.index(action),
            peer=peer,
            tag=tag,
            group=self.groups.number(group),
            nbytes=nbytes,
            step=self.steps.number(self.step),
            start=start,
            end=self.now(),
        )

    def log(self, started: float, ended: float, machine: str = "") -> Log:
        """Everything so far."""
        return Log(
            self.rank,
            started,
            ended,
            machine,
            sends=self.sends.columns(),
            recvs=self.recvs.columns(),
            locals=self.locals.columns(),
            waits=self.waits.columns(),
            buffers=self.buffers.seen,
            steps=self.steps.strings,
            groups=self.groups.strings,
            ops=self.ops.strings,
        )
