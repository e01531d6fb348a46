"""One thread that does a group's collectives in the order in which the program called them.

Why a thread: DDP calls from inside backward, and wants to go on. Why only one: a collective is many messages that match by
their order, so two at a time of one group would mix theirs, and `d2lps.sharedmemory` takes one collective at a time; and all
ranks must do them in the same order. Groups do not wait for one another: each has its thread, and memory or sockets of its own.
A call that the program waits for anyway, with nothing before it, is done at once where it was called: no thread has to be woken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]


class Worker:
    """
    >>> worker, done = Worker("example"), []
    >>> for number in range(3):
    ...     worker.submit(lambda number=number: done.append(number), at_once=False)
    >>> worker.stop()
    >>> done
    [0, 1, 2]
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._pending = 0  # tasks that have not ended
        self._thread: threading.Thread | None = None

    def submit(self, task: Task, at_once: bool) -> None:
        """Have a task done, which raises nothing; `at_once`: here, if no other comes before it."""
        with self._lock:
            here = at_once and not self._pending
            self._pending += 1
            if here:
                self._turn.acquire()  # free, for nothing is pending; who comes next waits for it
            else:
                self._start()
                self._tasks.put(task)
        if here:
            self._do(task)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"d2lps {self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._turn.acquire()
            self._do(task)
            del task  # its tensors should not live on until the next one comes

    def _do(self, task: Task) -> None:
        try:
            task()
        finally:
            with self._lock:
                self._pending -= 1
                self._turn.release()

    def stop(self, patience: float = 10.0) -> None:
        """Let what was submitted be done, and end the thread; one that is stuck is left to die with the process."""
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(patience)
            self._thread = None
