"""Clipping by the norm of the whole model's gradient, of which every rank has a piece."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.parallel.shard import shard_of


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[Tensor], max_norm: float, groups: Iterable[Communicator] = ()) -> Tensor:
    """Scale all gradients so that their norm, over all ranks, is at most `max_norm`; return what it was.

    >>> clip_by_global_norm(zero.shards, max_norm=1.0, groups=[mesh.pp])        # after zero.reduce()       # doctest: +SKIP
    tensor(2.7451, dtype=torch.float64)

    Each square must be counted once. Of a parameter that is a piece (`shard_of`), squares are summed over the ranks that have the
    other pieces; one that all ranks have is counted on this rank alone. `Zero`'s shards are pieces, of pieces and of wholes.
    groups: over which all parameters are different ones, as over a pipeline's stages. Where two stages hold the same parameter,
    as with tied embeddings, one of them has an attribute `duplicate`, True, and is scaled, but not counted.
    The factor is torch's: max_norm / (norm + 1e-6), at most 1; squares are added up in float64, so ranks agree to the bit.
    ValueError unless max_norm is above 0, and for a group that has the pieces; RuntimeError for shards that `Zero.reduce` has
    still to give their gradients.
    Cost: an all-reduce of one number for each group, and each kind of piece.
    Source: `torch.nn.utils.clip_grad_norm_`; Pascanu et al. 2013.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r} is not above 0")
    parameters = list(parameters)
    if any(p.unreduced() for p in parameters if hasattr(p, "unreduced")):
        raise RuntimeError("the shards do not have the gradients of all backward passes yet: call zero.reduce() before you clip")
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    kinds: dict[tuple[Communicator, ...], Tensor] = {}
    for parameter, gradient in gradients:
        for part, over in _parts(parameter, gradient):
            square = part.detach().double().square().sum()
            kinds[over] = kinds[over] + square if over in kinds else square
    groups, summed = list(groups), [group.members for over in kinds for group in over if group.size > 1]
    if twice := [group.members for group in groups if group.members in summed]:
        told = "over which the squares of these pieces are added up anyway: they would count several times"
        raise ValueError(f"groups has that of ranks {twice[0]}, {told}")
    for over, squares in kinds.items():
        for group in over:
            with group.about("grads' squares", "", "", partial=True):
                all_reduce(group, squares)
    total = torch.stack(list(kinds.values())).sum() if kinds else torch.zeros((), dtype=torch.float64)
    for group in groups:
        with group.about("grads' squares", "", "", partial=True):
            all_reduce(group, total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor.to(gradient))
    return norm


def _parts(parameter: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, tuple[Communicator, ...]]]:
    """What counts of a gradient, and over whose ranks it is to be summed; a flat shard has parts of many parameters."""
    shard = shard_of(parameter)
    over = (shard.comm,) if shard else ()
    if not hasattr(parameter, "parts"):
        yield (gradient[:0] if getattr(parameter, "duplicate", False) else gradient), over
        return
    for whole, part in parameter.parts(gradient):
        inner = shard_of(whole)
        yield (part[:0] if getattr(whole, "duplicate", False) else part), (inner.comm, *over) if inner else over
