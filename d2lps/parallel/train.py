"""Training under any plan: what the other files of this folder do one by one, put together.

Nothing is computed here. A plan is a mesh; each axis of the mesh exchanges parts of the model (`Trainer._shared_out`), and what
is left on a rank are the stages of a pipeline, whose gradients Zero brings together. One process is the plan of one rank.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

import torch
from torch import Tensor, nn

from d2lps.collectives import all_reduce, broadcast
from d2lps.comm import Communicator, ReduceOp
from d2lps.parallel.clip import clip_by_global_norm
from d2lps.parallel.context import context_parallel, local
from d2lps.parallel.data import NOTHING, Text
from d2lps.parallel.dropout import Place, placed
from d2lps.parallel.experts import expert_parallel, set_share
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.pipeline import execute
from d2lps.parallel.plan import PRECISIONS, Plan
from d2lps.parallel.recompute import recompute
from d2lps.parallel.shard import shard_of
from d2lps.parallel.tensor import tensor_parallel, vocab_cross_entropy
from d2lps.parallel.transformer import Transformer
from d2lps.parallel.zero import Zero

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Trainer:
    """A rank's part of a training run.

    >>> trainer = Trainer(comm, transformer, Plan(dp=2, tp=2), text(sequence=64), batch=8, optimizer=adam)      # doctest: +SKIP
    >>> trainer.step()                      # (loss, norm of the gradients), on every rank the same     # doctest: +SKIP
    (4.58, 1.27)

    The loss is the mean over all tokens that count of the whole batch, whatever ranks, micro-batches and parts of sequences
    they are in. `done` counts the steps; with `seed` and the data, all that is random follows from it.
    """

    def __init__(
        self, comm: Communicator, transformer: Transformer, plan: Plan, data: Text, batch: int, optimizer: Optimizer,
        max_norm: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        plan.check(transformer, batch, comm.size)
        self.comm, self.plan, self.data, self.batch, self.max_norm = comm, plan, data, batch, max_norm
        self.mesh = Mesh(comm, plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)
        self.place, self.done = Place(seed), 0
        self.schedule, self.micro_batches = plan.order(batch), plan.micro_batches(batch)
        model = self._shared_out(transformer.module(seed, torch.float64 if plan.precision == "fp64" else torch.float32))
        cuts = list(enumerate(plan.stages(transformer.layers)))[self.mesh.pp.rank :: plan.pp]
        self.stages = {stage: model[first:end] for stage, (first, end) in cuts}
        self.module = nn.Sequential(OrderedDict(part for stage in self.stages.values() for part in stage.named_children()))
        tied = [model.embed.tokens.weight] if transformer.tied and plan.pp > 1 else []  # type: ignore[union-attr, list-item]
        self.zeros = list(self._zeros(optimizer, tied))
        for stage in self.stages.values():
            self._follow(stage)

    # ---- the model ------------------------------------------------------------------------------------------------

    def _shared_out(self, model: nn.Sequential) -> nn.Sequential:
        """The whole model, which all ranks have alike, with this rank's pieces of its layers."""
        mesh, plan, sequence = self.mesh, self.plan, model.embed.places.num_embeddings  # type: ignore[union-attr]
        self.place.positions = torch.arange(sequence, device=self.comm.device)
        if plan.cp > 1:
            context_parallel(mesh.cp, model)
            self.place.positions = model.embed.positions  # type: ignore[union-attr, assignment]
        if plan.tp > 1:
            tensor_parallel(mesh.tp, model, plan.sequence_parallel)
        if plan.sequence_parallel:
            self.place.positions = self.place.positions.chunk(plan.tp)[mesh.tp.rank]  # type: ignore[union-attr]
        if plan.ep > 1:
            expert_parallel(mesh.ep, model)
        set_share(model, 1 / self.micro_batches)
        placed(model, self.place)
        recompute(model, plan.recompute, self.place)
        return model.to(self.comm.device)

    def _zeros(self, optimizer: Optimizer, tied: list[nn.Parameter]) -> Iterator[Zero]:
        """Who steps on which parameters: those of experts are averaged over fewer ranks, tied ones summed over two stages first.

        Without zero, gradients and weights are not shared out at all: each rank is a group of its own, and all are copies.
        """
        plan, mesh = self.plan, self.mesh
        parameters = list(self.module.parameters())
        experts = [p for p in parameters if plan.ep > 1 and (shard := shard_of(p)) and shard.comm is mesh.ep]
        both = mesh.pp.split(0 if mesh.pp.rank in (0, plan.pp - 1) else None) if tied else None
        tied = [p for p in parameters if any(p is q for q in tied)]
        for parameter in tied:
            parameter.partial = both  # type: ignore[attr-defined]
            parameter.duplicate = mesh.pp.rank > 0  # type: ignore[attr-defined]
        rest = [p for p in parameters if not any(p is q for q in (*experts, *tied))]
        stage = plan.zero if plan.zero > 1 else 1 + plan.overlap
        for comm, chosen, how in ((mesh.data, rest, stage), (mesh.edp, experts, stage), (mesh.data, tied, 1)):
            if chosen:
                group = plan.zero_group if plan.zero else 1
                dtype = PRECISIONS[plan.precision]
                yield Zero(comm, self.module, optimizer, how, group, dtype, plan.overlap, chosen)

    def _follow(self, stage: nn.Sequential) -> None:
        """Know which micro-batch a stage computes: every schedule takes them in order, forward and backward."""
        for part in stage:
            part.register_forward_pre_hook(partial(self._enter, count()))
            part.register_forward_hook(self._leave)

    def _enter(self, passes: Iterator[int], part: nn.Module, inputs: object) -> None:
        self.micro_batch = next(passes) % self.micro_batches
        self.place.rows = self.rows[self.micro_batch]

    def _leave(self, part: nn.Module, inputs: object, output: Tensor) -> None:
        """Without zero=2 or 3 gradients stay whole until the last micro-batch has added its own, and travel only then."""
        last = self.micro_batch == self.micro_batches - 1
        if self.plan.zero < 2:
            output.register_hook(lambda _: self._synchronize(last))

    def _synchronize(self, last: bool) -> None:
        for zero in self.zeros:
            zero._synchronize = last

    # ---- a step ---------------------------------------------------------------------------------------------------

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
        return self._mean(loss), float(norm)

    def _fetch(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """This rank's part of the next batch, in micro-batches: its sequences, and its positions of them."""
        mesh, share = self.mesh, self.batch // self.plan.dp
        first = mesh.dp.rank * share
        batch = self.data.batch(self.done * self.batch + first, share)
        tokens, targets = (local(mesh.cp, part) if mesh.cp.size > 1 else part for part in batch)
        self.counted = (targets != NOTHING).sum().double()
        with mesh.data.about("number of tokens[]{*} → tokens[]"):
            all_reduce(mesh.data, self.counted)
        self.place.step = self.done
        parts = (first + torch.arange(share), tokens, targets)
        self.rows, tokens, targets = (part.to(self.comm.device).split(self.plan.micro_batch) for part in parts)
        return tokens, targets

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's part of the mean over all tokens, times the ranks that Zero takes the mean of."""
        counts = targets != NOTHING
        loss = vocab_cross_entropy(self.mesh.tp, logits[counts], targets[counts])
        return loss * (self.mesh.data.size / self.counted.to(loss.dtype))

    def _mean(self, loss: Tensor | None) -> float:
        """The last stage has the loss, of the tokens of each rank its own part; all are told the whole."""
        mean = torch.zeros((), dtype=torch.float64, device=self.comm.device) if loss is None else loss.detach().double()
        with self.mesh.data.about("loss[]{*} → loss[]"):
            all_reduce(self.mesh.data, mean, ReduceOp.AVG)
        with self.mesh.pp.about("loss[]"):
            broadcast(self.mesh.pp, mean, src=self.plan.pp - 1)
        return mean.item()


@dataclass
class Trained:
    """What a training run has been like, a number a step, and who has done it."""

    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train(
    comm: Communicator, transformer: Transformer, plan: Plan, data: Text, steps: int, batch: int, optimizer: Optimizer,
    max_norm: float | None = None, seed: int = 0, callback: Callable[[int, float, float], None] | None = None,
) -> Trained:  # fmt: skip
    """Train a transformer on the ranks of `comm`, shared out as the plan says; losses are the same under every plan.

    >>> small = Transformer(layers=4, hidden=32, heads=4, vocab=96, sequence=64, tied=True)
    >>> adam = partial(torch.optim.AdamW, lr=3e-3)
    >>> d2lps.run(lambda comm: train(comm, small, Plan(dp=2, tp=2, zero=2), text(64), 10, 8, adam).losses, 4)   # doctest: +SKIP

    batch: sequences a step, of all ranks together. optimizer: makes one of a list of flat parameters. max_norm: of the gradient.
    callback(step, loss, norm): called after each step, on every rank. ValueError, with the numbers, for a plan that can't be.
    """
    trained = Trained(Trainer(comm, transformer, plan, data, batch, optimizer, max_norm, seed))
    for step in range(steps):
        loss, norm = trained.trainer.step()
        trained.losses.append(loss)
        trained.norms.append(norm)
        if callback:
            callback(step, loss, norm)
    return trained
