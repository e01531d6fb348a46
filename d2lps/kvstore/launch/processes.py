"""`kvstore.run`: the parameter server for real, workers and servers as processes of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import zmq

from d2lps import sharedmemory
from d2lps.comm import Communicator, RankHung
from d2lps.kvstore.core.report import StoreRun
from d2lps.kvstore.launch.chaos import Cluster, Victim
from d2lps.kvstore.launch.coordinator import Coordinator
from d2lps.kvstore.launch.joined import join
from d2lps.kvstore.launch.monitor import Monitor
from d2lps.kvstore.launch.working import work
from d2lps.kvstore.network.deployment import Deployment, deploy
from d2lps.launch.group import Group
from d2lps.launch.rank import Job, Success
from d2lps.launch.runs import check, resolve, under_launcher
from d2lps.result import Run


class Workers(Group):
    """As the ranks of `d2lps.run`, but with an eye on the servers; and the death of one need not be the end of all."""

    def __init__(
        self, job: Job, live: bool, memory: int, coordinator: Coordinator, go_on: bool, begun: Callable[[int], bool]
    ) -> None:
        super().__init__(job, live, coordinator.plan.room)
        self.memory = memory  # the file that they share, as a descriptor; -1 if they share none
        self.coordinator, self.go_on, self.begun = coordinator, go_on, begun
        self.lost: dict[int, str] = {}
        self.cluster: Cluster | None = None  # in the hands of a saboteur

    def meeting_place(self) -> Any:
        """The servers have this file already."""
        return open(self.memory, "r+b", 0, closefd=False) if self.memory >= 0 else super().meeting_place()

    def collect(self, patience: float) -> None:
        """Wait for words of workers or servers; take in both, and what the saboteur raises."""
        own = [self.keeper.fileno(), *(control.fileno() for control in self.pending.values())]
        zmq.select([self.coordinator.control, *own, *self.coordinator.waited_for()], [], [], patience)
        super().collect(0)
        if self.go_on and len(self.dead) + len(self.lost) < self.job.ranks and all(map(self.begun, self.dead)):
            for rank in list(self.dead):
                self._lose(rank)
        self.coordinator.look()
        if self.cluster is not None:
            self.cluster.check()

    def check_waits(self) -> None:
        """A hang may be a server's."""
        try:
            super().check_waits()
        except RankHung as error:
            for server, node in enumerate(self.coordinator.serving):
                if node.stopped:
                    error.add_note(f"server {server} is stopped (SIGSTOP)")
            raise

    def _lose(self, rank: int) -> None:
        """The run goes on without it."""
        death = self.died(rank)
        del self.dead[rank]
        self.lost[rank] = str(death)
        warnings.warn(f"{death}; the others go on without it", stacklevel=2)
        self.outcomes[rank] = Success(cloudpickle.dumps((None, 0.0)), float("inf"), 0.0)
        self.coordinator.say(str(death).splitlines()[0])
        self.coordinator.lose(rank)


class ProcessesRun(StoreRun):
    """A StoreRun, with what has happened to the processes."""

    def __init__(self, run: Run, workers: int, history: list[str], lost: dict[int, str]) -> None:
        super().__init__(run, workers)
        self.history, self.lost = history, lost  # lost: {worker: how it died}


def run(
    worker: Callable[..., Any],
    workers: int,
    servers: int,
    *args: Any,
    consistency: str = "bsp",
    staleness: int = 0,
    durability: str = "memory",
    saboteur: Callable[[Cluster], Any] | None = None,
    monitor: Monitor | None = None,
    backend: str = "auto",
    timeout: float = 60.0,
    live: bool = False,
    **options: Any,
) -> StoreRun:
    """Call `worker(kv, *args)` in worker processes that have server processes; the results are the workers'.

    >>> def worker(kv):
    ...     weights = torch.zeros(3)
    ...     kv.init("w", weights)
    ...     kv.pushpull("w", torch.ones(3), weights).wait()
    ...     return weights.tolist()
    >>> kvstore.run(worker, workers=2, servers=1)               # doctest: +SKIP
    Run([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])

    consistency, staleness: see `consistency`. durability, options: see `Deployment`. saboteur: see `Cluster`. monitor: see
    `Monitor`. backend, timeout, live: as in `d2lps.run`, for kv.comm too. The Run has `time`, `values`, `servers` and
    `staleness` as simulate's (a server that was restarted counts anew), `history`, deaths and recoveries, and `lost`, who died
    of what; but no trace.
    Under torchrun it starts nothing and joins that job of workers + servers processes, on any number of machines (see `joined`).
    Raises what a worker raises, RankDied, RankHung, as d2lps.run does, Mismatch (see `Placement`), and leaves nothing behind
    (but a temporary folder, if the caller itself is killed while it starts its servers). Cost: on one
    machine a byte of a big tensor is copied once, from where one process has it to where the other wants it (see `wire`); one
    of `kv.empty` is added up where it is. Over tcp, and where the kernel refuses, it is copied into a socket and out of it.
    """
    check(worker, "kv", backend, timeout, 256, workers=workers, servers=servers)
    if under_launcher():
        rules = {"consistency": consistency, "staleness": staleness, "durability": durability}
        own = {"saboteur": saboteur, "monitor": monitor}
        return join(worker, workers, servers, args, backend, timeout, own, **rules, **options)
    job = Job(workers, *resolve(backend, workers), timeout)
    plan = deploy(workers, servers, consistency=consistency, staleness=staleness, durability=durability, **options)
    with _prepared(plan, job) as (plan, memory):
        return _run(plan, job, live, memory, saboteur, monitor, worker, args)


@contextmanager
def _prepared(plan: Deployment, job: Job) -> Iterator[tuple[Deployment, int]]:
    """The plan with a folder and a memory of this run's own, and the memory's descriptor; at the end both are gone."""
    room, memory = _room(), sharedmemory.create(plan.workers) if job.backend == "shm" else -1
    try:
        path = f"/proc/{os.getpid()}/fd/{memory}" if memory >= 0 and plan.near else ""
        yield replace(plan, room=room, folder=plan.folder or f"{room}/disk", memory=path), memory
    finally:
        shutil.rmtree(room, ignore_errors=True)
        if memory >= 0:
            os.close(memory)


def _run(
    plan: Deployment,
    job: Job,
    live: bool,
    memory: int,
    saboteur: Callable[[Cluster], Any] | None,
    monitor: Monitor | None,
    worker: Callable[..., Any],
    args: Any,
) -> ProcessesRun:
    """First the servers, then the workers; and when these are done, the servers' reports."""
    history, begin = list[str](), time.monotonic()

    def say(text: str) -> None:
        history.append(f"{time.monotonic() - begin:.2f} s: {text}")

    coordinator = Coordinator(plan, job.timeout, live, say, monitor)
    go_on = plan.on_loss == "continue"
    group = Workers(job, live, memory, coordinator, go_on, lambda rank: os.path.exists(f"{plan.room}/w{rank}"))
    try:
        program = _packed(worker, plan, coordinator.start(), args)
        begin = time.monotonic()
        group.start(program)
        outcomes = _watched(group, coordinator, saboteur, history)
        reports = coordinator.finish()
    finally:
        try:
            group.close()
        finally:
            coordinator.end()
    started = min(outcome.started for outcome in outcomes)
    ended = [cloudpickle.loads(outcome.result) for outcome in outcomes]
    results = [(result, max(0.0, end - started)) for result, end in ended]
    return ProcessesRun(Run([*results, *reports], 0.0), job.ranks, history, group.lost)


def _watched(
    group: Workers, coordinator: Coordinator, saboteur: Callable[[Cluster], Any] | None, history: list[str]
) -> list[Success]:
    """Wait for the workers, and let somebody harm them."""
    nodes, servers = [Victim(node.pid) for node in coordinator.nodes.values()], coordinator.plan.servers
    workers = [Victim(lambda rank=rank: group.pids[rank]) for rank in range(group.job.ranks)]  # type: ignore[misc]
    cluster = Cluster(nodes[:servers], nodes[servers:], workers, [node.endpoint for node in coordinator.nodes.values()])
    cluster.history = history
    if saboteur is not None:
        group.cluster = cluster
        cluster.start(saboteur)
    try:
        outcomes = group.watch()
    finally:
        cluster.stop()
    cluster.check()
    return outcomes


def _life(comm: Communicator, worker: Callable[..., Any], plan: Deployment, endpoints: dict[int, str], args: Any) -> Any:
    """A worker process: its result, and when it had it."""
    Path(f"{plan.room}/w{comm.rank}").touch()  # from here on the others can do without it
    return work(comm, worker, plan, endpoints, args)


# ---- what is checked, packed and prepared ---------------------------------------------------------------------------------


def _packed(worker: Callable[..., Any], plan: Deployment, endpoints: dict[int, str], args: Any) -> bytes:
    try:
        return cloudpickle.dumps((_life, (worker, plan, endpoints, args)))
    except Exception as error:
        raise TypeError(f"the worker or its arguments cannot be sent to other processes: {error}") from None


def _room() -> str:
    """A folder that only this user can enter, for the sockets; the path of a socket has at most 107 bytes."""
    room = tempfile.mkdtemp(prefix="d2lps-")
    if len(room.encode()) > 90:
        os.rmdir(room)
        room = tempfile.mkdtemp(prefix="d2lps-", dir="/tmp")
    return room
