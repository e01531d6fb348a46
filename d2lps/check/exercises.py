"""The exercises: what a function gets, what it must leave, and the least it could do it with.

>>> def lazy(comm, tensor):
...     pass
>>> all_reduce(lazy)
not yet: with 2 ranks and 8 elements, rank 0, elements 0 to 7: rank 1 is missing (no message brought rank 0 this element)
"""

from __future__ import annotations

import torch

from d2lps.check.exercise import Case, Left, exercise
from d2lps.check.values import countable, labelled

_ROOT = 0


def _blank(size: int) -> torch.Tensor:
    """Room to be written: -1 is no value of any rank's."""
    return torch.full((size,), -1, dtype=torch.int64)


def _total(p: int, size: int, part: int = 0) -> torch.Tensor:
    return sum((countable(rank, size, part) for rank in range(p)), start=torch.zeros(size, dtype=torch.int64))


def _once(p: int, nbytes: float) -> float:
    return nbytes if p > 1 else 0


def _to_all_others(p: int, nbytes: float) -> float:
    return (p - 1) * nbytes


@exercise(least_bytes=lambda p, nbytes: 2 * (p - 1) / p * nbytes)
def all_reduce(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor)`: every rank's tensor ends as the sum of all."""
    tensor = countable(rank, size)
    return [tensor], lambda: [Left(tensor, _total(p, size), parts=1)]


@exercise(least_bytes=_once)
def reduce(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, dst)`: the tensor of dst ends as the sum of all, the others as they were."""
    tensor = countable(rank, size)
    if rank == _ROOT:
        return [tensor, _ROOT], lambda: [Left(tensor, _total(p, size), parts=1)]
    return [tensor, _ROOT], lambda: [Left(tensor, countable(rank, size), only=f"that of rank {_ROOT}")]


@exercise(least_bytes=_once)
def broadcast(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, src)`: every rank's tensor ends as that of src."""
    tensor, src = labelled(rank, 0, size), p - 1
    return [tensor, src], lambda: [Left(tensor, labelled(src, 0, size))]


@exercise(least_bytes=_to_all_others)
def scatter(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, scatter_list, src)`: rank r's tensor ends as scatter_list[r] of src."""
    tensor, parts = _blank(size), [labelled(_ROOT, r, size) for r in range(p)]
    return [tensor, parts if rank == _ROOT else None, _ROOT], lambda: [Left(tensor, labelled(_ROOT, rank, size))]


@exercise(least_bytes=_once)
def gather(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, gather_list, dst)`: gather_list[r] of dst ends as rank r's tensor."""
    tensor, room = labelled(rank, 0, size), [_blank(size) for _ in range(p)]
    if rank != _ROOT:
        return [tensor, None, _ROOT], lambda: []
    return [tensor, room, _ROOT], lambda: [Left(room[r], labelled(r, 0, size), f"gather_list[{r}]") for r in range(p)]


@exercise(least_bytes=_to_all_others)
def all_gather(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor_list, tensor)`: tensor_list[r] of every rank ends as rank r's tensor."""
    room, tensor = [_blank(size) for _ in range(p)], labelled(rank, 0, size)
    return [room, tensor], lambda: [Left(room[r], labelled(r, 0, size), f"tensor_list[{r}]") for r in range(p)]


@exercise(least_bytes=_to_all_others)
def reduce_scatter(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, output, input_list)`: output of rank r ends as the sum of all ranks' input_list[r]."""
    output, parts = _blank(size), [countable(rank, size, part) for part in range(p)]
    return [output, parts], lambda: [Left(output, _total(p, size, rank), parts=p)]


@exercise(least_bytes=_to_all_others)
def all_to_all(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, output_list, input_list)`: output_list[i] of rank j ends as input_list[j] of rank i."""
    room, parts = [_blank(size) for _ in range(p)], [labelled(rank, r, size) for r in range(p)]
    return [room, parts], lambda: [Left(room[r], labelled(r, rank, size), f"output_list[{r}]") for r in range(p)]
