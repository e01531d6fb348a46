"""A model that computes nothing and takes the time that it is said to take: for timelines, simulated or real."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from d2lps.comm import Communicator


class Layer(NamedTuple):
    """Seconds of its forward and of its backward pass, and the bytes of its parameters, of 4 each."""

    forward: float
    backward: float
    nbytes: int


class Described(nn.Sequential):
    """Layers that let time pass, to be trained like any other module, as in `DataParallel(comm, Described(comm, layers))`.

    >>> model = Described(comm, [Layer(0.001, 0.002, 4_000_000)] * 3)       # doctest: +SKIP
    >>> model(torch.ones(1)).sum().backward()           # 9 ms, in any world; gradients are 1 to 3   # doctest: +SKIP

    Parameters live on `comm.device`. The gradients of layer k (from 0) are all k + 1, so that sums can be checked.
    """

    def __init__(self, comm: Communicator, layers: Sequence[Layer]) -> None:
        super().__init__(*(_Described(comm, number, Layer(*layer)) for number, layer in enumerate(layers)))


class _Described(nn.Module):
    def __init__(self, comm: Communicator, number: int, layer: Layer) -> None:
        super().__init__()
        self.how = comm, number, layer
        self.weight = nn.Parameter(torch.ones(layer.nbytes // 4, device=comm.device))

    def forward(self, x: Tensor) -> Tensor:
        return _Passing.apply(x, self.weight, self.how)


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: tuple[Communicator, int, Layer]) -> Tensor:
        ctx.weight, ctx.how, (comm, number, layer) = weight, how, how
        comm.sleep(layer.forward, f"forward {number}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        comm, number, layer = ctx.how
        comm.sleep(layer.backward, f"backward {number}")
        return gradient, torch.full_like(ctx.weight, number + 1.0), None
