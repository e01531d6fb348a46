"""Backward passes in which ranks wait for one another.

torch's autograd keeps one queue of work for each thread, and ranks are greenlets of one thread: while one of them waits
inside a gradient hook, the backward pass of the next would join its queue, and each would run the other's hooks. So a
rank's backward pass gets a thread of its own. Still only one thread runs at a time: the rank's greenlet waits for it,
and lets other ranks go on when a hook does. Such a wait costs some 50 us instead of one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent
from torch.autograd import Variable

from d2lps.simulator.scheduler import Task, step_aside


class BackwardThread:
    """One backward pass of one rank."""

    def __init__(self, task: Task, engine: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.task, self.engine, self.arguments, self.options = task, engine, arguments, options
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = self.killed = False
        self._turn: SimpleQueue[None] = SimpleQueue()  # a token: it is the greenlet's turn
        self._go_on: SimpleQueue[None] = SimpleQueue()  # a token: it is the thread's turn
        self.thread = threading.Thread(target=self._live, name=f"backward of rank {task.rank}", daemon=True)

    def run(self) -> Any:
        """Called by the rank's greenlet: the pass's result, or its error."""
        task, pause, grad = self.task, self.task.pause, torch.is_grad_enabled()
        task.pause, task.backward = self._pause, self.thread
        self.thread.start()
        try:
            self._turn.get()
            while not self.ended:
                step_aside(pause)
                self._go_on.put(None)
                self._turn.get()
        finally:  # by an interrupt too, or when the simulation is given up
            self.killed = True
            self._go_on.put(None)
            self.thread.join()
            task.pause, task.backward = pause, None
            torch.set_grad_enabled(grad)
        if self.error is not None:
            raise self.error
        return self.result

    def _live(self) -> None:
        enabled, dtype = self.autocast
        try:
            with torch.autocast("cpu", dtype, enabled), self.task.counting or nullcontext():
                self.result = self.engine.run_backward(*self.arguments, **self.options)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._turn.put(None)

    def _pause(self) -> None:
        """Called by a hook, in this thread."""
        if not self.killed:
            self._turn.put(None)
            self._go_on.get()
        if self.killed:
            raise GreenletExit


class _Engine:
    """torch's autograd engine, but that a rank's backward pass runs in a thread of its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        task = getattr(getcurrent(), "task", None)  # in a backward thread there is none: passes may nest
        if task is None:
            return self.engine.run_backward(*arguments, **options)
        return BackwardThread(task, self.engine, arguments, options).run()


_lock, _simulations = threading.Lock(), 0
_torch: Any = Variable  # where torch.autograd looks for its engine


@contextmanager
def backward_in_threads() -> Iterator[None]:
    """Ranks may wait in gradient hooks while the block runs; everyone else's backward passes are as always."""
    global _simulations
    with _lock:
        if not _simulations:
            _torch._execution_engine = _Engine(_torch._execution_engine)
        _simulations += 1
    try:
        yield
    finally:
        with _lock:
            _simulations -= 1
            if not _simulations:
                _torch._execution_engine = _torch._execution_engine.engine
