"""What torch.distributed gives for a call that goes on in the background."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d2lps.comm import RankHung, Work

Tensors = list[Tensor]
Future = torch.futures.Future
_Base: Any = dist.Work


class BookWork(_Base):
    """What the works of collectives and of messages have in common."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self.results = list(results)

    def result(self) -> Tensors:
        return self.results

    def synchronize(self) -> None:
        self.wait()


# C++ waits for a work by its Python half, which torch 2.6 lets go when nobody in Python knows it: there, the tensor has to.
_FORGETFUL = torch.__version__ < "2.7"


class CollectiveWork(BookWork):
    """A collective that a group's thread will do, or has done. An error there is raised here, by `wait`."""

    def __init__(self, group: Any, name: str, results: Sequence[Tensor]) -> None:
        super().__init__(results)
        self.group, self.tasks, self.name = group, group.tasks, name
        self.error: BaseException | None = None
        self._done = threading.Event()
        if _FORGETFUL and self.results:
            self.results[0]._d2lps_work = self  # type: ignore[attr-defined]

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the thread."""
        self.error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there; no timeout (or 0): as long as the group's own allows."""
        self.tasks.do_until(self.is_completed)
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds):
            raise RankHung(f"{self.name} was not complete after {seconds:g} s")
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
            self.tasks.submit(partial(self.group.call_back, self.name, future.complete))
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


class MessageWork(BookWork):
    """A message of the program's own: posted at once, in the calling thread, and complete when it has been waited for."""

    def __init__(self, message: Work, tensor: Tensor, failed: Callable[[BaseException], BaseException]) -> None:
        super().__init__([tensor])
        self.message, self.failed = message, failed

    def is_completed(self) -> bool:
        return bool(self.message.is_done())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message has arrived or was delivered, or raise after the group's timeout."""
        begin = time.monotonic()
        while timeout and not self.is_completed():
            if time.monotonic() - begin > timeout.total_seconds():
                raise RankHung(f"the message was not complete after {timeout.total_seconds():g} s")
            time.sleep(0.001)
        try:
            self.message.wait()
        except Exception as error:
            raise self.failed(error) from error
        return True

    def get_future(self) -> Future[Tensors]:
        raise NotImplementedError("d2lps: the work of send and recv has no future; call its wait()")
