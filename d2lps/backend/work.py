"""What torch.distributed gives for a call that goes on in the background."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d2lps.comm import RankHung

Tensors = list[Tensor]
Future = torch.futures.Future
_Base: Any = dist.Work
# C++ waits for a work by its Python half, which torch 2.6 lets go when nobody in Python knows it: there, the tensor has to.
_FORGETFUL = torch.__version__ < "2.7"


class BookWork(_Base):
    """A message: posted at once, in the calling thread, and complete when it has been waited for; or a collective."""

    def __init__(self, name: str, results: Sequence[Tensor], finish: Callable[[], object], is_done: Callable[[], bool]) -> None:
        super().__init__()
        self.name, self.results, self._finish, self._is_done = name, list(results), finish, is_done

    def is_completed(self) -> bool:
        return self._is_done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there, or raise what went wrong; no timeout (or 0): as long as the group's own allows."""
        begin = time.monotonic()
        while timeout and not self.is_completed():
            if time.monotonic() - begin > timeout.total_seconds():
                raise RankHung(f"{self.name} was not complete after {timeout.total_seconds():g} s")
            time.sleep(0.001)
        self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        return self.results

    def get_future(self) -> Future[Tensors]:
        raise NotImplementedError("d2lps: the work of send and recv has no future; call its wait()")


class CollectiveWork(BookWork):
    """A collective that a group's thread will do, or has done: then `done` is set, and perhaps an `error`."""

    def __init__(self, group: Any, name: str, results: Sequence[Tensor]) -> None:
        self.group, self.tasks, self.done = group, group.tasks, threading.Event()
        self.error: BaseException | None = None
        super().__init__(name, results, self.done.wait, self.done.is_set)
        if _FORGETFUL and self.results:
            self.results[0]._d2lps_work = self  # type: ignore[attr-defined]

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.tasks.do_until(self.is_completed)
        super().wait(timeout)
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future[Tensors]:
        """A future of the results, for hooks that go on from there; it fails as `wait` does.

        To complete it is a task like others: what follows a collective has its place in the order of all that the ranks do.
        """
        self.tasks.do_until(self.is_completed)
        future = CollectiveFuture(self)
        caller = sys._getframe().f_back
        if caller and "get_future" in caller.f_code.co_names:  # a line of Python; torch's C++ calls it too, without one
            self.tasks.submit(lambda: self.group.call_back(self.name, future.complete))
            return future
        if any(tensor.dtype == torch.float16 for tensor in self.results):
            self.wait()  # DDP's hook for FP16 is C++ and takes C++'s lists only: `fork` makes one, of results that are there
            return torch.jit.fork(lambda: self.results)
        self.tasks.submit(future.complete)
        return future.then(lambda future: future.value())  # an error that C++ understands too


class CollectiveFuture(Future[Tensors]):
    """The future of a collective; a callback may wait for it too."""

    def __init__(self, work: CollectiveWork) -> None:
        devices: Any = sorted({tensor.device for tensor in work.results if tensor.is_cuda}, key=str)
        super().__init__(devices=devices)
        self.work = work

    def wait(self) -> Tensors:
        self.work.tasks.do_until(self.done)
        return super().wait()

    def complete(self) -> None:
        """Called once the work is done."""
        if isinstance(self.work.error, Exception):
            self.set_exception(self.work.error)  # type: ignore[arg-type]
        else:
            self.set_result(self.work.results)
