"""What torch.distributed gives for a call that goes on in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from d2lps import comm
from d2lps.comm import RankHung

Future = torch.futures.Future
_Base: Any = dist.Work


class CollectiveWork(_Base):
    """A collective that a group's thread will do, or has done. An error there is raised here, by `wait`."""

    def __init__(self, name: str, results: Sequence[torch.Tensor], limit: float | None = None) -> None:
        super().__init__()
        self.name, self.results, self.limit = name, list(results), limit
        self.error: BaseException | None = None
        self._done, self._lock = threading.Event(), threading.Lock()
        self._futures: list[Future[None]] = []

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the thread."""
        with self._lock:
            self.error = error
            self._done.set()
        for future in self._futures:
            future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there; no timeout (or 0): as long as the group's own allows."""
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.wait(seconds if seconds > 0 else self.limit):
            raise RankHung(f"{self.name} was not complete after {seconds or self.limit:g} s")
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the results, for hooks that go on from there; it fails as `wait` does."""
        devices: Any = sorted({tensor.device for tensor in self.results if tensor.is_cuda}, key=str)
        future: Future[None] = Future(devices=devices)
        with self._lock:
            late = self._done.is_set()
            if not late:
                self._futures.append(future)
        if late:
            future.set_result(None)
        return future.then(self._outcome)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.results

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return self.results

    def synchronize(self) -> None:
        self.wait()


class MessageWork(_Base):
    """A message of the program's own: posted at once, in the calling thread, and complete when it has been waited for."""

    def __init__(
        self, message: comm.Work, tensor: torch.Tensor, peer: int, failed: Callable[[BaseException], BaseException]
    ) -> None:
        super().__init__()
        self.message, self.tensor, self.peer, self.failed = message, tensor, peer, failed

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
        transfer: Any = self.message._transfer
        return transfer is None or transfer.is_completed()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return [self.tensor]

    def source_rank(self) -> int:
        return self.peer

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[torch.Tensor]]:
        raise NotImplementedError("d2lps: the work of send and recv has no future; call its wait()")


class Together(_Base):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait(timeout) for work in self.works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)
