"""`d2lps.simulate`: a function of a communicator, on ranks that live in virtual time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import cloudpickle
import torch

from d2lps.comm.communicator import SEED
from d2lps.result import Run
from d2lps.simulator.backward import backward_in_threads
from d2lps.simulator.communicator import Meetings, SimulatedCommunicator
from d2lps.simulator.deadlock import explain_standstill
from d2lps.simulator.mailbox import Mailbox
from d2lps.simulator.model import Model
from d2lps.simulator.network import Network
from d2lps.simulator.scheduler import Scheduler, Task
from d2lps.simulator.script import Script
from d2lps.topology import Topology
from d2lps.trace import Recorder, merge


def simulate(
    function: Callable[..., Any],
    topology: Topology,
    *args: Any,
    ranks: int | Sequence[Hashable] | None = None,
    device: str = "cpu",
    model: Model | None = None,
    trace: bool = True,
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
    (make tensors on `comm.device`). model: see `Model`. trace=False saves memory and time for millions of messages.
    debug: ranks compare their calls of collectives.

    A message pays its route's latency, then its bytes share the links max-min fairly with all others. Ranks on one node
    exchange messages in no time, computing takes none either (`comm.sleep` lets a rank's time pass), barriers are free.
    Raises what a rank raised; Deadlock, naming the circle of waits, when nothing can happen any more; Mismatch when a
    send and a receive that meet do not fit. Every rank has its own copy of the function and its arguments.
    """
    nodes = _placed(topology, ranks)
    if not callable(function):
        raise TypeError(f"simulate needs a function of a communicator, not {function!r}")
    if device not in ("cpu", "meta"):
        raise ValueError(f"device={device!r} is unknown: choose 'cpu' or 'meta'")
    return _Simulation(topology, nodes, torch.device(device), model or Model(), trace, debug).run(function, args)


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


class _Simulation:
    def __init__(
        self, topology: Topology, nodes: list[Hashable], device: torch.device, model: Model, trace: bool, debug: bool
    ) -> None:
        self.topology, self.nodes, self.traced = topology, nodes, trace
        self.network = Network(topology.bandwidth)
        self.scheduler = Scheduler(self.network)
        self.mailbox = Mailbox(self.network, self.scheduler, model)
        meetings, members = Meetings(), range(len(nodes))
        self.comms = []
        for rank in members:
            task = Task(rank)
            comm = SimulatedCommunicator(members, rank, "world", task, nodes, topology, self.mailbox, meetings, device)
            comm.debug = debug
            comm.recorder = Recorder(rank, comm.now) if trace else None
            task.comm, task.script = comm, Script(task, self.mailbox)
            self.comms.append(comm)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Run:
        program = cloudpickle.dumps((function, args))

        def life(comm: SimulatedCommunicator) -> Any:
            """Each rank has its own copy of the function, and its own start of torch's random numbers."""
            function, args = cloudpickle.loads(program)
            torch.manual_seed(SEED)
            return function(comm, *args) if args else function(comm)  # the shorter call takes less of the stack

        for comm in self.comms:
            self.scheduler.add(comm.task, life)
        randomness, grad = torch.get_rng_state(), torch.is_grad_enabled()
        collecting = gc.isenabled()
        gc.disable()  # a million small objects and no cycles among them: the collector would only look at them again
        try:
            with backward_in_threads():
                self.scheduler.run()
                self._raise_first()
        finally:
            self.scheduler.kill()
            torch.set_rng_state(randomness)
            torch.set_grad_enabled(grad)
            if collecting:
                gc.enable()
        return self._result()

    def _raise_first(self) -> None:
        tasks = self.scheduler.tasks
        for task in tasks:
            if task.error is not None:
                task.error.add_note(f"raised by rank {task.rank} of {len(tasks)}, at {self.network.now:.6g} s of virtual time")
                raise task.error
        if any(task.ended is None for task in tasks):
            raise explain_standstill(tasks, self.network.now)

    def _result(self) -> Run:
        tasks = self.scheduler.tasks
        trace = None
        if self.traced:
            logs = [comm.recorder.log(0.0, comm.task.ended or 0.0) for comm in self.comms if comm.recorder]
            trace = merge(logs, len(tasks))
            trace.topology, trace.nodes = self.topology, self.nodes
        return Run([task.result for task in tasks], max(task.ended or 0.0 for task in tasks), trace)
