"""A stage that computes nothing and takes its time: to see what a schedule does, where no device is to be had."""

import torch
from torch import Tensor, nn

from d2lps.comm import Communicator
from d2lps.parallel.torch_hooks import Pair, same


class StandIn(nn.Module):
    """Gives on what it gets, after so many seconds; backward too, half of them for its input and half for its weight.

    >>> mine = {comm.rank: StandIn(comm, forward=0.010, backward=0.020)}                        # doctest: +SKIP
    >>> execute(comm, mine, schedule, [start] * m, [None] * m, lambda output, _: output.sum())  # doctest: +SKIP

    Seconds pass by `comm.sleep`. What goes into the first stage must require gradients, as what others get does.
    """

    def __init__(self, comm: Communicator, forward: float, backward: float) -> None:
        super().__init__()
        self.comm, self.seconds, self.each = comm, forward, backward / 2
        self.weight = nn.Parameter(torch.zeros((), device=comm.device))

    def forward(self, x: Tensor) -> Tensor:
        self.comm.sleep(self.seconds)
        return Pair.apply(x, same, self._later) + Pair.apply(self.weight, same, self._later)

    def _later(self, gradient: Tensor) -> Tensor:
        self.comm.sleep(self.each)
        return gradient
