"""Training under any plan: what the other files of this folder do one by one, put together.

Nothing is computed here. A plan makes a mesh; along each of its axes parts of the model are exchanged (`assemble.py`), and what
a rank is left with are stages of a pipeline, whose gradients Zero brings together. One process is the plan of one rank.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import Protocol

import torch
from torch import Tensor, nn

from d2lps.arguments import whole
from d2lps.collectives import all_reduce, broadcast
from d2lps.comm import Communicator, ReduceOp
from d2lps.parallel.context import local
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.pipeline.execute import execute
from d2lps.parallel.saving.checkpoint import gathered
from d2lps.parallel.sharded.clip import clip_by_global_norm
from d2lps.parallel.tensor.layers import vocab_cross_entropy
from d2lps.parallel.training.assemble import Optimizer, look_after, shared_out, tie
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.training.text import NOTHING
from d2lps.parallel.transformer import Place, Transformer


class Data(Protocol):
    """What there is to learn, such as `text(sequence=64)`: who asks for sequences by number gets them, whoever that is."""

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [count, sequence] each; a target that does not count is NOTHING (-100).

        Every rank must be told the same of the same number: the ranks that share a layer ask for the same sequences.
        """


class Trainer:
    """A rank's part of a training run.

    >>> trainer = Trainer(comm, transformer, Plan(dp=2, tp=2), text(sequence=64), batch=8, optimizer=adam)      # doctest: +SKIP
    >>> trainer.step()                      # loss, and norm of the gradient, the same on every rank    # doctest: +SKIP
    (4.58, 1.27)

    A loss is the mean over all tokens of the batch that count, whatever ranks, micro-batches and parts of sequences they are in;
    0 if none counts. `losses` and `norms`: of the steps so far. `done`: how many; with the seed, the data and what `zeros` hold,
    all that is to come follows from it. ValueError as of `Plan.check`, and for tokens that the model does not have; Mismatch
    where ranks were told different things.
    """

    def __init__(
        self, comm: Communicator, transformer: Transformer, plan: Plan, data: Data, batch: int, optimizer: Optimizer,
        max_norm: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: a gradient is clipped to a norm above 0; None clips nothing")
        if not callable(getattr(data, "batch", None)):
            raise TypeError(f"data must have batch(first, count), as text() and feeding.Stream do: {type(data).__name__} has not")
        comm.agree(f"Trainer({transformer}, {plan!r}, {batch=}, {max_norm=}, {seed=})")
        plan.check(transformer, batch, comm.size)
        self.comm, self.plan, self.data, self.batch, self.max_norm = comm, plan, data, batch, max_norm
        self.transformer = transformer
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.done = 0
        self.mesh, self.place = Mesh(comm, plan.dp, plan.tp, plan.pp, plan.cp, plan.ep), Place(seed)
        self.schedule, self.micro_batches = plan.order(batch), plan.micro_batches(batch)
        whole = transformer.module(seed, torch.float64 if plan.precision == "fp64" else torch.float32).to(comm.device)
        model = shared_out(self.mesh, plan, whole, self.place, self.micro_batches)
        mine = list(enumerate(plan.stages(transformer.layers)))[self.mesh.pp.rank :: plan.pp]
        self.stages = {stage: nn.Sequential(OrderedDict(list(model.named_children())[a:b])) for stage, (a, b) in mine}
        self.module = nn.Sequential(OrderedDict(part for stage in self.stages.values() for part in stage.named_children()))
        self.zeros = list(look_after(self.mesh, plan, self.module, tie(self.mesh, model), optimizer))
        for part in self.module:
            part.register_forward_pre_hook(partial(self._enter, count()))
            part.register_forward_hook(self._leave)

    def step(self) -> tuple[float, float]:
        """The loss of the next batch before the step, and the norm of its gradient before it is clipped."""
        tokens, targets = self._fetch()
        loss = execute(self.mesh.pp, self.stages, self.schedule, tokens, targets, self._loss)
        for zero in self.zeros:
            zero.reduce()
        shards = [shard for zero in self.zeros for shard in zero.shards]
        norm = clip_by_global_norm(shards, self.max_norm or inf, [self.mesh.pp])
        for zero in self.zeros:
            zero.step()
        self.done += 1
        self.losses.append(self._mean(loss))
        self.norms.append(norm.item())
        return self.losses[-1], self.norms[-1]

    def model(self) -> nn.Sequential:
        """The whole model with the weights of now (in BF16 training the FP32 masters), on every rank; all ranks must ask for it.

        >>> model = d2lps.run(lambda comm: train(comm, small, plan, data, 9, 8, adam).model(), plan.ranks)[0]   # doctest: +SKIP
        >>> model(tokens).argmax(-1)                                            # as any module         # doctest: +SKIP

        Of a checkpoint, `resume` first, under any plan, that of one rank, too.
        """
        model = self.transformer.module(self.place.seed, self.zeros[0].shards[0].dtype).to(self.comm.device)
        pieces = {name: piece for zero in self.zeros for name, piece in zero.pieces().items()}
        weights = dict(model.named_parameters())
        found = gathered(self.comm, {name: piece for name, piece in pieces.items() if name in weights})
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(found[name])
        return model

    # ---- micro-batches --------------------------------------------------------------------------------------------

    def _fetch(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """This rank's part of the next batch, in micro-batches: its sequences, and its positions of them."""
        mesh, share, device = self.mesh, self.batch // self.plan.dp, self.comm.device
        first = mesh.dp.rank * share
        tokens, targets = self._checked(share, self.data.batch(self.done * self.batch + first, share))
        if self.plan.cp > 1:
            tokens, targets = local(mesh.cp, tokens), local(mesh.cp, targets)
        self.counted = (targets != NOTHING).sum().to(device)
        with mesh.data.about("number of tokens", "", "", partial=True):
            all_reduce(mesh.data, self.counted)
        self.counted.clamp_(min=1)
        self.place.step, rows = self.done, first + torch.arange(share)
        self.rows, tokens, targets = (part.to(device).split(self.plan.micro_batch) for part in (rows, tokens, targets))
        return tokens, targets

    def _checked(self, count: int, given: object) -> tuple[Tensor, Tensor]:
        if not isinstance(given, tuple | list) or len(given) != 2 or not all(isinstance(part, Tensor) for part in given):
            raise ValueError(f"the data gave {type(given).__name__}, and two tensors were asked for, tokens and targets")
        tokens, targets = given
        wanted, vocab = [count, self.transformer.sequence], self.transformer.vocab
        for name, part in (("tokens", tokens), ("targets", targets)):
            if part.dtype != torch.long:
                raise ValueError(f"the data gave {name} of {part.dtype}, and numbers of tokens are torch.int64")
            if list(part.shape) != wanted:
                raise ValueError(f"the data gave {name} of shape {list(part.shape)}, and {wanted} was asked for")
        if not tokens.is_meta and not 0 <= tokens.min() <= tokens.max() < vocab:  # a piece of an embedding would give zeros
            raise ValueError(f"tokens from {tokens.min()} to {tokens.max()} are not all among the model's vocab={vocab}")
        return tokens, targets

    def _enter(self, passes: Iterator[int], part: nn.Module, inputs: object) -> None:
        """Every schedule takes a stage's micro-batches in order, forward and backward: so which one it is, is counted."""
        self.micro_batch = next(passes) % self.micro_batches
        self.place.rows = self.rows[self.micro_batch]

    def _leave(self, part: nn.Module, inputs: object, output: Tensor) -> None:
        """With zero=0 or 1 gradients stay whole until the last micro-batch has added its own, and travel only then."""
        last = self.micro_batch == self.micro_batches - 1
        if self.plan.zero < 2:
            output.register_hook(lambda _: self._synchronize(last))

    def _synchronize(self, last: bool) -> None:
        for zero in self.zeros:
            zero.synchronize = last

    # ---- the loss -------------------------------------------------------------------------------------------------

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's part of the mean over all tokens, times the ranks whose mean Zero takes."""
        counts = targets != NOTHING
        loss = vocab_cross_entropy(self.mesh.tp, logits[counts], targets[counts])
        return loss * self.mesh.data.size / self.counted

    def _mean(self, loss: Tensor | None) -> float:
        """The last stage's ranks have the loss, each its own part; all are told the whole."""
        mean = torch.zeros((), dtype=torch.float64, device=self.comm.device) if loss is None else loss.detach().double()
        with self.mesh.data.about("loss", "", "", partial=True):
            all_reduce(self.mesh.data, mean, ReduceOp.AVG)
        with self.mesh.pp.about("loss", ""):
            broadcast(self.mesh.pp, mean, src=self.plan.pp - 1)
        return mean.item()


def train(
    comm: Communicator, transformer: Transformer, plan: Plan, data: Data, steps: int, batch: int, optimizer: Optimizer,
    max_norm: float | None = None, seed: int = 0, callback: Callable[[int, float, float], None] | None = None,
) -> Trainer:  # fmt: skip
    """Train a transformer on the ranks of `comm`, shared out as the plan says; the losses are the same under every plan.

    >>> small, adam = Transformer(4, hidden=32, heads=4, vocab=96, sequence=64), partial(torch.optim.AdamW, lr=3e-3)
    >>> d2lps.run(lambda comm: train(comm, small, Plan(dp=2, tp=2, zero=2), text(64), 10, 8, adam).losses, 4)   # doctest: +SKIP

    batch: sequences a step, of all ranks together. optimizer: makes one of a list of flat parameters. max_norm: of the gradient.
    callback(step, loss, norm): after each step, on every rank; a loss that is no number ends nothing, but a callback may. What
    data raise on a rank ends the run, with that rank named. ValueError, with the numbers, for a plan that can't be, for data that
    are not what was asked for, as where they have run out, and for an optimizer that flat shards are not for.
    """
    whole("steps", steps, 0)
    trainer = Trainer(comm, transformer, plan, data, batch, optimizer, max_norm, seed)
    for step in range(steps):
        loss, norm = trainer.step()
        if callback:
            callback(step, loss, norm)
    return trainer
