"""Layers of which each rank has a piece: linear ones, an embedding, and the loss of a vocabulary.

By columns, then by rows: what the first leaves with a rank is what the second needs there, so that a pair of matrices
communicates once forward and once backward.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp
from d2lps.parallel.shard import sharded
from d2lps.parallel.tensor.f_and_g import copy, gather_sequence, reduce, reduce_scatter_sequence

Function = Callable[[Tensor], Tensor]


class ColumnLinear(nn.Module):
    """This rank's outputs of a linear layer: of p ranks, each has a p-th of the rows of torch's weight, and of the bias.

    >>> up, down = ColumnLinear(comm, mlp.up), RowLinear(comm, mlp.down)            # doctest: +SKIP
    >>> y = down(gelu(up(x)))               # x and y are whole, and alike on all ranks      # doctest: +SKIP

    `gather` puts all ranks' outputs together. sequence: x is a piece of the sequence, [..., sequence / p, inputs]. entered: x
    has gone through `copy` (or `gather_sequence`) already, once for several layers that read it. group: among which the layer is
    cut, if fewer than comm. ValueError, with the numbers, if p does not divide the outputs.
    Cost: nothing forward, an all-reduce of the input's gradient backward; with sequence, an all-gather and a reduce-scatter.
    Source: Shoeybi et al. 2019 (Megatron-LM); sequence: Korthikanti et al. 2022.
    """

    def __init__(
        self, comm: Communicator, layer: nn.Linear, sequence: bool = False, entered: bool = False,
        group: Communicator | None = None, algorithm: str = "ring",
    ) -> None:  # fmt: skip
        super().__init__()
        self.enter = None if entered else enter(comm, sequence, algorithm)
        self.weight = sharded(group or comm, layer.weight, 0)
        self.bias = None if layer.bias is None else sharded(group or comm, layer.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x if self.enter is None else self.enter(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer that takes this rank's inputs, a p-th of the columns of torch's weight. Their products are parts of a sum.

    `scatter` cuts an x that is whole. The bias is whole on every rank, and added once, after the sum. sequence: y is a piece of
    the sequence, and the gradient of the bias only a part of the sum (`parameter.partial`; see `sum_partial`).
    Cost: an all-reduce of the output forward, nothing backward; with sequence, a reduce-scatter and an all-gather.
    """

    def __init__(self, comm: Communicator, layer: nn.Linear, sequence: bool = False, algorithm: str = "ring") -> None:
        super().__init__()
        self.leave = leave(comm, sequence, algorithm)
        self.weight = sharded(comm, layer.weight, 1)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
        if sequence:
            mark(comm, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Module):
    """This rank's tokens of the vocabulary: it looks up those that it has, and the sum over ranks has all.

    sequence: what comes out is this rank's piece of the sequence. Cost: an all-reduce, or a reduce-scatter, of the output.
    ValueError for tokens that are none, and for nn.Embedding's options, such as padding_idx: they are not carried out.
    """

    def __init__(self, comm: Communicator, layer: nn.Embedding, sequence: bool = False, algorithm: str = "ring") -> None:
        super().__init__()
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            if (value := getattr(layer, option)) is not None and value is not False:
                raise ValueError(f"nn.Embedding with {option}={value}: a piece of it can't carry that out")
        self.comm, self.leave = comm, leave(comm, sequence, algorithm)
        self.weight = sharded(comm, layer.weight, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        _check(self.comm, "tokens", tokens, len(self.weight))
        place, here = _own(self.comm, tokens, len(self.weight))
        return self.leave(functional.embedding(place, self.weight) * here.unsqueeze(-1))


def vocab_cross_entropy(comm: Communicator, logits: Tensor, targets: Tensor, algorithm: str = "ring") -> Tensor:
    """The sum of the losses of all targets, where each rank has the logits of its tokens, [..., vocabulary / p].

    >>> loss = vocab_cross_entropy(comm, model(tokens), targets) / targets.numel()          # doctest: +SKIP

    targets: [...], numbers in the whole vocabulary, alike on all ranks; ValueError for others. Logits of 16 bits count in 32.
    Cost: an all-reduce of one number a target (the maximum) and one of two (the sum, and the target's own logit), none
    backward; to gather the logits would take the vocabulary's length of numbers a target.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    count = logits.shape[-1]
    _check(comm, "targets", targets, count)
    top = logits.detach().amax(-1)
    with comm.about("largest logit", "B T", "B T", partial=True):
        all_reduce(comm, top, ReduceOp.MAX, algorithm)
    logits = logits - top.unsqueeze(-1)
    place, here = _own(comm, targets, count)
    own = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1) * here
    with comm.about("sums for the loss", "B T", "B T", partial=True):
        total, own = reduce(comm, torch.stack([logits.exp().sum(-1), own]), algorithm)
    return (total.log() - own).sum()


def _check(comm: Communicator, name: str, tokens: Tensor, count: int) -> None:
    if not tokens.is_meta and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < count * comm.size:
        told = f"{name} from {tokens.min()} to {tokens.max()} are not all among the {count * comm.size} tokens"
        raise ValueError(f"{told} of {comm.size} ranks with {count} each")


def _own(comm: Communicator, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where among this rank's `count` tokens these stand (0 for those that do not), and whether they do."""
    place = tokens - comm.rank * count
    here = (place >= 0) & (place < count)
    return place * here, here


def enter(comm: Communicator, sequence: bool, algorithm: str) -> Function:
    return partial(gather_sequence, comm) if sequence else partial(copy, comm, algorithm=algorithm)


def leave(comm: Communicator, sequence: bool, algorithm: str) -> Function:
    return partial(reduce_scatter_sequence, comm) if sequence else partial(reduce, comm, algorithm=algorithm)


def mark(comm: Communicator, *parameters: nn.Parameter | None) -> None:
    for parameter in parameters:
        if parameter is not None:
            parameter.partial = comm  # type: ignore[attr-defined]
