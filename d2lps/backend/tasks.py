"""What a group has been asked to do, one after another: the thread that does it, and what that thread takes over.

Why a thread: DDP calls from inside backward, and wants to go on. Why only one: a collective is many messages that match by
their order, so two at a time of one group would mix theirs; and all ranks must do them in the same order. Groups do not wait
for one another: each has its thread, and memory or sockets of its own. A call that the program waits for anyway, with nothing
before it, is done at once where it was called: no thread has to be woken.

What follows a collective, the callbacks of its future, may call others and wait for them. It runs on a thread of its own,
which has the turn meanwhile: what it calls is done at once, before anything that was asked for earlier and is still waiting.
So all ranks do it at the same place, whichever of them was slow; and what it waits for, it does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from d2lps.comm import RankHung

Task = Callable[[], None]


class TaskQueue:
    """
    >>> tasks, done = TaskQueue("example"), []
    >>> for number in range(3):
    ...     tasks.submit(lambda number=number: done.append(number))
    >>> tasks.stop()
    >>> done
    [0, 1, 2]
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._pending = 0  # tasks that have not ended
        self._thread: threading.Thread | None = None
        self._at_work: int | None = None  # the thread that has the turn
        self._stopped = False
        self._moved = 0.0  # when the last task has ended

    def submit(self, task: Task, at_once: bool = False) -> None:
        """Have a task done, which raises nothing; `at_once`: here, if no other comes before it."""
        if self.inside() or self._stopped:  # a part of the task that is being done, or what is left when all is done
            self._do(task)
            return
        with self._lock:
            here = at_once and not self._pending
            self._pending += 1
            if here:
                self._turn.acquire()  # free, for nothing is pending; who comes next waits for it
            else:
                self._tasks.put(task)
            if not here and self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"d2lps {self.name}", daemon=True)
                self._thread.start()
        if here:
            self._take_turn(task)

    def inside(self) -> bool:
        """Whether the calling thread is the one that has the turn: in a task, or in what follows one."""
        return self._at_work == threading.get_ident()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._turn.acquire()
            self._take_turn(task)
            del task  # its tensors should not live on until the next one comes

    def _take_turn(self, task: Task) -> None:
        self._at_work = threading.get_ident()
        self._do(task)
        with self._lock:
            self._pending -= 1
            self._at_work = None
            self._turn.release()

    def _do(self, task: Task) -> None:
        task()
        self._moved = time.monotonic()

    def do_until(self, done: Callable[[], bool]) -> None:
        """For a callback that waits, while all that was asked for later stands still: do that now, up to what it waits for."""
        while self.inside() and not done():
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                raise RankHung(f"{self.name}: what is waited for here cannot be done before this wait has ended") from None
            if task is not None:
                with self._lock:
                    self._pending -= 1
                self._do(task)

    def call_back(self, callbacks: Task, timeout: float) -> bool:
        """Give the turn to callbacks until they have ended; False if they do nothing more for so many seconds."""
        if threading.current_thread() is not self._thread:  # they are part of other callbacks
            callbacks()
            return True

        def run() -> None:
            self._at_work = threading.get_ident()
            callbacks()

        thread = threading.Thread(target=run, name=f"d2lps {self.name}, after a collective", daemon=True)
        self._moved = time.monotonic()
        thread.start()
        while thread.is_alive() and (patience := self._moved + timeout - time.monotonic()) > 0:
            thread.join(patience)
        self._at_work = threading.get_ident()
        return not thread.is_alive()

    def stop(self, patience: float = 10.0) -> None:
        """Let what was submitted be done, and end the thread; one that is stuck is left to die with the process."""
        self._stopped = True
        if self._thread is not None:
            self._tasks.put(None)
            if not self.inside():
                self._thread.join(patience)
            self._thread = None


def callers_context(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Called by the program's thread; what it returns is entered by the thread that does the work.

    Nothing that a collective does is to be differentiated, and only inside inference mode its tensors may be written. On a
    GPU it goes on a stream of its own, after what the program had asked for before, and is done when the block ends.
    """
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
    ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @contextmanager
    def entered() -> Iterator[None]:
        with mode():
            if ready is None:
                yield
                return
            stream = torch.cuda.Stream(device)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                yield
                stream.synchronize()

    return entered
