"""Gradients in buckets: one all-reduce for many small tensors, begun before all of them are there; and in what order they go.

The backward pass has the last layer's gradient ready first, and the next forward pass needs the first layer's first. So a
gradient that comes late is urgent, and the large one before it can wait; if that is cut into pieces, it can also be overtaken.
"""

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

from d2lps.arguments import named, whole
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, Event, ReduceOp
from d2lps.comm.rank import describe

MIB = 2**20


def buckets(tensors: Sequence[Tensor], cap: int = 25 * MIB, first: int = MIB) -> list[list[int]]:
    """Which tensors share a bucket, by their numbers: those that are used last come first, as their gradients do.

    >>> layers = [torch.empty(100), torch.empty(10), torch.empty(30), torch.empty(20)]  # 400, 40, 120 and 80 bytes
    >>> buckets(layers, cap=150, first=60)
    [[3], [2, 1], [0]]

    tensors: in the order in which the forward pass uses them. A bucket is full once it holds `cap` bytes or more, the first one
    `first`, which is small, so that the first message leaves early; so a bucket may hold a tensor's bytes more than its cap.
    Tensors of one bucket have one dtype and one device. The numbers are as in `tensors`.
    Source: Li et al. 2020; torch's own function gives the same (`dist._compute_bucket_assignment_by_size`).
    """
    whole("cap", cap)
    whole("first", first)
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for number in reversed(range(len(tensors))):
        kind = tensors[number].dtype, tensors[number].device
        bucket = filling.setdefault(kind, [])
        bucket.append(number)
        if sum(tensors[other].nbytes for other in bucket) >= limits.get(kind, first):
            full.append(filling.pop(kind))
            limits[kind] = cap
    return full + list(filling.values())


def flatten(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor with room for all of these, and a view of it for each, of its shape.

    >>> flat, (weight, bias) = flatten([torch.empty(2, 3), torch.empty(3)])
    >>> weight.fill_(1), bias.fill_(2)
    (tensor([[1., 1., 1.],
            [1., 1., 1.]]), tensor([2., 2., 2.]))
    >>> flat
    tensor([1., 1., 1., 1., 1., 1., 2., 2., 2.])

    Nothing is copied, now or later: what is written into a view is in the flat tensor, which can be sent as it is.
    """
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), requires_grad=False)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _mean(comm: Communicator, piece: Tensor, number: int) -> None:
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
    piece: bytes, to which tensors are cut; None leaves them whole. One piece is on its way at a time, in a lane of its own.
    reduce(comm', piece, number): what is done to a piece, in place of the mean. The lane waits until all are ready,
    or `close` is called. Errors: what the lane raises comes out of `wait` and `finish`; ValueError for an order that is none.
    Cost: for each piece what `reduce` costs, with "priority" 2 ceil(log2 p) latencies more; a `Communicator.start`.
    Source: Jayarajan et al. 2019 (P3); Peng et al. 2019 (ByteScheduler).
    """

    def __init__(
        self, comm: Communicator, tensors: Sequence[Tensor], order: str = "fifo", piece: int | None = None,
        reduce: Callable[[Communicator, Tensor, int], None] = _mean,
    ) -> None:  # fmt: skip
        whole("piece", 1 if piece is None else piece)
        for index, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                raise ValueError(f"tensors[{index}], {describe(tensor)}, does not lie in one run, and can't be cut into pieces")
        self.comm, self.reduce = comm, reduce
        self._pick = named("order", order, {"fifo": lambda _, oldest: oldest, "priority": self._most_urgent})
        self.pieces = [tensor.view(-1).split(max(1, (piece or tensor.nbytes) // tensor.element_size())) for tensor in tensors]
        self._left = [len(pieces) for pieces in self.pieces]  # of each tensor, how many have not been picked
        self._ready, self._done = [Event() for _ in tensors], [Event() for _ in tensors]
        self._given, self._closed = set[int](), False
        self._work = comm.start(self._send)

    def ready(self, number: int) -> None:
        """This rank's tensor may be sent."""
        self._given.add(number)
        self.comm.signal(self._ready[number])

    def wait(self, number: int) -> None:
        """Return when the tensor is what `reduce` makes of all ranks' tensors; raise what went wrong in the lane."""
        self.comm.wait(self._done[number])
        if self._closed:
            self.finish()

    def finish(self) -> None:
        """Return when all tensors have been sent; raise what went wrong in the lane."""
        self._work.wait()

    def close(self) -> None:
        """Send no more than what is ready, and let nobody wait for the rest; from anywhere: nothing here waits."""
        self._closed = True
        for event in (*self._ready, *self._done):
            event.set()

    # ---- in the lane ----------------------------------------------------------------------------------------------

    def _send(self, comm: Communicator) -> None:
        try:
            while any(self._left):
                oldest = next(number for number, left in enumerate(self._left) if left)
                comm.wait(self._ready[oldest])
                if oldest not in self._given:
                    return
                self._send_one(comm, self._pick(comm, oldest))
        except BaseException:
            self.close()
            raise

    def _send_one(self, comm: Communicator, number: int) -> None:
        """The next piece of this tensor."""
        piece = self.pieces[number][-self._left[number]]
        self._left[number] -= 1
        self.reduce(comm, piece, number)
        if not self._left[number]:
            comm.signal(self._done[number])

    def _most_urgent(self, comm: Communicator, oldest: int) -> int:
        """The last of those that are ready on all ranks, and of which something is left."""
        known = next(number for number in count() if number not in self._given)
        all_reduce(comm, everywhere := torch.tensor(known), ReduceOp.MIN, "tree")
        return max(number for number in range(oldest, int(everywhere)) if self._left[number])
