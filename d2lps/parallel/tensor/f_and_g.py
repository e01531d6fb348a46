"""What happens to a tensor where a layer is cut among ranks: Megatron-LM's f and g, and what is like them.

Each function here is a pair: what it does to a tensor on the way forward, and what it does to the gradient on the way back. To
write down both is all that it takes: torch's autograd chains them.

| | forward | backward | |
|---|---|---|---|
| `copy` | nothing | all-reduce | f: what is whole, and is used by each rank for its piece |
| `reduce` | all-reduce | nothing | g: what ranks have are parts of a sum |
| `gather` | all-gather | this rank's piece | pieces, with whose whole all ranks go on alike |
| `scatter` | this rank's piece | all-gather | the reverse |
| `gather_sequence` | all-gather | reduce-scatter | f, where the tensors between layers are cut along the sequence |
| `reduce_scatter_sequence` | reduce-scatter | all-gather | g, likewise |

Source: Shoeybi et al. 2019 (Megatron-LM); the last two: Korthikanti et al. 2022.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from d2lps.collectives import all_gather, all_reduce, reduce_scatter
from d2lps.comm import Communicator
from d2lps.parallel.shard import cut
from d2lps.parallel.torch_hooks import Pair, same

SEQUENCE = -2  # the dimension of the sequence in [batch, sequence, hidden]


def _sum(comm: Communicator, way: str, algorithm: str, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with _about(comm, way, x, "B T D", "B T D", partial=True):
        all_reduce(comm, total, algorithm=algorithm)
    return total


def _whole(comm: Communicator, way: str, dim: int, piece: Tensor) -> Tensor:
    pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(comm.size)]
    with _about(comm, way, piece, _cut(dim), "B T D"):
        all_gather(comm, pieces, piece)
    return torch.cat(pieces, dim)


def _my_sum(comm: Communicator, way: str, dim: int, x: Tensor) -> Tensor:
    mine = cut(comm, x, dim)
    with _about(comm, way, x, "B T D", _cut(dim), partial=True):
        reduce_scatter(comm, mine, [piece.contiguous() for piece in x.chunk(comm.size, dim)])
    return mine


def _cut(dim: int) -> str:
    """`_cut(-2) == "B T_* D"`"""
    letters = list("BTD")
    letters[dim] += "_*"
    return " ".join(letters)


def _about(
    comm: Communicator, way: str, x: Tensor, before: str, after: str, partial: bool = False
) -> AbstractContextManager[None]:  # fmt: skip
    """Of [batch, sequence, hidden]; for what has another shape, the caller may say it."""
    return comm.about("grad x" if way == "backward" else "x", before, after, partial) if x.ndim == 3 else nullcontext()


def copy(comm: Communicator, x: Tensor, algorithm: str = "ring") -> Tensor:
    """Megatron's f: x as it is; its gradient is the sum of all ranks', each of which has used x for its own piece.

    >>> hidden = gelu(copy(comm, x) @ my_columns)                   # doctest: +SKIP
    """
    return Pair.apply(x, same, partial(_sum, comm, "backward", algorithm))


def reduce(comm: Communicator, x: Tensor, algorithm: str = "ring") -> Tensor:
    """Megatron's g: the sum of all ranks' x; the gradient as it is, for all ranks go on alike.

    >>> y = reduce(comm, hidden @ my_rows) + bias                   # doctest: +SKIP
    """
    return Pair.apply(x, partial(_sum, comm, "forward", algorithm), same)


def gather(comm: Communicator, x: Tensor, dim: int = -1) -> Tensor:
    """All ranks' pieces, put together along a dimension; of the gradient, which all ranks have alike, this rank's piece."""
    return Pair.apply(x, partial(_whole, comm, "forward", dim), partial(cut, comm, dim=dim))


def scatter(comm: Communicator, x: Tensor, dim: int = -1) -> Tensor:
    """This rank's piece of what all ranks have alike; all ranks' pieces of the gradient. ValueError for unequal pieces."""
    return Pair.apply(x, partial(cut, comm, dim=dim), partial(_whole, comm, "backward", dim))


def gather_sequence(comm: Communicator, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """The whole sequence from all ranks' pieces; of the sum of all ranks' gradients, this rank's piece."""
    return Pair.apply(x, partial(_whole, comm, "forward", dim), partial(_my_sum, comm, "backward", dim))


def reduce_scatter_sequence(comm: Communicator, x: Tensor, dim: int = SEQUENCE) -> Tensor:
    """Of the sum of all ranks' x, this rank's piece of the sequence; all ranks' pieces of the gradient."""
    return Pair.apply(x, partial(_my_sum, comm, "forward", dim), partial(_whole, comm, "backward", dim))
