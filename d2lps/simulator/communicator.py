"""A rank's communicator in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from d2lps.comm import RankDied, ReduceOp, Work
from d2lps.comm.aliasing import Addressed, check_messages
from d2lps.comm.staging import stage, unstage
from d2lps.simulator.local import SimulatedRank, World
from d2lps.simulator.mailbox import End, Stream
from d2lps.simulator.scheduler import Scheduler, Task
from d2lps.simulator.script import Script
from d2lps.trace.recorder import WAITED

_MOST_PAIRS = 64  # that a communicator remembers: there may be a thousand ranks


class InLane(Future[Any]):
    """What a rank has started, as a task beside its own: whoever waits for it gives the thread to other tasks."""

    def __init__(self, scheduler: Scheduler, starter: Task) -> None:
        super().__init__()
        self.scheduler, self.starter = scheduler, starter

    def done(self) -> bool:
        if not super().done():
            self.scheduler.looked(self.starter)
        return super().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.scheduler.until(self, "join")
        return super().exception(timeout)


class SimulatedCommunicator(SimulatedRank):
    """Messages are posted in the mailbox, and waiting gives the thread to another rank."""

    def __init__(self, world: World, members: Sequence[int], rank: int, name: str, task: Task) -> None:
        super().__init__(world, members, rank, name, task)
        self.connect()

    def _become(self, members: Sequence[int], rank: int, name: str) -> None:
        super()._become(members, rank, name)
        self._streams: dict[tuple[bool, int, int], Stream] = {}  # (whether this rank sends, peer, tag)
        self._ends: dict[tuple[bool, int, int], tuple[torch.Tensor, End]] = {}  # the last of each stream
        # Of the exchange that is being written: staged, and where it is to go if it is received.
        self._contents: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        # Pairs without contents whose memory does not meet, by their ids, which are theirs as long as they are kept here.
        self._seen_apart: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    # ---- messages -------------------------------------------------------------------------------------------------

    def _exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed], tag: int, names: Sequence[str] = ()) -> None:
        if self.task.counting is not None:
            with self._uncounted():
                return self._exchange(sends, receives, tag, names)
        ends, last = [], self._ends.get
        self._contents.clear()  # of an exchange that was refused
        for tensor, src in receives:
            known = last((False, src, tag))  # round a ring, the same as before but for some
            ends.append(known[1] if known is not None and known[0] is tensor else self._end(False, tensor, src, tag))
        for tensor, dst in sends:
            known = last((True, dst, tag))
            ends.append(known[1] if known is not None and known[0] is tensor else self._end(True, tensor, dst, tag))
        if names and not self._apart:
            pair = (id(receives[0][0]), id(sends[0][0])) if len(receives) == 1 == len(sends) else None
            if pair not in self._seen_apart:
                check_messages(receives, sends, names, self.world.blanks)
                if pair is not None and not self._contents and len(self._seen_apart) < _MOST_PAIRS:
                    self._seen_apart[pair] = receives[0][0], sends[0][0]
        if self.recorder is not None:
            self.recorder.all_done(len(ends))
        self.task.script.exchange(tuple(ends))
        if self._contents or not self._collective:
            contents, self._contents = self._contents, []
            self.catch_up()
            for staged, room in contents:
                if room is not None:
                    unstage(staged, room)
        return None

    def _end(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int) -> End:
        """One end of a message. A stream that was used before has had its checks; contents are looked at each time."""
        key = sends, peer, tag
        stream, content = self._streams.get(key), None
        if stream is None or not getattr(tensor, "is_meta", False):
            self._check_message("send" if sends else "recv", tensor, peer, tag)
            stream = stream or self._stream(sends, peer, tag)
            if not tensor.is_meta:
                content = stage(tensor)
                self._contents.append((content, None if sends else tensor))
        if self.recorder is not None:
            row = self.recorder.end(tensor, stream.number)
            return stream, content, tensor.nbytes, tensor.dtype, sends, self.recorder.ends, row
        end = stream, content, tensor.nbytes, tensor.dtype, sends, None, 0
        if content is None:
            self._ends[key] = tensor, end
        return end

    def _stream(self, sends: bool, peer: int, tag: int) -> Stream:
        me, them = self.members[self.rank], self.members[peer]
        src, dst = (me, them) if sends else (them, me)
        key = self.name, src, dst, tag
        stream = self.mailbox.streams.get(key)
        if stream is None:
            stream = Stream(key, self.topology.route(self.nodes[src], self.nodes[dst]), self.mailbox.model)
            self.mailbox.streams[key] = stream
            if self.recorder is not None:
                stream.number = self.recorder.vocabulary.stream[key]
        self._streams[sends, peer, tag] = stream
        return stream

    def _posted(self, action: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        sends, mailbox = action == "send", self.mailbox
        self.catch_up()
        end = self._end(sends, tensor, peer, tag)
        self._contents.clear()
        message = mailbox.post(end)

        def is_done() -> bool:
            self.catch_up()
            self.world.scheduler.looked(self.task)
            return message.done or message in mailbox.gone or mailbox.is_buffered(end)

        def finish() -> None:
            start = self.now()
            if not is_done():
                self.world.scheduler.check_runs(self.task)
                message.wait(self.task)
                self.world.scheduler.block(self.task, (end,))
            elif message in mailbox.gone and not mailbox.is_buffered(end):
                raise RankDied(mailbox.gone[message])
            if not sends and end[1] is not None:
                unstage(end[1], tensor)
            if self.recorder is not None:
                self.recorder.ends[end[6] + WAITED] = start
                self.recorder.done(end[6])

        return Work(finish, is_done)

    @contextmanager
    def inside(self, collective: str, apart: bool = False) -> Iterator[bool]:
        with super().inside(collective, apart) as outermost, self._uncounted():
            try:
                yield outermost
            except Exception:  # when its time has come
                self.catch_up()
                raise
            if outermost:
                self.catch_up()

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """What a collective does with tensors is priced by the model, whether they have contents or not."""
        if self.task.counting is None:
            yield
            return
        self.catch_up()
        counting, self.task.counting = self.task.counting, None
        try:
            with disable_current_modes():
                yield
        finally:
            self.task.counting = counting

    def chunks(self, tensor: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
        if not tensor.is_meta:
            return super().chunks(tensor, parts)
        if self.recorder is not None:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # views that know nothing of gradients: half the memory
                return super().chunks(tensor, parts)
        # With nobody recording which part is which, all chunks of a length are one and the same: a thousand ranks would
        # otherwise hold a million of them.
        length, longer = divmod(tensor.numel(), parts)
        long, short = (self.world.blank(each, dtype=tensor.dtype) for each in (length + 1, length))
        self.world.blanks |= {long.untyped_storage()._cdata, short.untyped_storage()._cdata}
        return [long] * longer + [short] * (parts - longer)

    # ---- groups and lanes -----------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> Iterator[None]:
        """Only a row in the trace: a rank that waits can be asked where it stands (see deadlock.py)."""
        start = self.now()
        yield
        if self.recorder is not None:
            self.recorder.waited(action, self.name, self.members[peer] if peer >= 0 else -1, tag, nbytes, start)

    def _tell(self, call: str, word: Any) -> list[Any]:
        self.catch_up()
        words = self.mailbox.meet(self.task, self.members, call, self.name, word)
        return [words[member] for member in self.members]

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        raise ValueError("algorithm='native' is the all-reduce of gloo or NCCL; a simulated cluster has none of its own")

    def connect(self, beside: bool = False) -> None:
        self.task.groups[self.name] = self
        self.task.script = self.task.script or Script(self.task, self.mailbox)

    def _start(self, beside: SimulatedCommunicator, function: Callable[[], None]) -> InLane:  # type: ignore[override]
        self.catch_up()
        scheduler, task = self.world.scheduler, Task(self.task.rank, self.task.device, random=self.task.random)
        beside.task, started = task, InLane(scheduler, self.task)
        beside.connect()

        def ended() -> None:
            error, task.error = task.error, None
            started.set_exception(error) if error else started.set_result(None)

        scheduler.add(task, function, ended)
        return started
