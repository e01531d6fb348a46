"""A function that goes on beside its caller, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from d2lps.comm.standing import callers_line, here


def check_lane(lane: int) -> None:
    """Refuse a communicator of another lane in a started function; threads that are nobody's lane may have any."""
    if getattr(here, "lane", lane) != lane:
        told = "this communicator belongs to another of its rank's lanes"
        raise RuntimeError(f"{told}: what is started has its own, the first argument of its function")


class Beside(Protocol):
    """What is asked of the communicator that a started function gets."""

    lane: int
    recorder: Any


class Started:
    """One call of `Communicator.start`; each world says how it goes on."""

    def __init__(self, comm: Beside) -> None:
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

    def __init__(self, comm: Beside, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(comm)
        self._thread = threading.Thread(target=self._live, args=(callers_line(), function, args), daemon=True)
        self._thread.name = f"lane {comm.lane}"
        self._thread.start()

    def _live(self, began: tuple[str, int, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        here.lane, here.began = self.comm.lane, began
        try:
            function(self.comm, *args)
        except BaseException as error:  # of the rank's, who hears of it when it waits
            self.error = error

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
