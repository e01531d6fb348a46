"""Ranks as greenlets: each runs plain blocking code until it must wait, then another one goes on.

One switch costs a third of a microsecond, a hundredth of what two threads would pay. They share one thread of the
interpreter, and so whatever torch keeps for each thread: modes are put back at every switch, and a backward pass has a
thread of its own (see backward.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from d2lps.simulator.network import Network

_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
_is_inference_mode_enabled, _is_any_autocast_enabled = torch.is_inference_mode_enabled, torch._C._is_any_autocast_enabled
_hooks, _push_hooks = torch._C._autograd._top_saved_tensors_default_hooks, torch._C._autograd._push_saved_tensors_default_hooks


class Task:
    """One rank's thread of control."""

    __slots__ = (
        "backward",
        "comm",
        "ended",
        "error",
        "go_on",
        "greenlet",
        "pause",
        "rank",
        "result",
        "script",
        "waiting_for",
        "wanted",
    )

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.comm: Any = None
        self.script: Any = None  # what it will do next, where it has said so (see script.py)
        self.greenlet: Any = None
        self.wanted = 0  # how many things must happen before it goes on
        self.waiting_for: tuple[Any, ...] = ()  # those things, for the message that explains a deadlock
        self.ended: float | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.pause: Callable[[], Any]  # lets the others go on
        self.go_on: Callable[[], Any]  # what happens when it can go on: the rank does, or its script
        self.backward: Thread | None = None  # in which its backward pass runs, while one does


class Scheduler:
    """Runs the tasks that can run, then lets the network's clock go on, until nothing is left to happen."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.failed = False
        self._hub = getcurrent()

    def add(self, task: Task, function: Callable[[Any], Any]) -> None:
        """A task that will run `function(task.comm)`."""

        def life() -> None:
            try:
                with torch.inference_mode(False):  # gradients are on, whoever waits in whatever mode meanwhile
                    task.result = function(task.comm)
            except BaseException as error:
                task.error, self.failed = error, True
            task.ended = self.network.now

        task.greenlet = greenlet(life, parent=self._hub)
        task.greenlet.task = task
        task.pause, task.go_on = self._hub.switch, task.greenlet.switch
        self.tasks.append(task)

    def run(self) -> None:
        """Return when every task has ended, when one has failed, or when nothing can happen any more."""
        ready, advance = self.ready, self.network.advance
        for task in self.tasks:  # each is started from here, or its stack would begin on top of another's
            task.greenlet.switch()
        while not self.failed and (ready or advance()):
            while ready and not self.failed:
                ready.popleft().go_on()

    def block(self, task: Task, wanted: int, waiting_for: tuple[Any, ...]) -> None:
        """Called by a task: go on when `wanted` calls of `happened` have been made for it; at its next turn, if none."""
        task.wanted, task.waiting_for = wanted, waiting_for
        if not wanted:
            self.ready.append(task)
        if _is_grad_enabled() and not (_is_inference_mode_enabled() or _is_any_autocast_enabled() or _hooks(True)):
            task.pause()
        else:
            with _neutral():
                task.pause()

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


@contextmanager
def _neutral() -> Iterator[None]:
    """Out of no_grad, the inference mode, autocast, and hooks for saved tensors (checkpointing has some), while others run."""
    grad, autocast, hooks = _is_grad_enabled(), torch.is_autocast_enabled("cpu"), []
    if autocast:  # and without the weights that it has converted: another rank's may change
        torch.set_autocast_enabled("cpu", False)
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
    while (pair := _hooks(True)) is not None:
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        for pair in reversed(hooks):
            _push_hooks(*pair)
        if autocast:
            torch.autocast_increment_nesting()
            torch.set_autocast_enabled("cpu", True)
        _set_grad_enabled(grad)
