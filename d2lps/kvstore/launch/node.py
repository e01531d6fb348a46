"""One server process, as the coordinator sees it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

import cloudpickle

from d2lps import sharedmemory
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.serving import serve
from d2lps.launch.failure import raise_in_caller
from d2lps.launch.group import Group
from d2lps.launch.rank import Failure, Job, Success
from d2lps.sharedmemory.linux import is_stopped
from d2lps.trace import Recorder


class Node:
    """A node's process, and after a restart the next one: a run of its own of a single rank."""

    def __init__(self, plan: Deployment, number: int, live: bool) -> None:
        self.plan, self.number, self.live = plan, number, live
        self.server = number % plan.servers
        self.endpoint = plan.endpoint(number)
        self.group: Group | None = None
        self.ready = threading.Event()
        self.starts = self.failed = 0  # how often it was started, and since it was last ready
        self.heard = 0.0  # when it last said something
        self.report: ServerReport | None = None
        self.logs: Sequence[Recorder] = ()  # of its trace
        self.over = False  # it has said its last word

    @property
    def stopped(self) -> bool:
        return self.group is not None and is_stopped(self.group.pids[0])

    def pid(self) -> int:
        """Of the process, once it is ready; 0 if there is none."""
        self.ready.wait(5.0)
        group = self.group
        return group.pids[0] if group is not None else 0

    def start(self) -> None:
        """Start the process; it says when it is ready."""
        self.end()
        self.starts += 1
        self.failed += 1
        backend = "gloo" if sharedmemory.missing() else "shm"
        self.group = Group(Job(1, backend, "cpu", 1e6, self.plan.trace), self.live, labels=[f"server {self.number}"])
        self.group.start(cloudpickle.dumps((serve, (self.plan, self.number, self.endpoint))))

    def descriptors(self) -> list[int]:
        if self.group is None or self.group.keeper is None:
            return []
        return [self.group.keeper.fileno(), *(control.fileno() for control in self.group.pending.values())]

    def look(self) -> str:
        """How the process has died, if it has; what it raised is raised."""
        if self.group is None:
            return ""
        self.group.collect(0)
        outcome = self.group.outcomes.get(0)
        if isinstance(outcome, Failure):
            self._raise(outcome)
        if isinstance(outcome, Success) and self.report is None:
            self.report, self.logs = cloudpickle.loads(outcome.result), outcome.logs
        if not self.group.dead:
            return ""
        status = self.group.dead[0]
        self.end()
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with exit status {os.WEXITSTATUS(status)}"

    def _raise(self, failure: Failure) -> None:
        try:
            raise_in_caller(failure, 0, 1)
        except Exception as error:
            error.add_note(f"in the process of server {self.server}")
            raise

    def end(self) -> None:
        """End the process, if there is one."""
        self.ready.clear()
        group, self.group = self.group, None
        if group is not None:
            group.close()
