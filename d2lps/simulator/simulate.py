"""`d2lps.simulate`: a function of a communicator, on ranks that live in virtual time."""

from __future__ import annotations

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch.utils import _device as last_device

from d2lps.comm import RankFailed
from d2lps.comm.rank import SEED
from d2lps.result import Run, pickled
from d2lps.simulator.backward import backward_in_threads
from d2lps.simulator.communicator import SimulatedCommunicator
from d2lps.simulator.deadlock import explain_standstill
from d2lps.simulator.faults import Cut, Fault, Kill, Narrow, Slow, cables, check
from d2lps.simulator.local import World
from d2lps.simulator.model import Model
from d2lps.simulator.scheduler import Task, put_on, take_off
from d2lps.topology import Topology
from d2lps.trace import Recorder, Trace

_set_device: Any = torch._GLOBAL_DEVICE_CONTEXT  # by torch.set_default_device, in each thread


def simulate(
    function: Callable[..., Any],
    topology: Topology,
    *args: Any,
    ranks: int | Sequence[Hashable] | None = None,
    device: str = "cpu",
    model: Model | None = None,
    faults: Sequence[Fault] = (),
    trace: bool | str = True,
    debug: bool = False,
) -> Run:
    """Call `function(comm, *args)` on ranks of a described cluster; results, time and trace are as of `d2lps.run`.

    >>> from d2lps.topology import star
    >>> def pass_on(comm):
    ...     tensor = torch.ones(1000, device=comm.device)       # 4,000 bytes
    ...     comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0)
    >>> simulate(pass_on, star(2, bandwidth=1e9, latency=1e-6)).time    # 2 links of 1 us, 4,000 B at 1 GB/s
    6e-06

    ranks: how many (on the first devices), or the list of nodes that they live on; by default one on each device.
    device: "cpu", payloads are real and results can be checked; "meta", tensors have no content and 700 GB cost nothing
    (make tensors on `comm.device`). model: see `Model`. trace=False saves memory and time for millions of messages;
    trace="lines" notes the reader's line of each message too.
    debug: ranks compare their calls of collectives. faults: what happens to the cluster, and when: see `d2lps.simulator.faults`.

    A message pays its route's latency, then its bytes share the links max-min fairly with all others. Ranks on one node
    exchange messages in no time, barriers are free, and computing takes the time that `comm.compute` says, or `comm.sleep`.
    Raises what a rank raised; Deadlock, naming the circle of waits, when nothing can happen any more; Mismatch when a
    send and a receive that meet do not fit. Every rank has its own copy of the function and its arguments.
    """
    nodes = _placed(topology, ranks)
    if not callable(function):
        raise TypeError(f"simulate needs a function of a communicator, not {function!r}")
    if device not in ("cpu", "meta"):
        raise ValueError(f"device={device!r} is unknown: choose 'cpu' or 'meta'")
    check(faults, topology, nodes)
    return _Simulation(topology, nodes, torch.device(device), model or Model(), trace, debug).run(function, args, faults)


def _placed(topology: Topology, ranks: int | Sequence[Hashable] | None) -> list[Hashable]:
    """The node of every rank."""
    if not isinstance(topology, Topology):
        raise TypeError(f"simulate needs a Topology, not {topology!r}")
    if ranks is None:
        ranks = len(topology.devices)
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        if not 1 <= ranks <= len(topology.devices):
            raise ValueError(f"ranks={ranks}, but {topology.name} has {len(topology.devices)} devices")
        return topology.devices[:ranks]
    nodes = list(ranks)  # type: ignore[arg-type]
    known = set(topology.nodes)
    if not nodes or any(node not in known for node in nodes):
        strangers = [node for node in nodes if node not in known]
        raise ValueError(f"ranks must name nodes of {topology.name}; {strangers or 'an empty list'} does not")
    return nodes


class _Simulation(World):
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], faults: Sequence[Fault]) -> Run:
        self.program = pickled((function, args))
        self.kills = Counter[int]()  # by rank: how many faults keep it dead
        self.killed: set[int] = set()  # who had not returned
        self.harmed: defaultdict[int, list[Slow | Cut | Narrow]] = defaultdict(list)  # by link: what is wrong with it
        for fault in faults:
            self.network.call_at(fault.at, partial(self._happens, fault, True))
            if fault.until is not None:
                self.network.call_at(fault.until, partial(self._happens, fault, False))
        with _as_it_was(), backward_in_threads():
            self.comms = [self._begin(rank) for rank in range(len(self.nodes))]
            try:
                self.scheduler.run()
                self._raise_first()
            finally:
                self.scheduler.kill()
        return self._result()

    def _begin(self, rank: int) -> SimulatedCommunicator:
        """Each rank has its own copy of the function, and its own start of torch's random numbers."""
        comm = SimulatedCommunicator(self, range(len(self.nodes)), rank, "world", Task(rank, self.computing[self.nodes[rank]]))
        comm.debug = self.debug
        if self.vocabulary is not None:
            comm.recorder = Recorder(rank, comm.now, self.vocabulary, self.where)

        def life() -> Any:
            function, args = cloudpickle.loads(self.program)
            torch.default_generator.manual_seed(SEED)  # of a GPU, there are none here
            result = function(comm, *args) if args else function(comm)  # the shorter call takes less of the stack
            comm.finish()
            return result

        self.scheduler.add(comm.task, life)
        return comm

    # ---- what happens to the cluster ------------------------------------------------------------------------------

    def _happens(self, fault: Fault, begins: bool) -> None:
        if isinstance(fault, Kill):
            for rank in [rank for rank, home in enumerate(self.nodes) if home == fault.node]:
                self._kill(rank) if begins else self._revive(rank)
            return
        # A link, or a device, is left with what all the faults leave that it has at this time.
        links = [self.computing[fault.node]] if isinstance(fault, Slow) else cables(fault.link, self.topology)
        for link in links:
            present = self.harmed[link]
            present.append(fault) if begins else present.remove(fault)
            whole = self.topology.bandwidth[link] if link < len(self.topology.links) else 1.0
            factors = [0.0 if isinstance(other, Cut) else 1 / other.factor for other in present]
            self.network.change(link, math.prod(factors, start=whole))

    def _kill(self, rank: int) -> None:
        self.kills[rank] += 1
        if self.comms[rank].task.ended is None:
            self.killed.add(rank)
        for task in [task for task in self.scheduler.tasks if task.rank == rank and task.ended is None]:
            self.scheduler.end(task)
        at = f"{self.network.now:.6g} s of virtual time"
        for release in [*self.holding[rank]]:
            release()
        self.holding[rank].clear()
        self.mailbox.lost(rank, f"rank {rank} has died: {self.nodes[rank]!r} was killed at {at}")

    def _revive(self, rank: int) -> None:
        """The node is back, with nothing of what it knew: its ranks begin once more, but for those that had returned."""
        self.kills[rank] -= 1
        if self.kills[rank]:
            return
        self.mailbox.dead.pop(rank, None)
        if rank not in self.killed:
            return
        self.killed.remove(rank)
        self.generator(rank).manual_seed(rank)
        before, self.comms[rank] = self.comms[rank], self._begin(rank)
        if before.recorder is not None:
            self.comms[rank].recorder = before.recorder.beside(0, "begun anew")

    # ---- what came of it ------------------------------------------------------------------------------------------

    def _raise_first(self) -> None:
        tasks, now = self.scheduler.tasks, f"at {self.network.now:.6g} s of virtual time"
        for task in tasks:
            if isinstance(task.error, SystemExit):  # shall not end the caller
                raise RankFailed(f"rank {task.rank} of {len(self.comms)} raised SystemExit: {task.error}") from task.error
            if task.error is not None:
                task.error.add_note(f"raised by rank {task.rank} of {len(self.comms)}, {now}")
                raise task.error
        if any(task.ended is None for task in tasks):
            for started in [started for comm in self.comms for started in _started(comm) if started.done()]:
                if (error := started.exception()) is not None:  # of which the rank would have heard
                    raise error
            cut = [str(link) for number, link in enumerate(self.topology.links) if not self.network.bandwidth[number]]
            raise explain_standstill(tasks, f"{now} nothing can happen any more" + (f" (cut: {', '.join(cut)})" if cut else ""))

    def _result(self) -> Run:
        tasks, trace = [comm.task for comm in self.comms], None
        if self.vocabulary is not None:
            trace = Trace([log for comm in self.comms if comm.recorder is not None for log in comm.recorder.logs()], len(tasks))
            trace.topology, trace.nodes = self.topology, list(self.nodes)
        return Run([task.result for task in tasks], max(task.ended or 0.0 for task in tasks), trace)


def _started(comm: Any) -> Iterator[Any]:
    """What a lane has started, and what that has."""
    for beside, started in comm.started.items():
        yield started
        yield from _started(beside)


@contextmanager
def uncollected() -> Iterator[None]:
    """Where a million small objects are made, and nothing is thrown away: a collector would only look at them again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Random numbers, modes, defaults are the caller's again afterwards."""
    randomness, grad = torch.get_rng_state(), torch.is_grad_enabled()
    dtype, modes, device, last = torch.get_default_dtype(), take_off(), vars(_set_device).copy(), last_device.CURRENT_DEVICE
    try:
        with uncollected():
            yield
    finally:
        torch.set_rng_state(randomness)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        vars(_set_device).clear()
        vars(_set_device).update(device)
        last_device.CURRENT_DEVICE = last
        put_on(modes)
