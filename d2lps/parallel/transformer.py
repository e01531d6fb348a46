"""The model that this part of the book trains in every way: a decoder of equal blocks, first described, then made.

It is a plain chain of modules and knows of no other rank. What makes it parallel goes through it and exchanges parts of it: a
linear layer for a piece of one, the attention for one that goes around a ring; a pipeline's stage is a slice of the chain.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from d2lps.arguments import whole
from d2lps.parallel.experts import Experts


@dataclass(frozen=True)
class Transformer:
    """A described model: its sizes, from which everything else follows.

    >>> small = Transformer(layers=2, hidden=32, heads=4, vocab=96, sequence=64)
    >>> model = small.module(seed=0)
    >>> list(dict(model.named_children()))
    ['embed', 'block0', 'block1', 'head']
    >>> model(torch.zeros(3, 64, dtype=torch.long)).shape
    torch.Size([3, 64, 96])

    ffn: the width inside the MLP, by default 4 hidden. kv_heads: heads of keys and values, each for as many of the queries.
    gated: a third matrix in the MLP, whose output opens or shuts it (SwiGLU). tied: the last layer's weight is the embedding's.
    experts, top_k, capacity, balance: of a mixture of experts (see `Experts`); experts=1 is a plain MLP. dropout: which
    part is dropped of the embedding and of what attention and MLP add.
    ValueError, with the numbers, for sizes that do not divide. Source: Vaswani et al. 2017; the norms stand first, as in GPT-2.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    ffn: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    tied: bool = False
    experts: int = 1
    top_k: int = 1
    capacity: float = 1.25
    dropout: float = 0.0
    balance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence", "ffn", "kv_heads", "experts", "top_k"):
            if (value := getattr(self, name)) is not None:
                whole(name, value)
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} must be a multiple of heads={self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not from 0 up and below 1")
        if not self.capacity > 0:
            raise ValueError(f"capacity={self.capacity} must be above 0")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must be from 1 to experts={self.experts}")

    def module(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """The model with its first weights: the same on every rank and in every plan that has the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            embed, head = Embed(self), Head(self)
            blocks = [(f"block{number}", Block(self)) for number in range(self.layers)]
        if self.tied:
            head.linear.weight = embed.tokens.weight
        return nn.Sequential(OrderedDict([("embed", embed), *blocks, ("head", head)])).to(dtype)


class Embed(nn.Module):
    """Tokens to vectors. `positions`: where in the sequence the tokens stand that this rank gets, by default all in turn."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(sizes.vocab, sizes.hidden), nn.Embedding(sizes.sequence, sizes.hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.positions: Tensor | None = None
        self.dropout = Dropout(sizes.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) if self.positions is None else self.positions
        if self.positions is not None and tokens.shape[1] != len(positions):  # one token would be taken for all
            raise ValueError(f"{tokens.shape[1]} tokens of each sequence were given; this rank has {len(positions)} positions")
        return self.dropout(self.tokens(tokens) + self.places(positions))


class Block(nn.Module):
    """[batch, sequence, hidden] to the same: attention, then an MLP, each added to what it got."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.mlp = MLP(sizes) if sizes.experts == 1 else Experts(sizes)
        self.dropout = Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each position to itself and those before; all [batch, heads, sequence, size of a head]."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


class Attention(nn.Module):
    """`attend` is what happens once there are queries, keys and values; how many heads there are, the layers' widths say."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(causal)

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.size = sizes.hidden // sizes.heads
        inner = self.size * (sizes.kv_heads or sizes.heads)
        self.query, self.key = nn.Linear(sizes.hidden, sizes.hidden), nn.Linear(sizes.hidden, inner)
        self.value, self.out = nn.Linear(sizes.hidden, inner), nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        wide = sizes.ffn or 4 * sizes.hidden
        self.up, self.down = nn.Linear(sizes.hidden, wide), nn.Linear(wide, sizes.hidden)
        self.gate = nn.Linear(sizes.hidden, wide) if sizes.gated else None

    def forward(self, x: Tensor) -> Tensor:
        return self.lower(self.up(x), None if self.gate is None else self.gate(x))

    def lower(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """From the width inside back to the width outside."""
        return self.down(gelu(up) if gate is None else silu(gate) * up)


class Head(nn.Module):
    """Vectors to a score for each token of the vocabulary."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        nn.init.normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Dropout(nn.Module):
    """As nn.Dropout, from the random numbers that `draw` gives for a tensor: `Place` has some that no plan changes."""

    draw: Callable[[Tensor], Tensor] = staticmethod(partial(torch.rand_like, dtype=torch.float32))

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.draw(x) >= self.p) / (1 - self.p) if self.training and self.p else x


# ---- dropout that is the same in every plan ---------------------------------------------------------------------------
#
# What is dropped depends on where a number stands, not on who computes it. A rank that shares a layer needs the mask that its
# partners use where they hold the same numbers, and another one where they hold others. If each number's fate is a function of
# its place in the model, the batch, the sequence and the vector, both are so by themselves; nor has recomputation to put a
# generator back. JAX's random numbers are made in this manner.


@dataclass
class Place:
    """Which step, sequences and positions a rank computes now; by default the first ones, all in turn."""

    seed: int = 0
    step: int = 0
    rows: Tensor | None = None  # the sequences' numbers within the whole batch
    positions: Tensor | None = None  # the tokens' within the whole sequence

    def uniform(self, layer: int, like: Tensor) -> Tensor:
        """Numbers from 0 to 1 for a tensor [rows, positions, hidden] of that layer."""
        rows, positions, features = (torch.arange(size, device=like.device) for size in like.shape)
        rows = rows if self.rows is None else self.rows
        positions = positions if self.positions is None else self.positions
        if (len(rows), len(positions)) != like.shape[:2]:
            raise ValueError(f"dropout on {list(like.shape)}, and its place is {len(rows)} rows of {len(positions)} positions")
        mixed = mix(mix(mix(torch.tensor(self.seed + 1, device=like.device)) + self.step) + layer)
        for places in (rows[:, None, None], positions[:, None], features):
            mixed = mix(mixed + places)
        return mixed / 2**32


def mix(numbers: Tensor) -> Tensor:
    """For each whole number one below 2**32, which looks random and is always the same.

    >>> mix(torch.tensor([0, 1, 2])).tolist()
    [0, 824515495, 1722258072]

    Source: the integer hash by Thomas Mueller (stackoverflow.com/a/12996028).
    """
    for _ in range(2):
        numbers = (numbers ^ numbers >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return numbers ^ numbers >> 16


def placed(model: nn.Module, place: Place) -> None:
    """Let all dropout in a whole model, not yet cut into stages, ask this place for its random numbers."""
    for layer, part in enumerate(part for part in model.modules() if isinstance(part, Dropout)):
        part.draw = partial(place.uniform, layer)
