"""What a rank does by itself, where a trace can see it: arithmetic, computing, memory, time; and the notes that it leaves."""

import sys
import threading
import time
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import inf, nan
from typing import Any

import torch

from d2lps.comm import ops
from d2lps.comm.memory import Memory, of_this_machine
from d2lps.comm.ops import ReduceOp
from d2lps.comm.status import Status, StatusBoard, readers_line
from d2lps.comm.watcher import Watcher
from d2lps.comm.work import Event
from d2lps.trace.recorder import About, Recorder, axis_of

# With this, torch's own random numbers begin in every rank: alike on all ranks, in every run, and in both worlds. A rank's
# own numbers come from `comm.generator`.
SEED = 0


class _Running(threading.local):
    """What the calling thread is about.

    note: in a wait, what leaves its note, and says whether somebody reads it; `note(IN_VAIN)` if what it waits for cannot come.
    """

    lane: int | None = None  # which one of its rank, if `Communicator.start` has made the thread
    began = "", 0, ""  # the reader's line that has started it
    note: Callable[..., bool] | None = None


running = _Running()


class Rank(ABC):
    """The half of a communicator that needs no other rank."""

    device: torch.device  #: where this rank's tensors should live
    node: Any  #: the machine, or the node of the topology, that this rank lives on
    topology: Any = None  #: the described cluster, in a simulation
    generator: torch.Generator  #: this rank's own random numbers: the same in every run and every world
    debug: bool = False  #: whether ranks compare what they are about to do
    timeout: float = inf  #: seconds that one wait for another rank may last, in a real world
    notes_when_long = False  # whether a wait leaves its note only once it turns out to be long: most are shorter than the writing

    def __init__(self, members: Sequence[int], rank: int, name: str = "world") -> None:
        self.recorder: Recorder | None = None
        self.board = StatusBoard()
        self.lane = 0  # 0 is the rank's own thread of control, the others are those of what it has started
        # What any communicator of this lane has started, and perhaps not yet waited for; a Future, or what is like one.
        self.started: dict[Rank, Future[Any]] = {}
        self.lanes: set[int] = set()  # in which something goes on beside the rank's own thread
        self.watchers: list[Watcher] = []  # the same list in all of the rank's groups
        self._become(members, rank, name)

    def _become(self, members: Sequence[int], rank: int, name: str) -> None:
        """All that is a group's own; the rest is the rank's, and the same in each of its groups."""
        self.rank = rank  #: this rank's number in the group, 0 .. size - 1
        self.size, self.name = len(members), name  #: how many ranks the group has, and what traces call it
        self.members = list(members)  # members[r] is rank r's number in the whole run
        self.touched = False  # whether it has begun to talk to others, since somebody has last set this to False
        self._starts = self._splits = 0
        self._collective = ""
        self._apart = False  # whether a collective is at work that has looked at its arguments for memory that they share

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}>"

    def combine(self, into: torch.Tensor, other: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """`into = op(into, other)`: on received data, arithmetic goes through here to be traced and priced.

        >>> comm.combine(chunk, incoming, ReduceOp.SUM)     # chunk += incoming   # doctest: +SKIP
        """
        self._check_pair("combine", into, other)
        start = self.now()
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

    @property
    def axis(self) -> str:
        """What `split` was told that this group, or the last one above it that has an axis, lies along; else "ranks"."""
        return axis_of(self.name) or "ranks"

    @contextmanager
    def about(self, name: str, before: str | None = None, after: str | None = None, partial: bool = False) -> Iterator[None]:
        """Say what the messages of the block carry: the trace keeps it (see `About`), and the names of their steps begin with it.

        >>> with comm.about("mlp", "B T D", "B T D", partial=True):     # "mlp[B, T, D]{tp} → mlp[B, T, D]: reduce-scatter 1/3"
        ...     all_reduce(comm, hidden)                                # doctest: +SKIP

        before, after: a letter for each dimension; "D_*" is one that is cut, each rank of the group having its piece. partial:
        before, it is a sum of which each rank has a summand. Costs nothing without a trace.
        """
        if (recorder := self.recorder) is None:
            yield
            return
        was = recorder.about, recorder.step
        recorder.about = About(name, self.axis, before, after, partial)
        recorder.step = recorder.about,
        try:
            yield
        finally:
            recorder.about, recorder.step = was

    def compute(self, label: str, flops: float | None = None, bytes: float | None = None) -> AbstractContextManager[None]:
        """Name what is computed in the block, so that a trace shows it.

        >>> with comm.compute("forward 3"):                 # doctest: +SKIP
        ...     hidden = layer(hidden)

        On real machines it takes the time that it takes. In a simulation it takes what the node's `Device` needs for `flops`
        operations on `bytes` bytes; where neither is given, what torch does in the block is counted.
        """
        return self._span("compute", label, flops, bytes)

    @contextmanager
    def allocate(self, nbytes: int, label: str) -> Iterator[None]:
        """Hold so many bytes of this rank's device while the block runs; OutOfMemory, with who holds what, if it has not as many.

        An account: no memory is taken. On real machines it ends at what the machine, or the GPU, has.

        >>> with comm.allocate(700_000_000_000, "weights"):     # doctest: +SKIP
        ...     ...
        """
        release = self.hold(nbytes, label)
        try:
            yield
        finally:
            release()

    def hold(self, nbytes: int, label: str) -> Callable[[], None]:
        """As `allocate`, for what no block encloses: until the function is called that is returned (again, it does nothing).

        >>> release = comm.hold(64, "activations 3")            # in the forward pass of a micro-batch      # doctest: +SKIP
        >>> release()                                           # in its backward pass                      # doctest: +SKIP
        """
        memory, recorder = self.memory, self.recorder
        memory.hold(nbytes, label)
        row, held = recorder.span("memory", label, self.now(), nan, nbytes=nbytes) if recorder else 0, True

        def release() -> None:
            nonlocal held
            if not held:
                return
            held = False
            memory.release(nbytes, label)
            if recorder:
                recorder.tables["spans"][row - 1] = self.now()

        return release

    @contextmanager
    def _span(self, kind: str, label: str = "", flops: float | None = None, nbytes: float | None = None) -> Iterator[None]:
        """Have the trace show how long the block took."""
        start = self.now()
        try:
            yield
        finally:
            if self.recorder:
                self.recorder.span(kind, label, start, self.now(), flops, nbytes)

    @property
    def memory(self) -> Memory:
        """The account of this rank's device, in which `allocate` writes."""
        return _account(self.device, str(self.node))

    def step(self, label: str, *numbers: object) -> None:
        """Name what follows, in traces and pictures: `comm.step("reduce-scatter {}/{}", 1, 3)`."""
        if self.recorder:
            about = self.recorder.about
            self.recorder.step = ("{}: " + label, about, *numbers) if about else (label, *numbers)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialized tensor where this world likes its tensors best; every rank of the group must call it."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def chunks(self, tensor: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
        """A flat tensor as `parts` views of nearly equal lengths, the longer ones first, as `torch.tensor_split` cuts it."""
        return tensor.tensor_split(parts)

    def now(self) -> float:
        """Seconds on this rank's clock, of which differences mean something; virtual ones, from 0, in a simulation."""
        return time.monotonic()

    def sleep(self, seconds: float, label: str = "") -> None:
        """Let this rank's time pass; label: of the computing that the time stands for, as which the trace then shows it."""
        with self._span("compute" if label else "sleep", label):
            time.sleep(seconds)

    # ---- events: what the lanes of one rank tell one another ------------------------------------------------------

    def signal(self, event: Event) -> None:
        """Say that it has happened: whoever waits for it goes on."""
        if not isinstance(event, Event):
            raise TypeError(f"signal needs an Event, not {event!r}")
        self.now()  # in a simulation, when what this lane has counted until here has been computed
        event.set()

    def wait(self, event: Event) -> None:
        """Return when another lane of this rank has signalled the event; at once if it has already."""
        if not isinstance(event, Event):
            raise TypeError(f"wait needs an Event, not {event!r}")
        with self.waiting("event"):
            self._until(event)

    def _until(self, future: Future[Any]) -> None:
        future.exception()

    # ---- notes: for the message that explains a hang --------------------------------------------------------------

    @contextmanager
    def waiting(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> Iterator[None]:
        """Leave a note of what this rank waits for while the block runs, and a row in the trace."""
        self.touched, start = True, self.now()

        def note(since: float = start) -> bool:
            self.note(action, peer, tag, nbytes, since)
            return self.board.watched

        if action in ("join", "event") or not self.notes_when_long:
            note()
        running.note = note
        try:
            yield
        finally:
            running.note = None
        self.board.write(None, self.lane)  # not when the wait fails: the note then says where the rank stood as it failed
        for watcher in self.watchers:
            watcher.waited(self, self.now() - start)
        if self.recorder:
            self.recorder.waited(action, self.name, self.members[peer] if peer >= 0 else -1, tag, nbytes, start)

    def note(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0, since: float = inf) -> None:
        """Write on the board where this rank stands."""
        me, peer = self.members[self.rank], self.members[peer] if peer >= 0 else -1
        line = found if (found := readers_line(sys._getframe()))[1] and action != "begin" else running.began
        self.board.write(Status(me, action, peer, tag, nbytes, self._collective, self.members, *line, since), self.lane)

    @contextmanager
    def inside(self, collective: str, apart: bool = False) -> Iterator[bool]:
        """Say that the messages of this block are a collective's, whose tensors were seen `apart`; True for the outermost one."""
        self._check_lane()
        outermost, before = not self._collective, self._apart
        self._apart = apart
        label = self.recorder.step if self.recorder else ()
        self._collective = self._collective or collective
        watchers = self.watchers if outermost else ()
        for watcher in watchers:
            watcher.entered(self, collective)
        try:
            yield outermost
            for watcher in watchers:
                watcher.left(self)
        finally:
            self._apart = before
            if outermost:
                self._collective = ""
            if self.recorder:
                self.recorder.step = label

    # ---- checks -----------------------------------------------------------------------------------------------------------

    def _check_lane(self) -> None:
        """Refuse a communicator of another lane in a started function; threads that are nobody's lane may have any."""
        if running.lane not in (None, self.lane):
            told = "this communicator belongs to another of its rank's lanes"
            raise RuntimeError(f"{told}: what is started has its own, the first argument of its function")

    def _check_pair(self, call: str, into: torch.Tensor, other: torch.Tensor) -> None:
        if into.dtype != other.dtype or into.numel() != other.numel():
            raise ValueError(f"{call} needs two tensors alike, not {describe(into)} and {describe(other)}")


@cache
def _account(device: torch.device, node: str) -> Memory:
    if device.type == "cuda":
        return Memory(str(device), torch.cuda.get_device_properties(device).total_memory)
    return Memory(node, of_this_machine())


def describe(tensor: torch.Tensor) -> str:
    """`describe(torch.zeros(2, 3)) == "float32[2, 3]"`: for messages about tensors that do not fit."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
