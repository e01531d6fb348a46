"""What happens to a tensor where a layer is cut among ranks: Megatron-LM's f and g, and what is like them.

Each function here is a pair: what it does to a tensor on the way forward, and what it does to the gradient on the way back. To
write down both is all that it takes: torch's autograd chains them.

| | forward | backward | |
|---|---|---|---|
| `copy` | nothing | all-reduce | f: a whole input, which each rank uses for its piece |
| `reduce` | all-reduce | nothing | g: what ranks have are parts of a sum |
| `gather` | all-gather | this rank's piece | pieces that all ranks then use alike |
| `scatter` | this rank's piece | all-gather | the reverse |
| `gather_sequence` | all-gather | reduce-scatter | f, where activations between are cut along the sequence |
| `reduce_scatter_sequence` | reduce-scatter | all-gather | g, likewise |
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from d2lps.collectives import all_gather, all_reduce, reduce_scatter
from d2lps.comm import Communicator
from d2lps.parallel.shard import cut

Move = Callable[[Communicator, Tensor, int, str], Tensor]  # of a tensor along a dimension; the algorithm is of all_reduce

SEQUENCE = -2  # the dimension of the sequence in [batch, sequence, hidden]


# ---- what is done on either way -------------------------------------------------------------------------------------------


def _nothing(comm: Communicator, x: Tensor, dim: int, algorithm: str) -> Tensor:
    return x.view_as(x)


def _sum(comm: Communicator, x: Tensor, dim: int, algorithm: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(comm, total, algorithm=algorithm)
    return total


def _pieces(comm: Communicator, x: Tensor, dim: int, algorithm: str) -> Tensor:
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(comm.size)]
    all_gather(comm, pieces, x)
    return torch.cat(pieces, dim)


def _mine(comm: Communicator, x: Tensor, dim: int, algorithm: str) -> Tensor:
    return cut(comm, x, dim)


def _my_sum(comm: Communicator, x: Tensor, dim: int, algorithm: str) -> Tensor:
    mine = cut(comm, x, dim)
    reduce_scatter(comm, mine, [piece.contiguous() for piece in x.chunk(comm.size, dim)])
    return mine


_NAMES = {_sum: "all-reduce", _pieces: "all-gather", _my_sum: "reduce-scatter", _mine: "cut", _nothing: "keep"}


class _Pair(torch.autograd.Function):
    """One move forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, forth: Move, back: Move, dim: int, algorithm: str) -> Tensor:
        ctx.back = partial(_move, back, "backward", comm, dim, algorithm)
        return _move(forth, "forward", comm, dim, algorithm, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(gradient), None, None, None, None, None


def _move(move: Move, way: str, comm: Communicator, dim: int, algorithm: str, x: Tensor) -> Tensor:
    with comm.about(f"* {_NAMES[move]} {way}"):
        return move(comm, x.detach(), dim, algorithm)


def copy(comm: Communicator, x: Tensor, algorithm: str = "ring") -> Tensor:
    """Megatron's f: x as it is; its gradient is the sum of all ranks', each of which has used x for its own piece.

    >>> hidden = gelu(copy(comm, x) @ my_columns)                   # doctest: +SKIP
    """
    return _Pair.apply(x, comm, _nothing, _sum, 0, algorithm)


def reduce(comm: Communicator, x: Tensor, algorithm: str = "ring") -> Tensor:
    """Megatron's g: the sum of all ranks' x; the gradient as it is, for all ranks go on alike.

    >>> y = reduce(comm, hidden @ my_rows) + bias                   # doctest: +SKIP
    """
    return _Pair.apply(x, comm, _sum, _nothing, 0, algorithm)


def gather(comm: Communicator, x: Tensor, dim: int = -1) -> Tensor:
    """All ranks' pieces, put together along a dimension; of the gradient, which all ranks have alike, this rank's piece."""
    return _Pair.apply(x, comm, _pieces, _mine, dim, "")


def scatter(comm: Communicator, x: Tensor, dim: int = -1) -> Tensor:
    """This rank's piece of what all ranks have alike; all ranks' pieces of the gradient. ValueError for pieces unlike."""
    return _Pair.apply(x, comm, _mine, _pieces, dim, "")


def gather_sequence(comm: Communicator, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """The whole sequence from all ranks' pieces; of the sum of all ranks' gradients, this rank's piece."""
    return _Pair.apply(x, comm, _pieces, _my_sum, dim, "")


def reduce_scatter_sequence(comm: Communicator, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """Of the sum of all ranks' x, this rank's piece of the sequence; all ranks' pieces of the gradient."""
    return _Pair.apply(x, comm, _my_sum, _pieces, dim, "")
