"""What a rank has started, in a simulation: a task beside its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2lps.comm.started import Started
from d2lps.simulator.scheduler import Scheduler, Task


class InLane(Started):
    def __init__(self, comm: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(comm)
        self.scheduler: Scheduler = comm.world.scheduler
        self.task: Task = comm.task
        self._waiting: list[Task] = []
        self.scheduler.add(self.task, lambda: function(comm, *args), self._ended)

    def _ended(self) -> None:
        self.error, self.task.error = self.task.error, None
        for task in self._waiting:
            self.scheduler.happened(task)

    def is_done(self) -> bool:
        return self.task.ended is not None

    def wait(self) -> None:
        if not self.is_done():
            waiter = self.scheduler.current()
            self._waiting.append(waiter)
            self.scheduler.block(waiter, "join")
