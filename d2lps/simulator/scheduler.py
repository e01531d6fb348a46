"""Ranks as greenlets: each runs plain blocking code until it must wait, then another one goes on.

One switch costs a third of a microsecond, and one more for what is put back: a small part of what two threads would pay. For
ranks share one process and one thread, and so whatever torch keeps for these. Modes and random numbers are put back at every
switch, and a backward pass has a thread of its own (see backward.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch.utils._python_dispatch import _disable_current_modes

from d2lps.comm import RankHung
from d2lps.simulator import saving
from d2lps.simulator.network import Alarm, Network

_MOST_LOOKS = 10_000

_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
_is_inference_mode_enabled, _is_any_autocast_enabled = torch.is_inference_mode_enabled, torch._C._is_any_autocast_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_random = torch.default_generator


@dataclass(slots=True, eq=False)
class Task:
    """One thread of control: a rank's own, or that of something it has started."""

    rank: int
    device: int  # what its computing goes through, of which others on its node want a share: a link of the network
    groups: dict[str, Any] = field(default_factory=dict)  # its communicators, by name
    counting: Any = None  # what it computes, while that is counted
    random: list[torch.Tensor] = field(default_factory=list)  # where its rank's random numbers are; all tasks of a rank share it
    script: Any = None  # what it will do next, where it has said so (see script.py)
    greenlet: Any = None
    flow: Alarm | None = None  # what it computes, while it does
    killed: bool = False
    looks: tuple[float, int] = (0.0, 0)  # when it has last tested for something, and how often at that time
    wanted: int = 0  # how many things must happen before it goes on
    waiting_for: Any = ""  # those: a word, (a meeting, of whom), or the ends of an exchange
    ended: float | None = None
    result: Any = None
    error: BaseException | None = None  # what it ended with; before that, what its wait will end with
    pause: Any = None  # a function: lets the others go on
    go_on: Any = None  # a function: what happens when it can go on, which is that it does, or its script
    backward: threading.Thread | None = None  # in which its backward pass runs, while one does


class Scheduler:
    """Runs the tasks that can run, then lets the network's clock go on, until nothing is left to happen."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.failed = False
        self._hub = getcurrent()

    def add(self, task: Task, function: Callable[[], Any], ended: Callable[[], None] | None = None) -> None:
        """A task that will run `function()`, and call `ended` after it; without that, its error ends the simulation."""

        def life() -> None:
            try:
                with torch.inference_mode(False):  # gradients are on, whoever waits in whatever mode meanwhile
                    _draw_on(task)
                    task.result = function()
                    _stop_drawing(task)
            except GreenletExit:  # it was ended where it stood
                pass
            except BaseException as error:
                _stop_drawing(task)
                task.error = error
                self.failed |= ended is None
            take_off()
            if task.killed:
                task.result = None  # whatever it has made of its end
            task.ended = self.network.now
            if ended is not None:
                ended()

        def begin() -> None:  # in the hub, which need not be the thread that asks for it
            task.greenlet = greenlet(life, parent=self._hub)
            task.greenlet.task = task
            task.go_on = task.greenlet.switch
            # It begins where it will go on, in `run`: torch walks the stack when it raises an error, and finds it as it was.
            self.ready.appendleft(task)

        task.pause, task.go_on = self._hub.switch, begin
        self.tasks.append(task)
        self.ready.append(task)

    def run(self) -> None:
        """Return when every task has ended, when one has failed, or when nothing can happen any more."""
        ready, advance = self.ready, self.network.advance
        while not self.failed and (ready or advance()):
            while ready and not self.failed:
                ready.popleft().go_on()

    def block(self, task: Task, waiting_for: Any = None) -> None:
        """Called by a task: go on when `happened` has been called for it (as often as `task.wanted` says, if that is given)."""
        self.check_runs(task)
        if task.killed:
            raise GreenletExit
        if waiting_for is not None:
            task.waiting_for, task.wanted = waiting_for, 1
        step_aside(task, task.pause)
        if task.error is not None:
            error, task.error = task.error, None
            raise error

    def check_runs(self, task: Task) -> None:
        if task.backward is None and getcurrent() is not task.greenlet:
            told = f"rank {task.rank}: this communicator belongs to another of its rank's lanes"
            raise RuntimeError(f"{told}: what is started has its own, the first argument of its function")

    def until(self, future: Future[Any], waiting_for: str) -> None:
        """Called by a task: go on when the future is done, which another one sees to."""
        if not Future.done(future):
            waiter = self.current()
            future.add_done_callback(lambda _: self.happened(waiter))
            self.block(waiter, waiting_for)

    def current(self) -> Task:
        """The task that runs."""
        here = getcurrent()
        return next((task for task in self.tasks if task.backward is threading.current_thread()), None) or here.task

    def happened(self, task: Task) -> None:
        """One of the things that a blocked task waits for."""
        task.wanted -= 1
        if not task.wanted:
            self.ready.append(task)

    def fail(self, task: Task, error: Exception) -> None:
        """What a blocked task waits for will never happen."""
        if task.wanted > 0:
            task.error, task.wanted, task.go_on = error, 0, task.greenlet.switch
            self.ready.append(task)

    def looked(self, task: Task, did: str = "tested", most: int = _MOST_LOOKS) -> None:
        """A task asks whether something has happened; if it does nothing else, nothing ever will."""
        now = self.network.now
        task.looks = (now, task.looks[1] + 1 if task.looks[0] == now else 1)
        if task.looks[1] > most:
            told = f"rank {task.rank} has {did} {most:,} times at {now:.6g} s of virtual time"
            raise RankHung(f"{told}, which goes on only while it waits, sleeps or computes")

    def busy(self, task: Task, seconds: float) -> None:
        """Let a task's device compute for so long; `happened` when it has."""

        def over() -> None:
            task.flow = None
            self.happened(task)

        task.flow = Alarm(over)
        self.network.send(task.flow, (task.device,), 0.0, seconds, 1.0)  # all that compute there share it

    def end(self, task: Task) -> None:
        """End a task where it stands."""
        task.killed, task.wanted, task.go_on = True, -1, lambda: None  # whatever happens to it now comes too late,
        if task.ended is None:
            task.error = None  # and so does what it was to hear, such as that another has died with it
        if task.flow is not None:
            self.network.cancel(task.flow)
        if task.ended is None and task.greenlet:
            task.greenlet.throw()
        elif task.ended is None:
            task.ended = self.network.now  # it had not begun

    def kill(self) -> None:
        """End what still hangs, so that no greenlet outlives the simulation with its references."""
        for task in self.tasks:
            self.end(task)


def step_aside(task: Task, pause: Callable[[], Any]) -> None:
    """Let others go on, in none of the modes that this rank is in, and with random numbers of their own."""
    _stop_drawing(task)
    watched = _dispatch_modes() or _function_modes() or saving.top(True)
    if _is_grad_enabled() and not (_is_inference_mode_enabled() or _is_any_autocast_enabled() or watched):
        pause()
    else:
        with _neutral():
            pause()
    _draw_on(task)


def _stop_drawing(task: Task) -> None:
    task.random[:] = [_random.get_state()]


def _draw_on(task: Task) -> None:
    """Where the last task of this rank has stopped."""
    if task.random:
        _random.set_state(task.random[0])


def take_off() -> list[Any]:
    """The modes that see calls of torch's functions, such as `torch.device("meta")`, the innermost first; they are off now."""
    return [torch._C._pop_torch_function_stack() for _ in range(_function_modes())]


def put_on(modes: list[Any]) -> None:
    """What was taken off."""
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


@contextmanager
def _neutral() -> Iterator[None]:
    """Out of no_grad, the inference mode, autocast, and whatever looks at tensors as they are made, while others run."""
    grad, autocast, modes, hooks = _is_grad_enabled(), torch.is_autocast_enabled("cpu"), take_off(), []
    if autocast:  # and without the weights that it has converted: another rank's may change
        torch.set_autocast_enabled("cpu", False)
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
    while (pair := saving.top(True)) is not None:
        hooks.append(pair)
        saving.pop()
    try:
        with torch.inference_mode(False), _disable_current_modes():
            yield
    finally:
        for pair in reversed(hooks):
            saving.push(*pair)
        if autocast:
            torch.autocast_increment_nesting()
            torch.set_autocast_enabled("cpu", True)
        _set_grad_enabled(grad)
        put_on(modes)
