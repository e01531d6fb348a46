"""A message under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from d2lps.comm.communicator import Communicator


class Transfer(Protocol):
    """What a world gives for a posted message."""

    def wait(self) -> object: ...


class Work:
    """What `isend` and `irecv` return: the message is complete once `wait` has returned.

    Until then the tensor belongs to the communicator: don't write what is being sent, don't read what is to arrive.

    >>> work = comm.isend(tensor, dst=1)     # doctest: +SKIP
    >>> work.wait()                          # now `tensor` may be changed   # doctest: +SKIP
    """

    def __init__(
        self, comm: Communicator, transfer: Transfer, action: str, peer: int, tag: int, nbytes: int, finish: Callable[[], None]
    ) -> None:
        self._comm = comm
        self._transfer: Transfer | None = transfer
        self._what = (action, peer, tag, nbytes)
        self._finish = finish

    def wait(self) -> None:
        """Return when the message has been delivered (send) or has arrived (recv). A second wait returns at once."""
        if self._transfer is None:
            return
        transfer, self._transfer = self._transfer, None
        with self._comm.standing(*self._what):
            transfer.wait()
        self._finish()

    def is_completed(self) -> bool:
        """True once `wait` has returned."""
        return self._transfer is None
