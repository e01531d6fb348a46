"""`kvstore.run`: the parameter server for real, workers and servers as processes of this machine."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle
import zmq
from msgspec.structs import replace

from d2lps.comm import RankHung
from d2lps.kvstore.core.report import ServerReport, StoreRun
from d2lps.kvstore.launch.chaos import Cluster, Saboteur
from d2lps.kvstore.launch.coordinator import Coordinator
from d2lps.kvstore.launch.joined import join
from d2lps.kvstore.launch.node import Node, Victim
from d2lps.kvstore.launch.working import begun, work
from d2lps.kvstore.network.deployment import Deployment, deploy
from d2lps.kvstore.network.monitor import Monitor
from d2lps.launch.group import Group
from d2lps.launch.launched import under_launcher
from d2lps.launch.rank import Job, Success
from d2lps.launch.runs import check, check_open_files, packed, resolve
from d2lps.result import Run
from d2lps.trace import Trace


class Workers(Group):
    """As the ranks of `d2lps.run`, but with an eye on the servers; and the death of one need not be the end of all."""

    cluster: Cluster  # in the hands of a saboteur

    def __init__(self, job: Job, coordinator: Coordinator) -> None:
        super().__init__(job, coordinator.live, coordinator.plan.room)
        self.coordinator = coordinator
        self.lost: dict[int, str] = {}

    def run(self, saboteur: Saboteur | None, worker: Callable[..., Any], args: tuple[Any, ...]) -> ProcessesRun:
        """First the servers, then the workers, with somebody who harms them; when these are done, the servers' reports."""
        coordinator, servers = self.coordinator, self.coordinator.plan.servers
        self.start(packed(work, worker, coordinator.plan, coordinator.start(), args))
        nodes, resizing, workers = [*coordinator.nodes.values()], coordinator.resizing, [*map(Victim, self.pids)]
        self.cluster = Cluster(nodes[:servers], nodes[servers:], workers, coordinator.history, resizing.wish)
        with self.cluster.attacked(saboteur):
            try:
                outcomes = self.watch()
            finally:
                resizing.stop()
        reports = coordinator.finish()
        trace = _traced(outcomes, [*coordinator.serving, *coordinator.resizing.left]) if coordinator.plan.trace else None
        return ProcessesRun(outcomes, reports, coordinator.history, self.lost, trace)

    def collect(self, patience: float) -> None:
        """Wait for words of workers or servers; take in both, and what the saboteur raises."""
        zmq.select([self.coordinator.control, *self.lines(), *self.coordinator.lines()], [], [], patience)
        super().collect(0)
        if self._can_go_on():
            for rank in list(self.dead):
                self._lose(rank)
        self.coordinator.look()
        self.cluster.check()

    def _can_go_on(self) -> bool:
        """Without those that have died: somebody is left, and they had begun."""
        plan = self.coordinator.plan
        left = self.job.ranks - len(self.dead) - len(self.lost)
        return left > 0 and all(begun(plan, rank).exists() for rank in self.dead)

    def _lose(self, rank: int) -> None:
        """The run goes on without it."""
        death = str(self.died(rank))
        del self.dead[rank]
        self.lost[rank] = death
        warnings.warn(f"{death}; the others go on without it", stacklevel=2)
        self.outcomes[rank] = Success(cloudpickle.dumps((None, 0.0)), float("inf"), 0.0)
        self.coordinator.say(death.splitlines()[0])
        self.coordinator.lose(rank)

    def check_waits(self) -> None:
        """A hang may be a server's."""
        try:
            super().check_waits()
        except RankHung as error:
            for node in self.coordinator.nodes.values():
                if node.stopped:
                    which = "" if node in self.coordinator.serving else "the backup of "
                    error.add_note(f"{which}server {node.server} is stopped (SIGSTOP)")
            raise


def _traced(outcomes: Sequence[Success], nodes: Sequence[Node]) -> Trace:
    """All processes of a machine have one clock; time begins with the workers, though servers were there before them."""
    logs = [log for node in nodes for log in node.logs]
    for log in logs:
        log.started = min(outcome.started for outcome in outcomes)
    ranks = len(outcomes) + 1 + max(node.server for node in nodes)
    return Trace([*(log for outcome in outcomes for log in outcome.logs), *logs], ranks)


class ProcessesRun(StoreRun):
    """A StoreRun, with what has happened to the processes."""

    def __init__(
        self,
        outcomes: Sequence[Success],
        reports: Sequence[ServerReport],
        history: list[str],
        lost: dict[int, str],
        trace: Trace | None,
    ) -> None:
        started = min(outcome.started for outcome in outcomes)
        ended = [outcome.returned(rank) for rank, outcome in enumerate(outcomes)]
        results = [(result, max(0.0, end - started)) for result, end in ended]
        super().__init__(Run([*results, *reports], 0.0, trace), len(outcomes))
        self.history, self.lost = history, lost  # lost: {worker: how it died}


def run(
    worker: Callable[..., Any],
    workers: int,
    servers: int,
    *args: Any,
    consistency: str = "bsp",
    staleness: int = 0,
    durability: str = "memory",
    saboteur: Saboteur | None = None,
    monitor: Monitor | None = None,
    backend: str = "auto",
    timeout: float = 60.0,
    live: bool = False,
    **options: Any,
) -> StoreRun:
    """Call `worker(kv, *args)` in worker processes that have server processes; the results are the workers'.

    >>> def worker(kv):
    ...     kv.init("w", weights := torch.zeros(3))
    ...     kv.pushpull("w", torch.ones(3), weights).wait()
    ...     return weights.tolist()
    >>> kvstore.run(worker, workers=2, servers=1)               # doctest: +SKIP
    Run([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])

    consistency, staleness: see `clocks`. durability, options: see `Deployment`. saboteur: see `Cluster`. monitor: see
    `Monitor`. backend, timeout, live: as in `d2lps.run`, for kv.comm too. The Run has `time`, `values`, `servers` and
    `staleness` as simulate's (a server that was restarted counts anew), `history`, deaths and recoveries, and `lost`, who died
    of what: a worker that is killed is not waited for, and its result is None.
    Under torchrun it starts nothing and joins that job of workers + servers processes, on any number of machines (see `joined`).
    Raises what a worker raises, RankDied, RankHung, as d2lps.run does, Mismatch (see `Placement`), and leaves nothing behind (but
    a temporary folder, if the caller is killed while it starts its servers). Cost: on one machine a byte of a big tensor is
    copied once, from where one process has it to where the other wants it (see `wire`); of what is pulled the server makes a copy
    first, which it keeps until the worker has it. Over tcp, and where the kernel refuses, bytes go into a socket and out of it.
    """
    check(worker, "kv", backend, timeout, 256, workers=workers, servers=servers)
    _check_own(saboteur, monitor)
    options |= {"consistency": consistency, "staleness": staleness, "durability": durability}
    if under_launcher():
        return join(worker, workers, servers, args, backend, timeout, saboteur=saboteur, monitor=monitor, **options)
    plan = deploy(workers, servers, **options)
    job, nodes = Job(workers, *resolve(backend, workers), timeout, plan.trace), servers * (1 + plan.replicated)
    check_open_files(f"{workers} workers and {nodes} processes of servers", 5 * workers + 9 * nodes + 20)
    with _prepared(job, plan, live, monitor) as group:
        return group.run(saboteur, worker, args)


def _check_own(saboteur: object, monitor: object) -> None:
    if saboteur is not None and not callable(saboteur):
        raise TypeError(f"saboteur={saboteur!r} is no function of a kvstore.Cluster")
    if monitor is not None and not isinstance(monitor, Monitor):
        raise TypeError(f"monitor={monitor!r} is no kvstore.Monitor")


@contextmanager
def _prepared(job: Job, plan: Deployment, live: bool, monitor: Monitor | None) -> Iterator[Workers]:
    """The workers and servers of a run, with a folder of its own; at the end all of it is gone.

    Only this user can enter the folder, which is for the sockets; the path of a socket has at most 107 bytes.
    """
    usual = tempfile.gettempdir()
    with ExitStack() as stack:
        room = tempfile.mkdtemp(prefix="d2lps-", dir=usual if len(usual.encode()) < 75 else "/tmp")
        stack.callback(shutil.rmtree, room, ignore_errors=True)
        plan = replace(plan, room=room, folder=plan.folder or f"{room}/disk")
        coordinator = Coordinator(plan, job.timeout, live, monitor)
        stack.callback(coordinator.end)
        group = Workers(job, coordinator)
        stack.callback(group.close)
        yield group
