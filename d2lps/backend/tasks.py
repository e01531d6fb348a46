"""What a group has been asked to do, one after another: the thread that does it, and what that thread takes over.

Why a thread: DDP calls from inside backward, and wants to go on. Why only one: a collective is many messages that match by
their order, so two at a time of one group would mix theirs; and all ranks must do them in the same order. Groups do not wait
for one another: each has its thread, and memory or sockets of its own. A call that the program waits for anyway, with nothing
before it, is done at once where it was called: no thread has to be woken.

What follows a collective, the callbacks of its future, may call others and wait for them. It runs on a thread of its own,
which has the turn meanwhile: what it calls is done at once, before anything that was asked for earlier and is still waiting.
So all ranks do it at the same place, whichever of them was slow; and what it waits for, it does.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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
        self._tasks: queue.Queue[Task] = queue.Queue()
        self._turn = threading.Lock()
        self._at_work: int | None = None  # the thread that has the turn
        self._done = 0  # tasks
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"d2lps {name}", daemon=True)
        self._thread.start()

    def submit(self, task: Task, at_once: bool = False) -> None:
        """Have a task done, which raises nothing; `at_once`: here, if no other comes before it."""
        if self.inside() or self._stopped:  # a part of the task that is being done, or what is left when all is done
            self._do(task)
        elif at_once and not self._tasks.unfinished_tasks:
            self._take_turn(task)
        else:
            self._tasks.put(task)

    def inside(self) -> bool:
        """Whether the calling thread is the one that has the turn: in a task, or in what follows one."""
        return self._at_work == threading.get_ident()

    def _run(self) -> None:
        while not self._stopped or self._tasks.unfinished_tasks:
            self._take_turn(self._tasks.get())
            self._tasks.task_done()

    def _take_turn(self, task: Task) -> None:
        with self._turn:
            self._at_work = threading.get_ident()
            self._do(task)
            self._at_work = None

    def _do(self, task: Task) -> None:
        task()
        self._done += 1

    def do_until(self, done: Callable[[], bool]) -> None:
        """For a callback that waits, while all that was asked for later stands still: do that now, up to what it waits for."""
        while self.inside() and not done():
            try:
                self._do(self._tasks.get_nowait())
            except queue.Empty:
                raise RankHung(f"{self.name}: what is waited for here cannot be done before this wait has ended") from None
            self._tasks.task_done()

    def call_back(self, callbacks: Task, patience: float) -> bool:
        """Give the turn to callbacks until they have ended; False if they do nothing more for so many seconds."""

        def run() -> None:
            self._at_work = threading.get_ident()
            callbacks()

        mine, done = self._at_work, -1
        thread = threading.Thread(target=run, name=f"d2lps {self.name}, after a collective", daemon=True)
        thread.start()
        while thread.is_alive() and done != self._done:
            done = self._done
            thread.join(patience)
        self._at_work = mine
        return not thread.is_alive()

    def stop(self, patience: float = 10.0) -> None:
        """Let what was submitted be done, and end the thread; one that is stuck is left to die with the process."""
        self._stopped = True
        self._tasks.put(lambda: None)  # so that the thread looks
        if not self.inside():
            self._thread.join(patience)


def callers_context(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Called by the program's thread; what it returns is entered by the thread that does the work.

    Nothing that a collective does is to be differentiated, and only inside inference mode its tensors may be written. On a
    GPU it goes on a stream of its own, after what the program had asked for before, and is done when the block ends.
    """
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
    ready: Any = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @contextmanager
    def entered() -> Iterator[None]:
        stream = torch.cuda.Stream(device) if ready else None
        with mode(), torch.cuda.stream(stream) if stream else nullcontext():
            if stream:
                stream.wait_event(ready)
            yield
            if stream:
                stream.synchronize()

    return entered
