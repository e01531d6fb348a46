"""Processes as the coordinator, and a saboteur, see them: a server's, and after a restart the next one; a worker's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import cloudpickle

from d2lps import sharedmemory
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.serving import serve
from d2lps.launch.failure import raise_in_caller
from d2lps.launch.group import Group, how_it_ended
from d2lps.launch.rank import Failure, Job, Success
from d2lps.launch.runs import packed
from d2lps.sharedmemory.linux import is_stopped
from d2lps.trace import Recorder


class Victim:
    """A process that can be killed, paused and resumed."""

    def __init__(self, pid: int = 0) -> None:
        self._pid = pid

    @property
    def pid(self) -> int:
        """Its number now; of a server that is being restarted, when it is there again; 0 if there is none."""
        return self._pid

    def kill(self) -> None:
        """SIGKILL: it cannot even say goodbye."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: as if its machine hung."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if (pid := self.pid) > 0:  # 0 would be ourselves
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Node(Victim):
    """A server's process: a run of its own of a single rank. needed: the run can't go on if it fails."""

    def __init__(self, plan: Deployment, number: int, live: bool, needed: bool = True) -> None:
        super().__init__()
        self.plan, self.number, self.live, self.needed = plan, number, live, needed
        self.server = plan.server(number)
        self.endpoint = plan.endpoint(number)
        self.group: Group | None = None
        self.ready = threading.Event()
        self.starts = self.failed = 0  # how often it was started, and since it was last ready
        self.heard = 0.0  # when it last said something
        self.report: ServerReport | None = None
        self.logs: Sequence[Recorder] = ()  # of its trace
        self.over, self.death = False, ""  # it has said its last word; how it died the last time

    @property
    def pid(self) -> int:
        self.ready.wait(5.0)
        group = self.group
        return group.pids[0] if group is not None else 0

    @property
    def stopped(self) -> bool:
        return self.group is not None and is_stopped(self.group.pids[0])

    def start(self) -> None:
        """Start the process; it says when it is ready."""
        self.end()
        self.starts += 1
        self.failed += 1
        backend = "gloo" if sharedmemory.missing() else "shm"
        self.group = Group(Job(1, backend, "cpu", 1e6, self.plan.trace), self.live, labels=[f"server {self.number}"])
        self.group.start(packed(serve, self.plan, self.number, self.endpoint, self.starts == self.failed))

    def lines(self) -> list[Connection]:
        """What can be read when it has ended."""
        return self.group.lines() if self.group is not None else []

    def look(self) -> str:
        """How the process has died, if it has; what it raised is raised, if it is needed."""
        if self.group is None:
            return ""
        self.group.collect(0)
        outcome, death = self.group.outcomes.get(0), ""
        if isinstance(outcome, Success) and self.report is None:
            self.report, self.logs = cloudpickle.loads(outcome.result), outcome.logs
        elif isinstance(outcome, Failure) and self.needed:
            raise_in_caller(outcome, f"server {self.server}")
        elif isinstance(outcome, Failure):
            death = f"has failed: {outcome.told}"
        elif self.group.dead:
            death = how_it_ended(self.group.dead[0])
        if death:
            self.death = death
            self.end()
        return death

    def end(self) -> None:
        """End the process, if there is one."""
        self.ready.clear()
        group, self.group = self.group, None
        if group is not None:
            group.close()
