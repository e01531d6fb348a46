"""What each axis of a mesh does to a model, one after another, and who looks after which parameters then."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from d2lps.parallel.context import context_parallel
from d2lps.parallel.dropout import Place, placed
from d2lps.parallel.experts import expert_parallel, set_share
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.shard import shard_of
from d2lps.parallel.sharded.zero import Zero
from d2lps.parallel.tensor.parallelize import tensor_parallel
from d2lps.parallel.training.plan import PRECISIONS, Plan
from d2lps.parallel.training.recompute import recompute

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def shared_out(mesh: Mesh, plan: Plan, whole: nn.Sequential, place: Place, micro_batches: int) -> nn.Sequential:
    """A whole Transformer's module, alike on all ranks, with this rank's pieces of its layers; place: told where they are."""
    model: Any = whole
    place.positions = torch.arange(model.embed.places.num_embeddings, device=mesh.comm.device)
    if plan.cp > 1:
        context_parallel(mesh.cp, model)
        place.positions = model.embed.positions
    if plan.tp > 1:
        tensor_parallel(mesh.tp, model, plan.sequence_parallel)
    if plan.sequence_parallel:
        place.positions = place.positions.chunk(plan.tp)[mesh.tp.rank]
    if plan.ep > 1:
        expert_parallel(mesh.ep, model)
    set_share(model, 1 / micro_batches)
    placed(model, place)
    recompute(model, plan.recompute, place)
    return whole


def tie(mesh: Mesh, model: nn.Sequential) -> list[nn.Parameter]:
    """The weight that the first and the last stage both have, if they are two: its gradient is the sum of theirs.

    Each has a copy of it, and makes the same step on the same sum. Returns that copy; nothing on ranks with neither stage.
    """
    parts: Any = model
    weight = parts.embed.tokens.weight
    if weight is not parts.head.linear.weight or mesh.pp.size == 1:
        return []
    ends = mesh.pp.split(0 if mesh.pp.rank in (0, mesh.pp.size - 1) else None)
    weight.partial, weight.duplicate, weight.known_as = ends, mesh.pp.rank > 0, "embed.tokens.weight"
    return [weight] if ends else []


def look_after(mesh: Mesh, plan: Plan, module: nn.Module, tied: list[nn.Parameter], optimizer: Optimizer) -> Iterator[Zero]:
    """Who averages gradients, and steps: over all that have the same parameters, for experts fewer than for the rest.

    Without zero nothing is shared out: each rank is a group of its own, and such groups have copies, which is data parallelism.
    What is tied waits until the backward passes are over: the stages meet for it, and one would wait for the other's.
    """
    all_of_them = dict.fromkeys(module.parameters())
    split = [p for p in all_of_them if plan.ep > 1 and (shard := shard_of(p)) and shard.comm is mesh.ep]
    rest = [p for p in all_of_them if not any(p is other for other in (*split, *tied))]
    stage, group = (plan.zero, plan.zero_group) if plan.zero else (1, 1)
    stage = max(stage, 1 + plan.overlap)  # 2 is how 1 overlaps: by unit; in the last backward pass alone, see Trainer
    for comm, parameters, how in ((mesh.data, rest, stage), (mesh.edp, split, stage), (mesh.data, tied, 1)):
        if parameters:
            precision, main = PRECISIONS[plan.precision], plan.main_grads
            yield Zero(comm, module, optimizer, how, group, precision, plan.overlap, parameters, main_grads=main)
