"""In what order gradients are sent that wait for the network: first in, first out, or first what is needed first.

The backward pass has the last layer's gradient ready first, and the next forward pass needs the first layer's first. So a
gradient that comes late is urgent, and the large one before it can wait; if that is cut into pieces, it can also be overtaken.
"""

from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, Event, ReduceOp
from d2lps.cost.numbers import named


def mean(comm: Communicator, piece: Tensor, number: int) -> None:
    """Every rank's piece becomes the mean of all ranks'."""
    all_reduce(comm, piece, ReduceOp.AVG)


class Scheduler:
    """Sends flat tensors beside what the rank does, in pieces, in an order that all ranks agree on.

    >>> scheduler = Scheduler(comm, tensors, "priority", piece=4_000_000)       # on every rank    # doctest: +SKIP
    >>> scheduler.ready(0)                  # the first one may be sent; it must not be touched now    # doctest: +SKIP
    >>> scheduler.wait(0)                   # now it is the mean of all ranks'      # doctest: +SKIP

    tensors: in the order in which they get ready, on every rank the same; the last one is needed first.
    order: "fifo": first in, first out. "priority": of what is ready on all ranks, the piece that is needed first; before each
    piece the ranks agree on how much is ready everywhere, an all-reduce of one number by a tree.
    piece: bytes, to which tensors are cut; None leaves them whole. credit: how many pieces are on their way at a time, each in
    a lane of its own: with one, each waits for the last one's latency; with many, an urgent one shares the links with others.
    reduce(comm', piece, number): what is done to a piece of that tensor. All must get ready, or `close` be called.
    Source: Jayarajan et al. 2019 (P3); Peng et al. 2019 (ByteScheduler).
    """

    def __init__(
        self, comm: Communicator, tensors: Sequence[Tensor], order: str = "fifo", piece: int | None = None, credit: int = 1,
        reduce: Callable[[Communicator, Tensor, int], None] = mean,
    ) -> None:  # fmt: skip
        for name, value in (("piece", piece), ("credit", credit)):
            if isinstance(value, bool) or not (value is None or isinstance(value, int)) or (value is not None and value < 1):
                raise ValueError(f"{name}={value!r} is not a whole number, 1 or more")
        self.comm, self.reduce = comm, reduce
        self._next = named("order", order, {"fifo": self._oldest, "priority": self._most_urgent})
        self.pieces = [tensor.view(-1).split(max(1, (piece or tensor.nbytes) // tensor.element_size())) for tensor in tensors]
        self._left = [len(pieces) for pieces in self.pieces]  # of each tensor, how many have not been picked
        self._unsent, self._counting = list(self._left), Lock()  # and how many have not been sent
        self._arrived, self._done = [Event() for _ in tensors], [Event() for _ in tensors]
        self._picked = [Event() for pieces in self.pieces for _ in pieces]
        self.closed = False
        lanes = min(credit, len(self._picked))
        self.works = [comm.start(self._send, lane, lanes) for lane in range(lanes)]

    def ready(self, number: int) -> None:
        """This rank's tensor may be sent."""
        self.comm.signal(self._arrived[number])

    def wait(self, number: int) -> None:
        """Return when the tensor is what `reduce` makes of all ranks' tensors."""
        self.comm.wait(self._done[number])

    def finish(self) -> None:
        """Return when all tensors have been sent."""
        for work in self.works:
            work.wait()

    def close(self) -> None:
        """Nothing more will get ready: end after what is ready, in turn."""
        self.closed = True
        for event in self._arrived:
            if not event.is_set():
                self.comm.signal(event)

    # ---- in the lanes ---------------------------------------------------------------------------------------------

    def _send(self, comm: Communicator, lane: int, lanes: int) -> None:
        """The lanes take turns: a lane picks when the one before it has picked, and all ranks' same lanes the same piece."""
        for turn in range(lane, len(self._picked), lanes):
            if turn:
                comm.wait(self._picked[turn - 1])
            number = self._next(comm)
            if self.closed:
                return comm.signal(self._picked[turn])
            index = len(self.pieces[number]) - self._left[number]
            self._left[number] -= 1
            comm.signal(self._picked[turn])
            comm.step("tensor {}, piece {}", number, index)
            self.reduce(comm, self.pieces[number][index], number)
            with self._counting:
                self._unsent[number] -= 1
                if not self._unsent[number]:
                    comm.signal(self._done[number])
        return None

    def _oldest(self, comm: Communicator) -> int:
        number = next(number for number, left in enumerate(self._left) if left)
        comm.wait(self._arrived[number])
        return number

    def _most_urgent(self, comm: Communicator) -> int:
        """The last of those that are ready on all ranks, and of which something is left."""
        oldest = self._oldest(comm)
        known = torch.tensor([next((n for n, event in enumerate(self._arrived) if not event.is_set()), len(self._arrived))])
        all_reduce(comm, known, ReduceOp.MIN, "tree")
        return max(number for number in range(oldest, int(known)) if self._left[number])
