"""One rank's end of a group of ranks: the calls that every algorithm of the book is written in.

A world (processes on this machine, several machines, a simulated cluster) supplies six small methods, marked abstract
at the end of the class. The rules are the same in all of them:

- Messages from one rank to another with the same tag arrive in the order in which they were sent; what is received
  must have the length and dtype of what was sent.
- Rendezvous: a send is complete only when the other rank has posted the receive that matches it.
- A tensor in flight is not touched until its `Work.wait()`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from d2lps.comm import ops
from d2lps.comm.ops import ReduceOp
from d2lps.comm.staging import check_writable, stage, unstage
from d2lps.comm.standing import Board, NoBoard, Standing, callers_line
from d2lps.comm.work import Transfer, Work
from d2lps.trace.recorder import Recorder

# With this, torch's own random numbers begin in every rank: alike on all ranks, in every run, and in both worlds. A rank's
# own numbers come from `comm.generator`.
SEED = 0

Addressed = tuple[torch.Tensor, int]  # a tensor, and the rank that it goes to or comes from


class Communicator(ABC):
    """
    >>> def hello(comm):
    ...     if comm.rank == 0:
    ...         comm.send(torch.ones(3), dst=1)
    ...     if comm.rank == 1:
    ...         comm.recv(into := torch.zeros(3), src=0)
    ...         return into.sum().item()
    >>> d2lps.run(hello, 2)     # doctest: +SKIP
    Run([None, 3.0])
    """

    rank: int  #: this rank's number in the group, 0 .. size - 1
    size: int  #: how many ranks the group has
    device: torch.device  #: where this rank's tensors should live
    node: Any  #: the machine, or the node of the topology, that this rank lives on
    topology: Any = None  #: the described cluster, in a simulation
    generator: torch.Generator  #: this rank's own random numbers: the same in every run and every world
    debug: bool = False  #: whether ranks compare what they are about to do

    def __init__(self, members: Sequence[int], rank: int, name: str = "world") -> None:
        self.rank, self.size, self.name = rank, len(members), name
        self.members = list(members)  # members[r] is rank r's number in the whole run
        self.recorder: Recorder | None = None
        self.board: Board = NoBoard()
        self._collective = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}>"

    # ---- messages -------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Give `tensor` to rank `dst`; return when it has been delivered."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `tensor` with what rank `src` sends; return when it is there."""
        self.irecv(tensor, src, tag).wait()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start to send; the message is delivered when the returned `Work` has been waited for."""
        self._check_message(tensor, "dst", dst, tag)
        return self._work("send", tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Say where a message from `src` shall go; it is there when the returned `Work` has been waited for."""
        self._check_message(tensor, "src", src, tag)
        check_writable(tensor)
        return self._work("recv", tensor, src, tag)

    def sendrecv(self, tensor: torch.Tensor, dst: int, into: torch.Tensor, src: int, tag: int = 0) -> None:
        """Send and receive at the same time, so that a ring of ranks that all send first does not deadlock."""
        self._check_message(tensor, "dst", dst, tag)
        self._check_message(into, "src", src, tag)
        check_writable(into)
        with self.together():
            received = self._work("recv", into, src, tag)
            sent = self._work("send", tensor, dst, tag)
        received.wait()
        sent.wait()

    def exchange(self, sends: Iterable[Addressed], receives: Iterable[Addressed], tag: int = 0) -> None:
        """Post all messages, then wait for all: none waits for another, and they share the links.

        >>> comm.exchange(sends=[(mine, 1), (mine, 2)], receives=[(room[1], 1), (room[2], 2)])      # doctest: +SKIP

        Two messages to one rank must stand in the order in which that rank receives them.
        """
        with self.together():
            work = [self.irecv(into, src, tag) for into, src in receives]
            work += [self.isend(tensor, dst, tag) for tensor, dst in sends]
        for message in work:
            message.wait()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Post several messages in this block that depend on one another, and wait after it.

        NCCL needs to be told, and then treats them as one; in all other worlds posted messages progress by themselves.

        >>> with comm.together():                           # doctest: +SKIP
        ...     work = [comm.irecv(room[src], src) for src in others] + [comm.isend(mine, dst) for dst in others]
        """
        yield

    def barrier(self) -> None:
        """Return when every rank of the group has called this."""
        with self.standing("barrier"):
            self._barrier()

    # ---- arithmetic that the trace can see ------------------------------------------------------------------------

    def combine(self, into: torch.Tensor, other: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """`into = op(into, other)`: on received data, arithmetic goes through here to be traced and priced.

        >>> comm.combine(chunk, incoming, ReduceOp.SUM)     # chunk += incoming   # doctest: +SKIP
        """
        self._check_pair("combine", into, other)
        start = self.now()
        if not into.is_meta:
            ops.apply(op, into.detach(), other.detach().reshape(into.shape))
        if self.recorder:
            self.recorder.local(ops.op_name(op), into, other, start)

    def copy(self, into: torch.Tensor, other: torch.Tensor) -> None:
        """`into[:] = other`, within this rank, where the trace can see it."""
        self._check_pair("copy", into, other)
        start = self.now()
        into.detach().copy_(other.detach().reshape(into.shape))
        if self.recorder:
            self.recorder.local("COPY", into, other, start)

    def step(self, label: str, *parts: object) -> None:
        """Name what follows, in traces and pictures: `comm.step("reduce-scatter {}/{}", 1, 3)`.

        The parts are put into the label's braces only where somebody records it: a million labels take a second.
        """
        if self.recorder:
            self.recorder.step = label.format(*parts) if parts else label

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialized tensor where this world likes its tensors best; every rank of the group must call it."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def chunks(self, tensor: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
        """A flat tensor as `parts` views of nearly equal lengths, the longer ones first, as `torch.tensor_split` cuts it."""
        return tensor.tensor_split(parts)

    # ---- groups and time ------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """One new communicator for each color, its ranks ordered by (key, rank); `color=None` joins none.

        >>> row = comm.split(color=comm.rank // 4)      # ranks 0..3 together, 4..7 together   # doctest: +SKIP
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**62):
                raise ValueError(f"{name} must be None or an integer below 2**62, not {value!r}")
        with self.standing("split"):
            child = self._split(color, self.rank if key is None else key)
        if child is not None:
            child.recorder, child.board, child.debug = self.recorder, self.board, self.debug
            child.device, child.node, child.generator = self.device, self.node, self.generator
            child.topology = self.topology
        return child

    def now(self) -> float:
        """Seconds on this rank's clock, of which differences mean something; virtual ones, from 0, in a simulation."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let this rank's time pass."""
        time.sleep(seconds)

    # ---- notes: for the message that explains a hang --------------------------------------------------------------

    @contextmanager
    def standing(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> Iterator[None]:
        """Leave a note of what this rank waits for while the block runs, and a row in the trace."""
        peer = self.members[peer] if peer >= 0 else -1
        start = self.now()
        file, line, function = callers_line()
        self.board.write(
            Standing(action, peer, tag, nbytes, self._collective, self.members, file, line, function, time.monotonic())
        )
        yield
        # Not taken down when the wait fails: the note then says where the rank stood as it failed.
        self.board.write(None)
        if self.recorder:
            self.recorder.waited(action, self.name, peer, tag, nbytes, start)

    @contextmanager
    def inside(self, collective: str) -> Iterator[bool]:
        """Say that the messages of this block belong to a collective; True for the outermost one."""
        outermost = not self._collective
        label = self.recorder.step if self.recorder else ""
        if outermost:
            self._collective = collective
        try:
            yield outermost
        finally:
            if outermost:
                self._collective = ""
            self.step(label)

    # ---- checks and glue ------------------------------------------------------------------------------------------

    def _check_message(self, tensor: torch.Tensor, side: str, peer: int, tag: int) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a message is a torch.Tensor, not {type(tensor).__name__}: {tensor!r}")
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < self.size:
            raise ValueError(f"{side}={peer!r} is not a rank of this group of {self.size} (0 to {self.size - 1})")
        if peer == self.rank:
            raise ValueError(f"{side}={peer} is this rank itself: a rank sends no message to itself, use comm.copy")
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < 2**31:
            raise ValueError(f"tag={tag!r} is not an integer from 0 to 2**31 - 1")

    def _check_pair(self, call: str, into: torch.Tensor, other: torch.Tensor) -> None:
        if into.dtype != other.dtype or into.numel() != other.numel():
            raise ValueError(f"{call} needs two tensors alike, not {describe(into)} and {describe(other)}")

    def _work(self, action: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a message, and say what its completion entails."""
        staged = stage(tensor, self._wire())
        recorder = self.recorder
        recorded = recorder.message(action, tensor, self.name, self.members[peer], tag) if recorder else None
        transfer = self._posted(action, tensor, staged, peer, tag)

        def finish() -> None:
            if action == "recv":
                unstage(staged, tensor)
            if recorded:
                recorded()

        return Work(self, transfer, action, peer, tag, tensor.numel() * tensor.element_size(), finish)

    def _posted(self, action: str, tensor: torch.Tensor, staged: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Hand a message to the world."""
        return (self._post_send if action == "send" else self._post_recv)(staged, peer, tag)

    def _wire(self) -> torch.device | None:
        """The device that the transport reads from; None where any will do."""
        return None

    # ---- what a world supplies ------------------------------------------------------------------------------------

    @abstractmethod
    def _post_send(self, staged: torch.Tensor, dst: int, tag: int) -> Transfer: ...

    @abstractmethod
    def _post_recv(self, staged: torch.Tensor, src: int, tag: int) -> Transfer: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _split(self, color: int | None, key: int) -> Communicator | None: ...

    @abstractmethod
    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """The world's own all-reduce, to compare ours with."""

    @abstractmethod
    def agree(self, statement: str) -> None:
        """Raise Mismatch on every rank unless all ranks make the same statement; outside the trace."""


def describe(tensor: torch.Tensor) -> str:
    """`describe(torch.zeros(2, 3)) == "float32[2, 3]"`: for messages about tensors that do not fit."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
