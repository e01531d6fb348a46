"""Tensor parallelism: each rank multiplies by its piece of every matrix; here, of all those of a Transformer.

What a piece is, says layers.py; what is sent for it, forward and backward, f_and_g.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from d2lps.comm import Communicator
from d2lps.parallel.shard import add_up_partial, cut
from d2lps.parallel.tensor.f_and_g import SEQUENCE, gather, scatter
from d2lps.parallel.tensor.layers import ColumnLinear, RowLinear, VocabEmbedding, enter, mark
from d2lps.parallel.transformer import MLP, Attention, Block, Dropout, Embed, Head


def sum_partial(module: nn.Module) -> None:
    """Add up the gradients that are parts of a sum, those with `parameter.partial`: after backward, before they are used.

    >>> loss.backward()                                 # doctest: +SKIP
    >>> sum_partial(model)                              # once a step, after the last of several backward passes # doctest: +SKIP

    Cost: one all-reduce for each group and dtype.
    """
    add_up_partial((parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None)


def tensor_parallel(
    comm: Communicator, model: nn.Module, sequence: bool = False, seed: int = 0, algorithm: str = "ring"
) -> nn.Module:
    """Exchange the layers of a Transformer's module, or of a slice of it, for this rank's pieces of them; in place.

    >>> model = tensor_parallel(mesh.tp, transformer.module(seed=0))            # doctest: +SKIP
    >>> loss = vocab_cross_entropy(mesh.tp, model(tokens), targets)             # doctest: +SKIP

    All ranks get the same tokens, and have the whole `model` alike. What the head gives is this rank's part of the vocabulary,
    [batch, sequence, vocabulary / p]. A head of keys and values that is shared by several ranks' queries is on all of them.
    sequence: between the layers, where each vector is for itself (norms, dropout, sums), a rank has a piece of the sequence; call
    `sum_partial` after backward. seed: of dropout, alike on all ranks, but with `sequence` its own on each.
    ValueError, with the numbers, for sizes that do not divide, before anything is exchanged. A mixture of experts stays whole.
    Cost a block: two all-reduces of [batch, sequence, hidden] forward, two backward; with sequence, two all-gathers and two
    reduce-scatters each way, the same bytes. Source: Shoeybi et al. 2019, Korthikanti et al. 2022.
    """
    for name, part in model.named_modules():
        _check(comm, name, part)
    _Cutting(comm, sequence, seed, algorithm).model(model)
    return model


def _check(comm: Communicator, name: str, part: nn.Module) -> None:
    sizes: dict[str, int] = {}
    if isinstance(part, Attention):
        sizes = {"heads": part.query.out_features // part.size}
        kv_heads = part.key.out_features // part.size
        if comm.size % kv_heads:
            sizes["kv_heads"] = kv_heads
    elif isinstance(part, MLP):
        sizes = {"ffn": part.up.out_features}
    elif isinstance(part, Embed | Head):
        sizes = {"vocab": part.tokens.num_embeddings if isinstance(part, Embed) else part.linear.out_features}
    for what, size in sizes.items():
        if size % comm.size:
            raise ValueError(f"{name or type(part).__name__}: {what}={size} can't be shared out equally among {comm.size} ranks")


class _Cutting:
    """What `tensor_parallel` does to each kind of module."""

    def __init__(self, comm: Communicator, sequence: bool, seed: int, algorithm: str) -> None:
        self.comm, self.sequence = comm, sequence
        self.how: dict[str, Any] = {"sequence": sequence, "algorithm": algorithm}
        self.tied: dict[Tensor, nn.Parameter] = {}  # a weight that two layers share, and its piece, which they share then
        self.groups: dict[int, tuple[Communicator | None, Communicator | None]] = {}
        self.generator = torch.Generator("cuda" if comm.device.type == "cuda" else "cpu")
        self.generator.manual_seed(seed * comm.size + comm.rank if sequence else seed)

    def model(self, model: nn.Module) -> None:
        parts: list[Any] = list(model.modules())
        for part in parts:
            if isinstance(part, Dropout):
                part.draw = lambda x: torch.rand(x.shape, generator=self.generator, device=x.device)
            elif isinstance(part, nn.LayerNorm) and self.sequence:
                mark(self.comm, *part.parameters())
            elif isinstance(part, Embed):
                self.embed(part)
            elif isinstance(part, Head):
                part.linear = self.tie(part.linear, ColumnLinear(self.comm, part.linear, **self.how))
            elif isinstance(part, Attention):
                self.attention(part)
            elif isinstance(part, MLP):
                self.mlp(part)
            elif isinstance(part, Block) and not isinstance(part.mlp, MLP) and self.sequence:
                self.whole(part.mlp)

    def embed(self, part: Any) -> None:
        part.tokens = self.tie(part.tokens, VocabEmbedding(self.comm, part.tokens, **self.how))
        if self.sequence:
            part.places.register_forward_pre_hook(lambda _, inputs: cut(self.comm, inputs[0], 0))
            mark(self.comm, part.places.weight)

    def tie(self, layer: Any, piece: Any) -> Any:
        piece.weight = self.tied.setdefault(layer.weight, piece.weight)
        return piece

    def attention(self, part: Any) -> None:
        """Queries, keys and values of a rank's heads: they share an input, which so is copied once."""
        self.enter_once(part)
        group, alike = self.sharing(part.key.out_features // part.size)
        part.query = ColumnLinear(self.comm, part.query, entered=True)
        part.key, part.value = (ColumnLinear(self.comm, layer, entered=True, group=group) for layer in (part.key, part.value))
        if alike:
            mark(alike, *part.key.parameters(), *part.value.parameters())
        part.out = RowLinear(self.comm, part.out, **self.how)

    def sharing(self, kv_heads: int) -> tuple[Communicator | None, Communicator | None]:
        """Of fewer heads than ranks: the group that has all of them once, and that of those ranks that have this one's."""
        if kv_heads >= self.comm.size:
            return None, None
        if kv_heads not in self.groups:
            copies = self.comm.size // kv_heads
            self.groups[kv_heads] = self.comm.split(self.comm.rank % copies), self.comm.split(self.comm.rank // copies)
        return self.groups[kv_heads]

    def mlp(self, part: Any) -> None:
        self.enter_once(part)
        part.up, part.down = ColumnLinear(self.comm, part.up, entered=True), RowLinear(self.comm, part.down, **self.how)
        if part.gate is not None:
            part.gate = ColumnLinear(self.comm, part.gate, entered=True)

    def enter_once(self, part: nn.Module) -> None:
        entering = enter(self.comm, **self.how)
        part.register_forward_pre_hook(lambda _, inputs: entering(inputs[0]))

    def whole(self, part: nn.Module) -> None:
        """Experts, whose router must see all tokens."""
        part.register_forward_pre_hook(lambda _, inputs: gather(self.comm, inputs[0], SEQUENCE))
        part.register_forward_hook(lambda _, inputs, output: scatter(self.comm, output, SEQUENCE))
