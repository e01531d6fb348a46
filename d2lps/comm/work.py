"""What goes on while its caller does something else: a message under way, or a function that was started."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


class Work:
    """What `isend`, `irecv` and `start` return: it is complete once `wait` has returned, or `test` has said so.

    Until then a message's tensor belongs to the communicator: don't write what is being sent, don't read what is to arrive.

    >>> work = comm.isend(tensor, dst=1)     # doctest: +SKIP
    >>> work.wait()                          # now `tensor` may be changed   # doctest: +SKIP
    """

    def __init__(self, finish: Callable[[], None], is_done: Callable[[], bool]) -> None:
        self._finish, self._ready = finish, is_done
        self._complete = False

    def wait(self) -> None:
        """Return when it is complete; raise what went wrong in it. Once it is complete, a wait returns at once.

        Several lanes may wait for it at the same time: `finish` must bear being called again while it waits (see `once`).
        """
        if not self._complete:
            try:
                self._finish()
            finally:  # not before: another lane that waits meanwhile must wait as long
                self._complete = True

    def test(self) -> bool:
        """Whether it is complete, without waiting for it; from then on it is as if it had been waited for."""
        if self.is_done():
            self.wait()
        return self._complete

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._complete or self._ready()

    is_completed = test  # torch's name for it


class Event(Future[None]):
    """Something that happens in one lane of a rank, and that others of its lanes wait for: once, and for good.

    >>> full = Event()
    >>> work = comm.start(send_when, full)      # which begins with comm'.wait(full)    # doctest: +SKIP
    >>> fill(bucket)                            # doctest: +SKIP
    >>> comm.signal(full)                       # what the lane has waited for      # doctest: +SKIP
    """

    def set(self) -> None:
        """For `Communicator.signal`; to say it twice says nothing more."""
        with suppress(InvalidStateError):
            self.set_result(None)

    is_set = Future.done  # whether `wait` would return at once


def once(finish: Callable[[], None]) -> Callable[[], None]:
    """The same for several threads: who calls it while another does returns when that one has, and does nothing itself."""
    lock, begun = threading.Lock(), list[bool]()

    def one_at_a_time() -> None:
        with lock:
            if not begun:
                begun.append(True)
                finish()

    return one_at_a_time


def in_thread(function: Callable[[], object], name: str) -> Future[Any]:
    """Call a function beside the caller, in a thread that keeps no process alive."""
    future: Future[Any] = Future()

    def live() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # of the caller's, who hears of it when it asks
            future.set_exception(error)

    threading.Thread(target=live, name=name, daemon=True).start()
    return future
