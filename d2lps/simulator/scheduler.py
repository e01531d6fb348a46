"""Ranks as greenlets: each runs plain blocking code until it must wait, then another one goes on.

One switch costs a third of a microsecond, a hundredth of what two threads would pay. They share one thread of the
interpreter, and so whatever torch keeps for each thread: the gradient mode is put back at every switch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from d2lps.simulator.network import Network

_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled


class Task:
    """One rank's thread of control."""

    __slots__ = ("comm", "ended", "error", "greenlet", "rank", "result", "waiting_for", "wanted")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.comm: Any = None
        self.greenlet: Any = None
        self.wanted = 0  # how many things must happen before it goes on
        self.waiting_for: tuple[Any, ...] = ()  # those things, for the message that explains a deadlock
        self.ended: float | None = None
        self.result: Any = None
        self.error: BaseException | None = None


class Scheduler:
    """Runs the tasks that can run, then lets the network's clock go on, until nothing is left to happen."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self._hub = getcurrent()
        self._to_hub = self._hub.switch

    def add(self, task: Task, function: Callable[[], Any]) -> None:
        """A task that will run `function`."""

        def life() -> None:
            try:
                task.result = function()
            except BaseException as error:
                task.error = error
            task.ended = self.network.now

        task.greenlet = greenlet(life, parent=self._hub)
        self.tasks.append(task)
        self.ready.append(task)

    def run(self) -> None:
        """Return when every task has ended, when one has failed, or when nothing can happen any more."""
        ready, advance = self.ready, self.network.advance
        while True:
            while ready:
                task = ready.popleft()
                task.greenlet.switch()
                if task.error is not None:
                    return
            if not advance():
                return

    def block(self, task: Task, wanted: int, waiting_for: tuple[Any, ...]) -> None:
        """Called by a task: go on when `wanted` calls of `happened` have been made for it."""
        task.wanted, task.waiting_for = wanted, waiting_for
        grad = _is_grad_enabled()
        self._to_hub()
        if _is_grad_enabled() is not grad:
            _set_grad_enabled(grad)

    def happened(self, task: Task) -> None:
        """One of the things that a blocked task waits for."""
        task.wanted -= 1
        if not task.wanted:
            self.ready.append(task)

    def kill(self) -> None:
        """End what still hangs, so that no greenlet outlives the simulation with its references."""
        for task in self.tasks:
            if task.ended is None and task.greenlet:
                task.greenlet.throw()
