"""One rank's end of a group of ranks: the calls that every algorithm of the book is written in.

A world (processes on this machine, several machines, a simulated cluster) supplies some small methods, which stand at the
end of the class. The rules are the same in all of them:

- Messages from one rank to another with the same tag arrive in the order in which they were sent; what is received
  must have the length and dtype of what was sent.
- Rendezvous: a send is complete only when the other rank has posted the receive that matches it.
- A tensor in flight is not touched until its `Work.wait()`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from d2lps.comm import ops
from d2lps.comm.memory import Memory, of_this_machine
from d2lps.comm.ops import ReduceOp
from d2lps.comm.staging import check_writable, stage, unstage
from d2lps.comm.standing import Board, NoBoard, Standing, callers_line
from d2lps.comm.started import InThread, Started
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
        self.lane = 0  # 0 is the rank's own thread of control, the others are those of what it has started
        self.started: list[Started] = []  # by any communicator of this rank, and perhaps not yet waited for
        self._memory: dict[str, Memory] = {}
        self._starts = 0
        self._collective = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}>"

    # ---- messages -------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Give `tensor` to rank `dst`; return when it has been delivered."""
        self.exchange(((tensor, dst),), (), tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `tensor` with what rank `src` sends; return when it is there."""
        self.exchange((), ((tensor, src),), tag)

    def sendrecv(self, tensor: torch.Tensor, dst: int, into: torch.Tensor, src: int, tag: int = 0) -> None:
        """Send and receive at the same time, so that a ring of ranks that all send first does not deadlock."""
        self.exchange(((tensor, dst),), ((into, src),), tag)

    def exchange(self, sends: Iterable[Addressed], receives: Iterable[Addressed], tag: int = 0) -> None:
        """Post several messages at once, then wait for all: none waits for another, and they share the links.

        >>> comm.exchange(sends=[(mine, 1), (mine, 2)], receives=[(room[1], 1), (room[2], 2)])       # doctest: +SKIP

        Two messages to one rank must stand in the order in which that rank receives them.
        """
        sends, receives = list(sends), list(receives)
        for tensor, dst in sends:
            self._check_message(tensor, "dst", dst, tag)
        for tensor, src in receives:
            self._check_message(tensor, "src", src, tag)
            check_writable(tensor)
        with self.together():
            posted = [self._posted("recv", tensor, src, tag) for tensor, src in receives]
            posted += [self._posted("send", tensor, dst, tag) for tensor, dst in sends]
        for work in posted:
            work.wait()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start to send; the message is delivered when the returned `Work` has been waited for."""
        self._check_message(tensor, "dst", dst, tag)
        return self._posted("send", tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Say where a message from `src` shall go; it is there when the returned `Work` has been waited for."""
        self._check_message(tensor, "src", src, tag)
        check_writable(tensor)
        return self._posted("recv", tensor, src, tag)

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

    # ---- arithmetic, time and memory that the trace can see -------------------------------------------------------

    def combine(self, into: torch.Tensor, other: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """`into = op(into, other)`: on received data, arithmetic goes through here to be traced and priced.

        >>> comm.combine(chunk, incoming, ReduceOp.SUM)     # chunk += incoming   # doctest: +SKIP
        """
        self._check_pair("combine", into, other)
        start = self.now()
        if not into.is_meta:
            ops.apply(op, into.detach(), other.detach().reshape(into.shape))
        if self.recorder:
            self.recorder.local(ops.op_name(op), into, other, start, self.now())

    def copy(self, into: torch.Tensor, other: torch.Tensor) -> None:
        """`into[:] = other`, within this rank, where the trace can see it."""
        self._check_pair("copy", into, other)
        start = self.now()
        into.detach().copy_(other.detach().reshape(into.shape))
        if self.recorder:
            self.recorder.local("COPY", into, other, start, self.now())

    @contextmanager
    def compute(self, label: str, flops: float | None = None, bytes: float | None = None) -> Iterator[None]:
        """Name what is computed in the block, so that a trace shows it.

        >>> with comm.compute("forward 3"):                 # doctest: +SKIP
        ...     hidden = layer(hidden)

        On real machines it takes the time that it takes. In a simulation it takes what the node's `Device` needs for `flops`
        operations on `bytes` bytes; where neither is given, what torch does in the block is counted.
        """
        start = self.now()
        yield
        if self.recorder:
            self.recorder.span("compute", label, start, self.now(), flops, bytes)

    @contextmanager
    def allocate(self, nbytes: int, label: str) -> Iterator[None]:
        """Hold so many bytes of this rank's device while the block runs; OutOfMemory, with who holds what, if it has not as many.

        An account: no memory is taken. On real machines it ends at what the machine, or the GPU, has.

        >>> with comm.allocate(700_000_000_000, "weights"):     # doctest: +SKIP
        ...     ...
        """
        memory, start = self.memory, self.now()
        memory.hold(nbytes, label)
        try:
            yield
        finally:
            memory.release(nbytes, label)
            if self.recorder:
                self.recorder.span("memory", label, start, self.now(), nbytes=nbytes)

    @property
    def memory(self) -> Memory:
        """The account of this rank's device, in which `allocate` writes."""
        if "device" not in self._memory:
            on_gpu = self.device.type == "cuda"
            limit = torch.cuda.get_device_properties(self.device).total_memory if on_gpu else of_this_machine()
            self._memory["device"] = Memory(str(self.device if on_gpu else self.node), limit)
        return self._memory["device"]

    def step(self, label: str, *numbers: object) -> None:
        """Name what follows, in traces and pictures: `comm.step("reduce-scatter {}/{}", 1, 3)`."""
        if self.recorder:
            self.recorder.step = (label, *numbers)

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
            self._hand_down(child)
        return child

    def start(self, function: Callable[..., Any], *args: Any) -> Work:
        """Let `function(comm', *args)` go on beside what this rank does next: a collective under a backward pass.

        >>> work = comm.start(all_reduce, gradient)         # doctest: +SKIP
        >>> compute_the_next_gradient()                     # doctest: +SKIP
        >>> work.wait()                                     # now `gradient` is the sum     # doctest: +SKIP

        comm' has the same ranks, and messages of its own: they meet none of this communicator's. The nth start on each rank of
        a communicator belong together. `wait` raises what the function raised, and so does the end of the rank's own
        function if nobody has waited. In the trace it has a lane of its own. Costs a thread (a greenlet in a simulation), and
        over torch.distributed a process group.
        """
        if not callable(function):
            raise TypeError(f"start needs a function of a communicator, not {function!r}")
        self._starts += 1
        beside = self._beside(f"{self.name}/start{self._starts}")
        self._hand_down(beside)
        busy = {started.comm.lane for started in self.started if not started.is_done()}
        beside.lane = next(lane for lane in range(1, len(busy) + 2) if lane not in busy)
        if self.recorder:
            beside.recorder = self.recorder.beside(beside.lane, getattr(function, "__name__", "function"))
        started = self._start(beside, function, args)
        self.started.append(started)
        return Work(lambda: self._join(started), started.is_done)

    def _join(self, started: Started) -> None:
        if started in self.started:  # and has not been waited for at the end of the rank's function
            with self.standing("join", tag=started.comm.recorder.thread if self.recorder else 0):
                started.wait()
            self.started.remove(started)
            started.raise_its_error()

    def finish(self) -> None:
        """Wait for what was started and not yet waited for; called by the world when the rank's function has returned."""
        while self.started:
            self._join(self.started[0])

    def _hand_down(self, child: Communicator) -> None:
        """What a communicator made from this one has from it."""
        child.recorder, child.board, child.debug, child.lane = self.recorder, self.board, self.debug, self.lane
        child.device, child.node, child.generator = self.device, self.node, self.generator
        child.topology, child.started, child._memory = self.topology, self.started, self._memory

    def now(self) -> float:
        """Seconds on this rank's clock, of which differences mean something; virtual ones, from 0, in a simulation."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let this rank's time pass."""
        start = self.now()
        time.sleep(seconds)
        if self.recorder:
            self.recorder.span("sleep", "", start, self.now())

    # ---- notes: for the message that explains a hang --------------------------------------------------------------

    @contextmanager
    def standing(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> Iterator[None]:
        """Leave a note of what this rank waits for while the block runs, and a row in the trace."""
        peer = self.members[peer] if peer >= 0 else -1
        start, line = self.now(), callers_line()
        self.board.write(Standing(action, peer, tag, nbytes, self._collective, self.members, *line, time.monotonic()), self.lane)
        yield
        # Not taken down when the wait fails: the note then says where the rank stood as it failed.
        self.board.write(None, self.lane)
        if self.recorder:
            self.recorder.waited(action, self.name, peer, tag, nbytes, start)

    @contextmanager
    def inside(self, collective: str) -> Iterator[bool]:
        """Say that the messages of this block belong to a collective; True for the outermost one."""
        outermost = not self._collective
        label = self.recorder.step if self.recorder else ()
        if outermost:
            self._collective = collective
        try:
            yield outermost
        finally:
            if outermost:
                self._collective = ""
            if self.recorder:
                self.recorder.step = label

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

    def _posted(self, action: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a message, and say what its completion entails."""
        staged = stage(tensor, self._wire())
        recorder, nbytes = self.recorder, tensor.numel() * tensor.element_size()
        recorded = recorder.message(action, tensor, self.name, self.members[peer], tag) if recorder else None
        transfer = self._post(action, tensor, staged, peer, tag)

        def finish() -> None:
            with self.standing(action, peer, tag, nbytes):
                transfer.wait()
            if action == "recv":
                unstage(staged, tensor)
            if recorded:
                recorded()

        return Work(finish, transfer.is_done)

    def _post(self, action: str, tensor: torch.Tensor, staged: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Hand a message to the world."""
        return (self._post_send if action == "send" else self._post_recv)(staged, peer, tag)

    def _wire(self) -> torch.device | None:
        """The device that the transport reads from; None where any will do."""
        return None

    def _start(self, beside: Communicator, function: Callable[..., Any], args: tuple[Any, ...]) -> Started:
        return InThread(beside, function, args)

    # ---- what a world supplies ------------------------------------------------------------------------------------

    def _post_send(self, staged: torch.Tensor, dst: int, tag: int) -> Transfer:
        raise NotImplementedError  # in a simulation, which has a way of its own from `exchange` to the network

    def _post_recv(self, staged: torch.Tensor, src: int, tag: int) -> Transfer:
        raise NotImplementedError

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _split(self, color: int | None, key: int) -> Communicator | None: ...

    @abstractmethod
    def _beside(self, name: str) -> Communicator:
        """A communicator of the same ranks whose messages meet none of this one's; must not wait for the other ranks."""

    @abstractmethod
    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """The world's own all-reduce, to compare ours with."""

    @abstractmethod
    def agree(self, statement: str) -> None:
        """Raise Mismatch on every rank unless all ranks make the same statement; outside the trace."""


def describe(tensor: torch.Tensor) -> str:
    """`describe(torch.zeros(2, 3)) == "float32[2, 3]"`: for messages about tensors that do not fit."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
