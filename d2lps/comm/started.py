"""A function that goes on beside its caller, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_here = threading.local()


def check_lane(lane: int) -> None:
    """Refuse a communicator of another lane in a started function; threads that are nobody's lane may have any."""
    if getattr(_here, "lane", lane) != lane:
        told = "this communicator belongs to another of its rank's lanes"
        raise RuntimeError(f"{told}: what is started has its own, the first argument of its function")


class Started:
    """One call of `Communicator.start`; each world says how it goes on."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.error: BaseException | None = None

    def is_done(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def raise_its_error(self) -> None:
        if self.error is not None:
            raise self.error


class InThread(Started):
    """In real worlds: a thread, which lets go of the interpreter while it waits for other ranks or adds up tensors."""

    def __init__(self, comm: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(comm)
        self._thread = threading.Thread(target=self._live, args=(function, args), name=f"lane {comm.lane}", daemon=True)
        self._thread.start()

    def _live(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        _here.lane = self.comm.lane
        try:
            with self.comm.standing("start"):
                self.comm.connect()
            try:
                function(self.comm, *args)
            finally:
                self.comm.disconnect()
        except BaseException as error:  # of the rank's, who hears of it when it waits
            self.error = error

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
