"""A plan says how many ranks share what of a training run, and by which means; whether it can be, arithmetic says beforehand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from d2lps.arguments import named, whole
from d2lps.parallel.pipeline.schedules import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from d2lps.parallel.transformer import Transformer

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe, "one_f_one_b": one_f_one_b, "interleaved": interleaved, "zero_bubble": zero_bubble,
}  # fmt: skip
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Plan:
    """How `train` shares a training run out to dp x tp x pp x cp ranks.

    >>> plan = Plan(dp=2, tp=2, pp=2, micro_batch=4, zero=1)
    >>> plan.ranks, plan.micro_batches(batch=64), plan.stages(layers=6)
    (8, 8, [(0, 4), (4, 8)])
    >>> plan.check(Transformer(layers=6, hidden=30, heads=5, vocab=96, sequence=32), batch=64)
    Traceback (most recent call last):
    ValueError: heads=5 can't be shared out evenly to tp=2

    dp, tp, pp, cp, ep: how many ranks share the batch, each layer, the layers, each sequence, the experts (see `Mesh`).
    micro_batch: sequences that a rank computes at a time. zero: 1, 2 and 3 share out the optimizer's state, gradients too, and
    parameters too, among the ranks that hold the same ones, or within so many of them (zero_group); 2 and 3 reduce and fetch
    a block at a time. schedule: in which order stages compute micro-batches; interleave: how many stages a rank has.
    recompute: what is computed again in the backward pass and not kept, "selective" the attention, "activation" what is between
    an MLP's matrices, "full" the blocks. sequence_parallel: also what lies between a layer's matrices is shared out along tp.
    precision: "bf16" (with FP32 masters), "fp32", "fp64".
    main_grads: micro-batches' BF16 gradients are added up in FP32, and rounded once, before they travel; in BF16, a sum soon no
    longer sees what is added: after 256 alike at the latest.
    overlap: gradients travel while others are computed, and so, with zero=0 and 1, in the last micro-batch's backward pass, each
    block's by itself: as many bytes as in the one collective after that pass that they travel by without overlap. With zero=2
    and 3 they do after each micro-batch.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    zero: int = 0
    zero_group: int | None = None
    schedule: str = "one_f_one_b"
    interleave: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    precision: str = "bf16"
    main_grads: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"):
            whole(name, getattr(self, name))
        if type(self.zero) is not int or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r} is none of the stages 0, 1, 2 and 3, an int")
        for name in ("sequence_parallel", "main_grads", "overlap"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r} is neither True nor False")
        named("schedule", self.schedule, SCHEDULES)
        named("recompute", self.recompute, dict.fromkeys(("none", "selective", "activation", "full")))
        named("precision", self.precision, PRECISIONS)
        if self.zero_group is not None:
            whole("zero_group", self.zero_group)

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.dp * self.tp * self.pp * self.cp

    def micro_batches(self, batch: int) -> int:
        """How many a rank computes for a step of `batch` sequences in all."""
        return batch // (self.dp * self.micro_batch)

    def stages(self, layers: int) -> list[tuple[int, int]]:
        """The first and the last but one part of the model in each stage: the embedding is part 0, then blocks, then the head."""
        count = self.pp * self.interleave
        ends = [1 + layers * stage // count for stage in range(1, count)]
        return list(zip([0, *ends], [*ends, layers + 2], strict=True))

    def order(self, batch: int) -> Schedule:
        """What each rank of a pipeline does one after another."""
        return self._order(self.micro_batches(batch))

    def _order(self, micro_batches: int) -> Schedule:
        return SCHEDULES[self.schedule](self.pp, micro_batches, *[self.interleave] * (self.schedule == "interleaved"))

    @cached_property
    def cuts_backward(self) -> bool:
        """Whether the schedule computes the weights' gradients by themselves, when nobody waits for them."""
        return any(action.kind == "W" for row in self._rounds for action in row)

    @cached_property
    def in_rounds(self) -> bool:
        """Whether a full pipeline goes on in rounds that are alike, and not with all micro-batches forward at first."""
        first = [action.kind for action in self._rounds[0]]
        return "B" in first[: first.count("F")]

    @cached_property
    def _rounds(self) -> Schedule:
        """A batch so short that it can be looked at, and long enough that the pipeline is full."""
        return self._order(3 * self.pp)

    def check(self, model: Transformer, batch: int, ranks: int | None = None) -> None:
        """ValueError, with the numbers, unless so many ranks can train that model with batches of so many sequences."""
        whole("batch", batch)
        for wrong in self._wrong(model, batch, self.ranks if ranks is None else ranks):
            raise ValueError(wrong)
        if self.schedule == "interleaved" and (count := self.micro_batches(batch)) % self.pp:
            told = f"interleaved: micro_batches={count} is no multiple of ranks={self.pp}"
            raise ValueError(f"{told}, and they go round in groups of so many")

    def _wrong(self, model: Transformer, batch: int, ranks: int) -> Iterator[str]:
        yield from self._wrong_ranks(ranks)
        yield from self._wrong_layers(model)
        zigzag = 2 * self.cp if self.cp > 1 else 1  # an early piece and a late one a rank, so that all have as much to do
        for name, size, across, pieces in (
            ("heads", model.heads, "tp", self.tp), ("vocab", model.vocab, "tp", self.tp),
            ("ffn", model.ffn or 4 * model.hidden, "tp", self.tp if model.experts == 1 else 1),
            ("sequence", model.sequence, "2 cp", zigzag), ("experts", model.experts, "ep", self.ep),
        ):  # fmt: skip
            if size % pieces:
                yield f"{name}={size} can't be shared out evenly to {across}={pieces}"
        if self.sequence_parallel and model.sequence % (self.tp * self.cp):
            told = f"tp x cp = {self.tp} x {self.cp}, as sequence_parallel asks"
            yield f"sequence={model.sequence} can't be shared out evenly to {told}"
        if batch % (self.dp * self.micro_batch):
            yield f"batch={batch} is no multiple of dp={self.dp} x micro_batch={self.micro_batch}"
        if self.tp % (heads := model.kv_heads or model.heads) and heads % self.tp:
            yield f"kv_heads={heads} can't be shared out evenly to tp={self.tp}, nor each by as many ranks as the next"

    def _wrong_ranks(self, ranks: int) -> Iterator[str]:
        if self.ranks != ranks:
            axes = " x ".join(f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp"))
            yield f"{axes} makes {self.ranks} ranks, and there are {ranks}"
        if self.dp * self.cp % self.ep:
            yield f"ep={self.ep} must divide dp x cp = {self.dp} x {self.cp}, among which the experts are shared out"
        if self.sequence_parallel and self.tp == 1:
            yield "sequence_parallel=True shares out along tp, and tp=1"
        if not self.main_grads and self.precision != "bf16":
            yield f"main_grads=False says that bf16 gradients are added up as they are, and precision={self.precision!r}"
        if self.zero_group is not None and not self.zero:
            yield f"zero_group={self.zero_group} says where zero shards, and zero=0 shards nothing"
        if self.zero_group is not None and self.dp * self.cp % self.zero_group:
            yield f"zero_group={self.zero_group} must divide dp x cp = {self.dp} x {self.cp}, the ranks with the same parameters"
        if self.zero_group is not None and self.ep > 1:
            yield f"zero_group={self.zero_group} is not carried out with ep={self.ep}: fewer ranks have the same experts"

    def _wrong_layers(self, model: Transformer) -> Iterator[str]:
        stages = self.pp * self.interleave
        if stages > model.layers:
            yield f"layers={model.layers} are too few for {stages} stages (pp={self.pp} x interleave={self.interleave})"
        if (self.interleave > 1) != (self.schedule == "interleaved"):
            yield f"interleave={self.interleave}, schedule={self.schedule!r}: one asks for several stages a rank, one for one"
        if self.ep > 1 and model.experts == 1:
            yield f"ep={self.ep} shares out experts, and the model has none (experts=1)"
        if self.cp > 1 and model.capacity * model.top_k < model.experts:  # a whole sequence may not find slots
            told = "each part of a sequence would be sorted into slots by itself, and others dropped than without cp"
            yield f"capacity={model.capacity} with cp={self.cp}: {told}; capacity=float('inf') drops none"

    def __str__(self) -> str:
        """`str(Plan(dp=2, zero=3)) == "dp=2 zero=3"`: what is not as by default."""
        said = ((field.name, getattr(self, field.name)) for field in fields(self) if field.default != getattr(self, field.name))
        return " ".join(f"{name}={value}" for name, value in said) or "one rank"
