"""A mixture of experts: many MLPs in place of one, of which each token visits a few; and the all-to-all that brings it there.

Tokens are sorted into slots: each expert has as many for a sequence as `capacity` says, a token that finds none is dropped, and
a slot that nobody takes stays zero. So the shapes are known before any token is: nobody exchanges counts first, which a GPU's
host would have to wait for, one all-to-all of equal parts does, and a simulation needs no numbers. The price is the empty slots,
which travel and are computed too. (Megatron-LM's dropless way is the other choice: counts first, then no more than is needed.)
"""

from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import gelu, silu

from d2lps.collectives import all_reduce, all_to_all
from d2lps.comm import Communicator
from d2lps.parallel.shard import sharded
from d2lps.parallel.torch_hooks import Pair, same


class Experts(nn.Module):
    """[batch, sequence, hidden] to the same: each token's sum of its `top_k` experts, by the router's weights.

    >>> experts = Experts(Transformer(1, hidden=8, heads=2, vocab=9, sequence=16, experts=4, capacity=1.0))     # doctest: +SKIP
    >>> out = experts(x)                                    # doctest: +SKIP
    >>> experts.load, experts.dropped       # who asked for each expert; how many of them found no slot     # doctest: +SKIP
    (tensor([5, 3, 7, 1]), tensor(4))

    A weight is the softmax of the router's logits (at least float32), for top_k > 1 divided by the sum of the chosen. Every
    sequence is sorted by itself, so what a token gets does not depend on what else is in its batch: an expert has
    ceil(capacity top_k sequence / experts) slots for it, and they go to all first choices in order, then to the second ones. A
    token whose choices are all dropped gets zero, and goes on by the residual connection alone. capacity=inf drops nothing.

    The balance loss of a sequence is `balance` x experts x sum(f_i P_i), with f_i the share of choices that fell on expert i and
    P_i its mean probability: 1 x `balance` if all are asked alike. It is nobody's output. Its gradient joins the backward pass
    where the experts' output does, so that it needs no way from a pipeline's stages to the last one: gradients are those of the
    batch's mean loss plus, for each layer, its sequences' mean balance loss. `share`: by what a micro-batch's loss is multiplied
    before `backward` (1 / micro-batches, the loss scale), and so this one; see `set_share`. After a forward pass: `load` and
    `dropped` as above, `balance_loss` of this batch.
    Source: GShard (Lepikhin et al. 2020), Switch Transformer (Fedus et al. 2021); Megatron-LM for the gradient.
    """

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.experts, self.top_k, self.capacity, self.balance = sizes.experts, sizes.top_k, sizes.capacity, sizes.balance
        hidden, wide = sizes.hidden, sizes.ffn or 4 * sizes.hidden
        self.router = nn.Linear(hidden, self.experts, bias=False)
        self.up, self.up_bias = _layers(self.experts, hidden, wide)
        self.down, self.down_bias = _layers(self.experts, wide, hidden)
        none: tuple[nn.Parameter | None, nn.Parameter | None] = None, None
        self.gate, self.gate_bias = _layers(self.experts, hidden, wide) if sizes.gated else none
        self.comm: Communicator | None = None  #: among whom the experts are shared out
        self.sequence: Communicator | None = None  #: among whom a sequence is
        self.share = 1.0

    def slots(self, sequence: int) -> int:
        """How many an expert has for a sequence of so many tokens."""
        return ceil(min(self.capacity * self.top_k * sequence / self.experts, sequence))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        probabilities = logits.softmax(-1, torch.promote_types(x.dtype, torch.float32))
        weights, choices = probabilities.topk(self.top_k)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        slot, load = self._sort(choices)
        room = x.new_zeros(x.shape[0], self.experts * self.slots(x.shape[1]) + 1, x.shape[2])  # the last one for the dropped
        index = slot.unsqueeze(-1).expand(-1, -1, x.shape[2])
        filled = room.scatter(1, index, x.repeat(1, self.top_k, 1))[:, :-1]
        done = torch.cat([self._visit(filled.unflatten(1, (self.experts, -1))), room[:, -1:]], 1)
        out = done.gather(1, index).unflatten(1, (self.top_k, -1))
        out = (out * weights.to(x.dtype).transpose(1, 2).unsqueeze(-1)).sum(1)
        return _Aside.apply(out, self._balance(probabilities, load), self.share)

    def _sort(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, sequence, top_k] choices to the slot of each, all first ones first, and each expert's load of each sequence."""
        wanted = choices.transpose(1, 2).flatten(1)
        asks = wanted.unsqueeze(-1) == torch.arange(self.experts, device=choices.device)
        place = asks.cumsum(1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - 1  # in the queue of its expert
        slots, load = self.slots(choices.shape[1]), asks.sum(1)
        kept = place < slots
        self.load, self.dropped = load.sum(0), (~kept).sum()
        return torch.where(kept, wanted * slots + place, self.experts * slots), load

    def _visit(self, filled: Tensor) -> Tensor:
        """[batch, experts, slots, hidden] to [batch, experts x slots, hidden], there and back if the experts are elsewhere."""
        batch, ranks = filled.shape[0], self.comm.size if self.comm else 1
        rows = filled.transpose(0, 1).flatten(1, 2)
        if self.comm:
            rows = _travel(self.comm, rows, there=True)
        mine = rows.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)  # [experts here, ranks x batch x slots, hidden]
        done = self._compute(mine).unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        if self.comm:
            done = _travel(self.comm, done, there=False)
        return done.unflatten(1, (batch, -1)).transpose(0, 1).flatten(1, 2)

    def _compute(self, rows: Tensor) -> Tensor:
        up = self._linear(rows, self.up, self.up_bias)
        return self.lower(up, None if self.gate is None else self._linear(rows, self.gate, self.gate_bias))

    def lower(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """As an MLP's."""
        return self._linear(gelu(up) if gate is None else silu(gate) * up, self.down, self.down_bias)

    def _linear(self, rows: Tensor, weight: Tensor, bias: Any) -> Tensor:
        if self.comm:  # of so many ranks' losses the gradient is the sum, and shall be the mean
            mean = partial(torch.div, other=self.comm.size)
            weight, bias = (Pair.apply(tensor, same, mean) for tensor in (weight, bias))
        return torch.baddbmm(bias.unsqueeze(1), rows, weight)

    def _balance(self, probabilities: Tensor, load: Tensor) -> Tensor:
        share = load.to(probabilities.dtype) / (probabilities.shape[1] * self.top_k)
        if self.sequence:
            all_reduce(self.sequence, share)
            share /= self.sequence.size
        loss = self.balance * self.experts * (share * probabilities.mean(1)).sum(-1).mean()
        self.balance_loss = loss.detach()
        return loss


def _layers(experts: int, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """So many linear layers as one weight [experts, inputs, outputs] and one bias, with the first values of nn.Linear's."""
    bound = inputs**-0.5
    shapes = (experts, inputs, outputs), (experts, outputs)
    weight, bias = (nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) for shape in shapes)
    return weight, bias


def _travel(comm: Communicator, parts: Tensor, there: bool) -> Tensor:
    """Part r of the first dimension to rank r; the gradients come back the same way."""
    return Pair.apply(parts, partial(_exchanged, comm, "tokens", there), partial(_exchanged, comm, "grad tokens", not there))


def _exchanged(comm: Communicator, name: str, there: bool, parts: Tensor) -> Tensor:
    """there: from each rank's own tokens, for all experts, to all tokens for its own experts."""
    received = torch.empty_like(parts := parts.contiguous())
    before, after = ("E C_* D", "E_* C D")[:: 1 if there else -1]
    with comm.about(name, before, after):
        all_to_all(comm, list(received.chunk(comm.size)), list(parts.chunk(comm.size)))
    return received


class _Aside(Function):
    """`out` as it is; in the backward pass, `loss` is as if it had been added to the loss at the end, `share` times."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, share: float) -> Tensor:
        ctx.share, ctx.like = share, loss.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.like, ctx.share), None


def set_share(model: nn.Module, share: float) -> None:
    """By what the losses of the micro-batches to come will be multiplied, for the balance losses of all layers."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.share = share


def expert_parallel(comm: Communicator, model: nn.Module) -> nn.Module:
    """Leave to this rank experts / comm.size of the experts of each layer, and let tokens travel; changed in place.

    >>> model = expert_parallel(mesh.ep, transformer.module(seed=0))                        # doctest: +SKIP

    Every rank brings tokens of its own, as many as the others; the router is whole on all ranks. An expert sees the tokens of
    all, and its gradient is divided by comm.size: so it is that of the mean of the ranks' losses, and has only to be averaged
    over the ranks that hold the same expert, `mesh.edp`, while all other gradients are averaged over `mesh.data`.

    Cost, for the slots of one layer, slots(sequence) x experts a sequence: (e - 1)/e of them are sent on, there, back, and twice
    more in the backward pass: (e - 1)/e batch sequence top_k capacity hidden elements each way. ValueError unless e divides
    the experts.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            if module.experts % comm.size:
                raise ValueError(f"{module.experts} experts can't be shared out evenly among {comm.size} ranks")
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, sharded(comm, parameter, 0))
            module.comm = comm
    return model
