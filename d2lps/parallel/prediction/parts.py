"""What each part of a Transformer computes, keeps and sends on one rank of a plan, for one micro-batch: arithmetic only.

The parts are those of `Transformer.module`: the embedding, blocks, the head. Of a kernel its operations and the bytes that it
reads and writes are written down, as Megatron-LM's fused ones have them; of a message its axis, collective and bytes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from d2lps.parallel.experts import Experts
from d2lps.parallel.training.plan import PRECISIONS, Plan
from d2lps.parallel.transformer import Transformer


class Kernel(NamedTuple):
    """One operation on a device. matrix: the share of its operations that count for a model's: of a matrix product all, but of an
    experts' those on tokens, not on empty slots; of what is no matrix product none."""

    flops: float
    nbytes: float
    matrix: float = 1


class Message(NamedTuple):
    """A collective of so many bytes, those of the whole tensor, along an axis of the mesh."""

    axis: str
    collective: str
    nbytes: float


class Around(NamedTuple):
    """Attention around a ring: the next keys and values, so many bytes, are on their way while these are used."""

    kernels: tuple[Kernel, ...]
    nbytes: float


Step = Kernel | Message | Around


@dataclass(frozen=True)
class Part:
    """forward, backward: what is done one after another. again: what a backward pass repeats of the forward pass first. late: of
    a backward pass, what makes the weights' gradients, for which no other stage is waiting.

    weights: how many it has on this rank; experts: how many of them are experts'; ends: how many of them the first and the last
    stage both have; tied: how many it uses that another part of its stage has. kept: bytes from the forward to the backward pass;
    working: bytes while the part is at work, besides.
    """

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    again: tuple[Step, ...] = ()
    late: tuple[Kernel, ...] = ()
    weights: float = 0
    kept: float = 0
    working: float = 0
    experts: float = 0
    ends: float = 0
    tied: float = 0

    @property
    def shared(self) -> list[tuple[str, float]]:
        """The axes of those that have the same weights, but for what both ends have, and how many they have."""
        rest = self.weights - self.experts - self.ends
        return [(axis, count) for axis, count in (("dp", rest), ("edp", self.experts)) if count]


class Sizes:
    """The sizes of a micro-batch on one rank: from them all else follows."""

    def __init__(self, model: Transformer, plan: Plan, fused: bool = False) -> None:
        self.model, self.plan, self.fused = model, plan, fused
        self.width = PRECISIONS[plan.precision].itemsize  # bytes of a number
        self.tp = plan.tp
        self.tokens = plan.micro_batch * model.sequence // plan.cp
        self.between = self.tokens // (plan.tp if plan.sequence_parallel else 1)  # tokens where each vector is for itself
        self.hidden, self.ffn = model.hidden, model.ffn or 4 * model.hidden
        self.kv_width = model.hidden // model.heads * (model.kv_heads or model.heads)
        self.kv = self.kv_width / min(plan.tp, model.kv_heads or model.heads)  # of keys, or values, on this rank
        self.masks = 1 if model.dropout else 0  # bytes of a number's mask
        self.x = self.tokens * self.hidden * self.width  # bytes of a whole activation
        self.table = model.vocab / plan.tp * model.hidden  # weights: a vector for each token, in the embedding and in the head
        self.at_both_ends = self.table if model.tied and plan.pp > 1 else 0  # tied ones on two stages are averaged by themselves

    def matrix(self, rows: float, inputs: float, outputs: float, count: float = 1, filled: float = 1) -> Kernel:
        """[rows, inputs] times [inputs, outputs], so many of them at once; filled: the share of the rows that are tokens."""
        numbers = rows * inputs + inputs * outputs + rows * outputs
        return Kernel(2 * rows * inputs * outputs * count, numbers * self.width * count, filled)

    def touch(self, numbers: float, bytes_each: float | None = None) -> Kernel:
        """So many numbers read or written, with an operation each."""
        return Kernel(numbers, numbers * (self.width if bytes_each is None else bytes_each), matrix=0)


@lru_cache(maxsize=128)
def parts(model: Transformer, plan: Plan, fused: bool = False) -> tuple[Part, Part, Part]:
    """The embedding, a block (all are alike), and the head.

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    >>> embed, block, head = parts(gpt3, Plan(tp=8, pp=8, dp=1))
    >>> round(8 * block.weights / 1e9, 2), sum(step.nbytes for step in block.forward if isinstance(step, Message)) / 1e6
    (1.81, 100.663296)

    fused: attention's scores stay on the chip. Source: Korthikanti et al. 2022 for what is kept.
    """
    sizes = Sizes(model, plan, fused)
    return _embed(sizes), _block(sizes), _head(sizes)


# ---- between the pieces of a layer: f and g, or their sequence variants ------------------------------------------------


def _enter(s: Sizes) -> tuple[Message, ...]:
    return (Message("tp", "all_gather", s.x),) if s.plan.sequence_parallel else ()


def _leave(s: Sizes) -> tuple[Message, ...]:
    return (Message("tp", "reduce_scatter" if s.plan.sequence_parallel else "all_reduce", s.x),) if s.tp > 1 else ()


# ---- the parts ----------------------------------------------------------------------------------------------------


def _embed(s: Sizes) -> Part:
    m, wide = s.model, s.between * s.hidden
    look_up = s.touch((2 * s.tokens + 4 * s.between) * s.hidden)  # the rows, their sum with the positions', dropout
    weights = s.table + m.sequence * s.hidden
    backward: tuple[Step, ...] = (*_enter(s), s.touch(3 * s.tokens * s.hidden))
    return Part("embed", (look_up, *_leave(s)), backward, weights=weights, kept=s.masks * wide, ends=s.at_both_ends)


def _head(s: Sizes) -> Part:
    scores, wide = s.tokens * s.model.vocab / s.tp, s.between * s.hidden
    norm, product = s.touch(2 * wide), s.matrix(s.tokens, s.hidden, s.model.vocab / s.tp)
    loss = s.touch(3 * scores, 4)  # in 32 bits: the largest, the sum, the own
    small = tuple(Message("tp", "all_reduce", nbytes * s.tokens) for nbytes in (4, 8) if s.tp > 1)
    back: tuple[Step, ...] = (s.touch(2 * scores, 4), product, *_leave(s), s.touch(3 * wide))
    own, tied = (0.0, s.table) if s.model.tied and s.plan.pp == 1 else (s.table, 0.0)
    kept = 2 * wide * s.width + scores * (4 if s.width < 4 else s.width)
    forward: tuple[Step, ...] = (norm, *_enter(s), product, loss, *small)
    return Part(
        "head", forward, back, late=(product,), weights=2 * s.hidden + own, kept=kept, working=scores * s.width,
        ends=s.at_both_ends, tied=tied,
    )  # fmt: skip


def _block(s: Sizes) -> Part:
    attention, mlp = _attention(s), (_mlp(s) if s.model.experts == 1 else _mixture(s))
    forward = *attention.forward, *mlp.forward
    kept, working, again = attention.kept + mlp.kept, 0.0, attention.again
    if s.plan.recompute == "full":
        again, working, kept = (*attention.forward, *mlp.again), kept, s.between * s.hidden * s.width
    elif s.plan.recompute == "selective":
        kept, working = kept - attention.working, attention.working
    elif s.plan.recompute == "activation":
        again, kept, working = mlp.again, kept - mlp.working, mlp.working
    else:
        again = ()
    backward, late = (*mlp.backward, *attention.backward), (*mlp.late, *attention.late)
    weights = attention.weights + mlp.weights
    return Part("block", forward, backward, again, late, weights, kept, working, mlp.experts)


def _attention(s: Sizes) -> Part:
    """again, working: what "selective" repeats, and does not keep."""
    h, inner, wide = s.hidden, s.hidden / s.tp, s.between * s.hidden
    heads = s.model.heads / s.tp
    norm, add = s.touch(2 * wide), s.touch(3 * wide + s.masks * wide / s.width)
    project = s.matrix(s.tokens, h, inner), s.matrix(s.tokens, h, s.kv), s.matrix(s.tokens, h, s.kv)
    out, arrange = s.matrix(s.tokens, inner, h), s.touch(2 * s.tokens * (2 * inner + 2 * s.kv))
    attend, back = _attend(s, heads)
    forward = norm, *_enter(s), *project, arrange, *attend, out, *_leave(s), add
    backward = add, *_enter(s), out, *back, arrange, *project, *_leave(s), s.touch(3 * wide)
    scores = 0 if s.fused else heads * s.tokens * s.model.sequence
    inside = scores * (s.width + s.masks * (1 + s.width))  # softmax's output; its mask, and what dropout makes of it
    kept = 2 * wide * s.width + s.tokens * (2 * inner + 2 * s.kv) * s.width + s.masks * wide + inside
    weights = 2 * h + (h + 1) * (inner + 2 * s.kv) + inner * h + h
    return Part("attention", forward, backward, attend, (out, *project), weights, kept, inside)


def _attend(s: Sizes, heads: float) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Queries to keys, softmax, values: forward and backward. Around a ring, keys and values come while others are used."""
    size, rows = s.hidden / s.model.heads, s.tokens / s.plan.micro_batch
    count, scores = heads * s.plan.micro_batch, heads * s.tokens * s.model.sequence
    two = s.matrix(rows, size, s.model.sequence, count), s.matrix(rows, s.model.sequence, size, count)
    soften = s.touch(2 * scores), *([s.touch((2 + 1 / s.width) * scores)] if s.masks else [])
    forward, backward = (two[0], *soften, two[1]), (*two, *soften, *two)
    if s.fused:
        half = tuple(Kernel(product.flops / 2, 2 * s.tokens * size * heads * s.width) for product in two)  # what is not masked
        forward, backward = half, (half[0], *half, *half)  # scores once more, then four products
    if s.plan.cp == 1:
        return forward, backward
    block = 2 * s.tokens * s.kv  # keys and values; on the way back their gradients with them
    wide = block * max(4, s.width)  # gradients, the last time to where they belong
    return (Around(forward, block * s.width),), (Around(backward, block * s.width + wide), Message("cp", "pass_on", wide))


def _mlp(s: Sizes) -> Part:
    """again, working: what "activation" repeats, and does not keep, or else what "full" repeats."""
    h, inner, wide = s.hidden, s.ffn / s.tp, s.between * s.hidden
    ups = 2 if s.model.gated else 1
    up, down = s.matrix(s.tokens, h, inner), s.matrix(s.tokens, inner, h)
    norm, add, bend = s.touch(2 * wide), s.touch(3 * wide + s.masks * wide / s.width), s.touch((1 + ups) * s.tokens * inner)
    unbend = s.touch((1 + 2 * ups) * s.tokens * inner)
    forward: tuple[Step, ...] = (norm, *_enter(s), *[up] * ups, bend, down, *_leave(s), add)
    backward: tuple[Step, ...] = (add, *_enter(s), down, unbend, *[up] * ups, *_leave(s), s.touch(3 * wide))
    kept = 2 * wide * s.width + (1 + ups) * s.tokens * inner * s.width + s.masks * wide
    weights = 2 * h + ups * (h + 1) * inner + inner * h + h
    again = forward if s.masks else forward[: -2 - len(_leave(s))]  # until all is there that was kept: torch stops there
    again = (bend,) if s.plan.recompute == "activation" else again
    return Part("mlp", forward, backward, again, (down, *[up] * ups), weights, kept, s.tokens * inner * s.width)


def _mixture(s: Sizes) -> Part:
    """Experts: every one of them has slots for each sequence, full or not; tp does not cut them. A token visits top_k at most."""
    h, inner, wide = s.hidden, s.ffn, s.between * s.hidden
    per_sequence, here = s.tokens // s.plan.micro_batch, s.model.experts // s.plan.ep
    slots = Experts.slots(s.model, per_sequence) * s.plan.micro_batch * s.model.experts  # type: ignore[arg-type]
    rows, ups, filled = slots / here, 2 if s.model.gated else 1, min(1, s.model.top_k * s.tokens / slots)
    up, down = s.matrix(rows, h, inner, here, filled), s.matrix(rows, inner, h, here, filled)
    there: tuple[Step, ...] = (Message("ep", "all_to_all", slots * h * s.width),) * 2 if s.plan.ep > 1 else ()
    route, sort = s.matrix(s.tokens, h, s.model.experts), s.touch(4 * slots * h)
    enter = (Message("tp", "all_gather", s.x),) if s.plan.sequence_parallel else ()
    products, bend = [up] * ups, s.touch((1 + ups) * slots * inner)
    forward = s.touch(2 * wide), *enter, route, sort, *there, *products, bend, down, s.touch(3 * wide)
    backward = s.touch(3 * wide), *enter, sort, *there, down, bend, bend, *products, route, s.touch(3 * wide)
    experts = here * (ups * (h * inner + inner) + inner * h + h)
    kept = (2 * wide + 2 * slots * h + (1 + ups) * slots * inner) * s.width
    weights, apart = 2 * h + h * s.model.experts + experts, experts if s.plan.ep > 1 else 0
    again = (bend,) if s.plan.recompute == "activation" else forward
    return Part("experts", forward, backward, again, (down, *products, route), weights, kept, slots * inner * s.width, apart)


def stages(model: Transformer, plan: Plan, fused: bool = False) -> list[list[Part]]:
    """The parts of each stage."""
    embed, block, head = parts(model, plan, fused)
    chain = [embed, *[block] * model.layers, head]
    return [chain[first:last] for first, last in plan.stages(model.layers)]


def matrix_flops(model: Transformer) -> float:
    """Operations of a sequence's forward pass in matrix products, attention's square in full, as is usual for MFU; of experts
    what their tokens need, if none is dropped that finds a slot.

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    >>> matrix_flops(gpt3) * 3 * 1536 / 1e18            # of a step with 1,536 sequences, forward and backward
    3.386...
    """
    whole = (part for stage in stages(model, Plan()) for part in stage)
    return sum(step.flops * step.matrix for part in whole for step in part.forward if isinstance(step, Kernel))
