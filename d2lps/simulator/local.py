"""What a simulated rank does by itself: arithmetic, computing, memory, and time that passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from d2lps.comm import Communicator, ReduceOp, ops
from d2lps.comm.memory import Memory
from d2lps.comm.status import noted
from d2lps.simulator.counting import Counting
from d2lps.simulator.mailbox import Mailbox
from d2lps.simulator.model import Model
from d2lps.simulator.network import Network
from d2lps.simulator.scheduler import Scheduler, Task
from d2lps.topology import Topology
from d2lps.trace.recorder import Vocabulary

_MOST_NOWS = 1_000_000  # at one moment: barriers, which take no time, ask for the time, too


class World:
    """What all ranks of a simulation have in common."""

    def __init__(
        self, topology: Topology, nodes: list[Hashable], device: torch.device, model: Model, trace: bool | str, debug: bool
    ) -> None:
        self.topology, self.nodes, self.device, self.debug = topology, nodes, device, debug  # the node of each rank
        self.network = Network(topology.bandwidth)
        self.scheduler = Scheduler(self.network)
        self.mailbox = Mailbox(self.network, self.scheduler, model, bool(trace))
        self.where = noted(trace)
        self.vocabulary = Vocabulary() if trace else None  # of all that is recorded
        self.computing = {node: self.network.add_link(1.0) for node in dict.fromkeys(nodes)}  # what stands for its device
        self.memories: dict[Hashable, Memory] = {}
        self.holding: list[dict[Callable[[], None], None]] = [{} for _ in nodes]  # of each rank: how to let go of what it holds
        self.generator = cache(lambda rank: torch.Generator().manual_seed(rank))  # few simulations draw any numbers
        self.blank = cache(partial(torch.empty, device="meta"))  # a tensor that stands for all of its length and dtype
        self.blanks: set[int] = set()  # their storages


class SimulatedRank(Communicator):
    """The half of a simulated communicator that needs no other rank."""

    def __init__(self, world: World, members: Sequence[int], rank: int, name: str, task: Task) -> None:
        super().__init__(members, rank, name)
        self.world, self.task, self.mailbox = world, task, world.mailbox
        self.topology, self.nodes, self.node = world.topology, world.nodes, world.nodes[self.members[rank]]
        self.device = world.device
        self._free: tuple[torch.Tensor | None, torch.Tensor | None] = None, None  # the last pair that cost nothing to combine

    @property
    def generator(self) -> torch.Generator:  # type: ignore[override]
        return self.world.generator(self.task.rank)

    def catch_up(self) -> None:
        """Return when what this rank has only counted, or written down (see script.py), has happened."""
        if self.task.killed:  # it will not
            return
        if self.task.counting is not None:
            self._compute(*self.task.counting.take())
        if self.task.script.steps:
            self.task.script.play()

    def combine(self, into: torch.Tensor, other: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        free_into, free_other = self._free
        if into is free_into and other is free_other:  # round a ring, the same as before but for some
            return
        self._check_pair("combine", into, other)
        gamma = self.mailbox.model.per_combined_byte
        self._change(into, other, op, gamma * other.nbytes if gamma else 0.0)
        if into.is_meta and self.recorder is None and not gamma:
            self._free = into, other

    def copy(self, into: torch.Tensor, other: torch.Tensor) -> None:
        self._check_pair("copy", into, other)
        self._change(into, other, None, 0.0)

    def _change(self, into: torch.Tensor, other: torch.Tensor, op: ReduceOp | None, seconds: float) -> None:
        """Combine with `other`, or become a copy of it, in so many seconds of this rank's device."""
        if into.is_meta:
            if self.recorder is None and not seconds:
                return
        else:
            self.catch_up()
            with disable_current_modes() if self.task.counting else nullcontext():
                source = other.detach().reshape(into.shape)
                into.detach().copy_(source) if op is None else ops.apply(op, into.detach(), source)
        cells, start = None, 0
        if self.recorder is not None:
            cells = self.recorder.tables["locals"]
            start = self.recorder.local("COPY" if op is None else ops.op_name(op), into, other, math.nan, math.nan)
        if cells is not None or seconds:
            self.task.script.write(partial(self._took, cells, (start, start + 1), seconds))
        if seconds:
            self.task.script.write(partial(self._took, cells, (start + 1,), 0.0))
        if not self._collective or not into.is_meta:
            self.catch_up()

    def _took(self, cells: Any, times: tuple[int, ...], seconds: float) -> float:
        """A step of the script: the trace says when it came."""
        for time in times if cells is not None else ():
            cells[time] = self.world.network.now
        return seconds

    @contextmanager
    def compute(self, label: str, flops: float | None = None, bytes: float | None = None) -> Iterator[None]:
        """As everywhere; messages in a block that is counted are sent when what was counted before them has been computed,
        those in a block whose numbers are given when all of it has."""
        start, given = self.now(), not (flops is None and bytes is None)
        try:
            if given:
                self._compute(flops or 0, bytes or 0, 1)
            else:
                with Counting() as counting, self._counted_by(counting):
                    try:
                        yield
                        self.catch_up()
                    finally:
                        flops, bytes = counting.flops, counting.bytes
        finally:  # of a rank that is killed, too
            if self.recorder is not None:
                self.recorder.span("compute", label, start, self.world.network.now, flops, bytes)
        if given:
            with self._counted_by(None):
                yield

    @contextmanager
    def _counted_by(self, counting: Counting | None) -> Iterator[None]:
        """A block around this one has nothing more to pay for what is computed here."""
        outer, self.task.counting = self.task.counting, counting
        try:
            yield
        finally:
            self.task.counting = outer
            if outer is not None:
                outer.take()

    def _compute(self, flops: float, nbytes: float, operations: int) -> None:
        """Let the time pass that this rank's device needs."""
        device = self.topology.device(self.node)
        if device is None:
            raise ValueError(f"{self.node!r} has no device=Device(...): what is computed there cannot be priced")
        seconds = device.time_of(flops, nbytes, operations) if operations else 0.0
        if seconds:
            scheduler = self.world.scheduler
            scheduler.busy(self.task, seconds)
            scheduler.block(self.task, "compute")

    @property
    def memory(self) -> Memory:
        """The account of this rank's node, which all ranks that live there share."""
        if self.node not in self.world.memories:
            device = self.topology.device(self.node)
            self.world.memories[self.node] = Memory(str(self.node), math.inf if device is None else device.memory)
        return self.world.memories[self.node]

    def hold(self, nbytes: int, label: str) -> Callable[[], None]:
        """As everywhere; and a rank that is killed holds nothing more."""
        release, holding = super().hold(nbytes, label), self.world.holding[self.task.rank]

        def let_go() -> None:
            if release in holding:
                del holding[release]
                release()

        holding[release] = None
        return let_go

    def now(self) -> float:
        self.catch_up()
        self.world.scheduler.looked(self.task, "looked at the clock", _MOST_NOWS)
        return self.world.network.now

    def sleep(self, seconds: float, label: str = "") -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds={seconds!r} is not a number from 0 up")
        start, scheduler, task = self.now(), self.world.scheduler, self.task
        scheduler.check_runs(task)
        self.world.network.call_at(start + seconds, lambda: scheduler.happened(task))
        scheduler.block(task, "sleep")
        if self.recorder is not None:
            self.recorder.span("compute" if label else "sleep", label, start, self.now())

    def _until(self, future: Future[Any]) -> None:
        self.world.scheduler.until(future, "event")
