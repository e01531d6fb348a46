"""What torch.distributed gives for a call that goes on in the background."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from d2lps import comm
from d2lps.comm import RankHung

Future = torch.futures.Future
_Base: Any = dist.Work


class BookWork(_Base):
    """What the works of collectives and of messages have in common."""

    results: list[torch.Tensor]

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self.results

    def synchronize(self) -> None:
        self.wait()


# C++ waits for a work by its Python half, which torch 2.6 lets go when nobody in Python knows it: there, the tensor has to.
_FORGETFUL = torch.__version__ < "2.7"


class CollectiveWork(BookWork):
    """A collective that a group's thread will do, or has done. An error there is raised here, by `wait`."""

    def __init__(self, group: Any, name: str, results: Sequence[torch.Tensor], limit: float | None = None) -> None:
        super().__init__()
        self.group, self.tasks, self.name, self.results, self.limit = group, group.tasks, name, list(results), limit
        self.error: BaseException | None = None
        self._done = threading.Event()
        if _FORGETFUL and self.results:
            self.results[0]._d2lps_work = self  # type: ignore[attr-defined]

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the thread."""
        self.error = error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there; no timeout (or 0): as long as the group's own allows."""
        self.tasks.do_until(self.is_completed)
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.wait(seconds if seconds > 0 else self.limit):
            raise RankHung(f"{self.name} was not complete after {seconds or self.limit:g} s")
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the results, for hooks that go on from there; it fails as `wait` does.

        To complete it is a task like others: what follows a collective has its place in the order of all that the ranks do.
        """
        self.tasks.do_until(self.is_completed)
        future = CollectiveFuture(self)
        if _by_python(sys._getframe().f_back):
            self.tasks.submit(partial(self.group.call_back, self.name, future.complete))
            return future
        if any(tensor.dtype == torch.float16 for tensor in self.results):
            self.wait()  # DDP's hook for FP16 is C++ and takes C++'s lists only: `fork` makes one, of results that are there
            return torch.jit.fork(lambda: self.results)
        self.tasks.submit(future.complete)
        return future.then(lambda future: future.value())  # an error that C++ understands too

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error


class CollectiveFuture(Future[list[torch.Tensor]]):
    """The future of a collective; a callback may wait for it too."""

    def __init__(self, work: CollectiveWork) -> None:
        devices: Any = sorted({tensor.device for tensor in work.results if tensor.is_cuda}, key=str)
        super().__init__(devices=devices)
        self.work = work

    def wait(self) -> list[torch.Tensor]:
        self.work.tasks.do_until(self.done)
        return super().wait()

    def complete(self) -> None:
        """Called once the work is done."""
        if isinstance(self.work.error, Exception):
            self.set_exception(self.work.error)  # type: ignore[arg-type]
        else:
            self.set_result(self.work.results)


def _by_python(caller: FrameType | None) -> bool:
    """Whether `get_future` was called by a line of Python; torch's C++ calls it too, and has no frame of its own."""
    return caller is not None and "get_future" in caller.f_code.co_names


class MessageWork(BookWork):
    """A message of the program's own: posted at once, in the calling thread, and complete when it has been waited for."""

    def __init__(
        self, message: comm.Work, tensor: torch.Tensor, peer: int, failed: Callable[[BaseException], BaseException]
    ) -> None:
        super().__init__()
        self.message, self.results, self.peer, self.failed = message, [tensor], peer, failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message has arrived or was delivered, or raise after the group's timeout."""
        limit = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + limit
        while limit > 0 and not self.is_completed():
            if time.monotonic() > deadline:
                raise RankHung(f"the message was not complete after {limit:g} s")
            time.sleep(0.001)
        try:
            self.message.wait()
        except Exception as error:
            raise self.failed(error) from error
        return True

    def is_completed(self) -> bool:
        return bool(self.message.is_done())

    def source_rank(self) -> int:
        return self.peer

    def get_future(self) -> Future[list[torch.Tensor]]:
        raise NotImplementedError("d2lps: the work of send and recv has no future; call its wait()")


class Together(BookWork):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = list(works)
        self.results = [tensor for work in self.works for tensor in work.results]

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait(timeout) for work in self.works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)
