"""What a rank has started, in a simulation: a task beside its own."""

from __future__ import annotations

from collections.abc import Callable

from d2lps.simulator.scheduler import Scheduler, Task


class InLane:
    """As much of a `concurrent.futures.Future` as is asked of what was started."""

    def __init__(self, scheduler: Scheduler, task: Task, function: Callable[[], None]) -> None:
        self.scheduler, self.task = scheduler, task
        self.error: BaseException | None = None
        self._waiting: list[Task] = []
        self.scheduler.add(self.task, function, self._ended)

    def _ended(self) -> None:
        self.error, self.task.error = self.task.error, None
        for task in self._waiting:
            self.scheduler.happened(task)

    def done(self) -> bool:
        return self.task.ended is not None

    def exception(self) -> BaseException | None:
        if not self.done():
            waiter = self.scheduler.current()
            self._waiting.append(waiter)
            self.scheduler.block(waiter, "join")
        return self.error
