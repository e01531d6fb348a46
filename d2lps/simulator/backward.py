"""Backward passes in which ranks wait for one another.

torch's autograd keeps one queue of work for each thread, and ranks are greenlets of one thread: while one of them waits
inside a gradient hook, the backward pass of the next would join its queue, and each would run the other's hooks. So a
rank's backward pass gets a thread of its own. Still only one thread runs at a time: the rank's greenlet waits for it,
and lets other ranks go on when a hook does. Such a wait costs some 50 us instead of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent
from torch.autograd import Variable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from d2lps.simulator.scheduler import Task, step_aside


def _in_thread(task: Task, run: Callable[[], Any]) -> Any:
    """Called by the rank's greenlet: the result of a backward pass, or its error."""
    turn, go_on = SimpleQueue[None](), SimpleQueue[None]()  # in which stands whose turn it is: the greenlet's, the thread's
    outcome, over = Future[Any](), threading.Event()
    modes = _get_current_dispatch_mode_stack()  # what counts, or looks, in the greenlet does so here
    dtype, enabled = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def live() -> None:
        try:
            for mode in modes:
                _push_mode(mode)
            with torch.autocast("cpu", dtype, enabled):
                outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)
        turn.put(None)

    def pause_in_hook() -> None:
        if not over.is_set():
            turn.put(None)
            go_on.get()
        if over.is_set():
            raise GreenletExit

    thread = threading.Thread(target=live, name=f"backward of rank {task.rank}", daemon=True)
    pause, grad = task.pause, torch.is_grad_enabled()
    task.pause, task.backward = pause_in_hook, thread
    thread.start()
    try:
        turn.get()
        while not outcome.done():
            step_aside(task, pause)
            go_on.put(None)
            turn.get()
    finally:  # by an interrupt too, or when the simulation is given up
        over.set()
        go_on.put(None)
        thread.join()
        task.pause, task.backward = pause, None
        torch.set_grad_enabled(grad)
    return outcome.result()


class _Engine:
    """torch's autograd engine, but that a rank's backward pass runs in a thread of its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        task = getattr(getcurrent(), "task", None)  # in a backward thread there is none: passes may nest
        run = partial(self.engine.run_backward, *arguments, **options)
        return run() if task is None else _in_thread(task, run)


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
