"""What a plan does to a model, one axis of the mesh after another, and to what is kept of it; and who then looks after what."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2lps.parallel.context import context_parallel
from d2lps.parallel.experts import Experts, expert_parallel, set_share
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.shard import shard_of
from d2lps.parallel.sharded.zero import Zero
from d2lps.parallel.tensor.parallelize import tensor_parallel
from d2lps.parallel.training.plan import PRECISIONS, Plan
from d2lps.parallel.transformer import MLP, Attention, Block, Place, placed

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


def recompute(model: nn.Module, what: str, place: Place) -> None:
    """Keep less of a Transformer's forward pass: changed in place, and nothing of what it computes.

    >>> recompute(model, "full", place)                     # doctest: +SKIP

    what: "full": of a block only its input is kept, which costs a forward pass more, communication too. "selective": attention's
    scores and weights are not, most of what is kept and little of what is computed. "activation": what an MLP's nonlinear
    function has made is not, the widest tensor that is cheap to make again. "none". place: of dropout (see `Place`), whose
    masks are then those of the first time, as the place is put back to where it was.
    Source: Chen et al. 2016; Korthikanti et al. 2022 for "selective".
    """
    for part in model.modules():
        if what == "full" and isinstance(part, Block):
            part.forward = _again(part.forward, place)  # type: ignore[method-assign]
        elif what == "selective" and isinstance(part, Attention):
            part.attend = _again(part.attend, place)
        elif what == "activation" and isinstance(part, MLP | Experts):  # with the product behind it: there the second time ends
            part.lower = _again(part.lower, place)  # type: ignore[method-assign]


def _again(function: Callable[..., Any], place: Place) -> Callable[..., Any]:
    def forward(*inputs: Any) -> Any:
        rows = place.rows

        def compute(*inputs: Any) -> Any:
            place.rows = rows  # those of now, while the backward pass of another micro-batch may come first
            return function(*inputs)

        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)

    return forward
