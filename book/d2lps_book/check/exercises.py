"""The exercises: what a function gets, what it must leave, and the least it could do it with; and a contest of all-reduces.

>>> def lazy(comm, tensor):
...     comm.barrier()
>>> all_reduce(lazy)
not yet: with 2 ranks and 8 elements, rank 0, elements 0 to 7: rank 1 is missing (no message brought rank 0 this element)
"""

from typing import Any

import torch

from d2lps import collectives
from d2lps.simulator import simulate
from d2lps.topology import Topology
from d2lps_book.check.diagnose import Left
from d2lps_book.check.exercise import Case, Function, Verdict, exercise, plural
from d2lps_book.check.values import BLANK, countable


def _root(p: int, size: int) -> int:
    """Another one in each case, so that nobody gets by with rank 0 alone."""
    return (size + p // 2) % p


def _blank(size: int) -> torch.Tensor:
    """Room to be written."""
    return torch.full((size,), BLANK)


def _total(p: int, size: int, part: int = 0) -> torch.Tensor:
    return sum((countable(rank, size, part) for rank in range(p)), start=torch.zeros(size, dtype=torch.int64))


@exercise(least=2 * 7 / 8)
def all_reduce(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor)`: every rank's tensor ends as the sum of all."""
    tensor = countable(rank, size)
    return [tensor], [Left(tensor, _total(p, size), parts=1)]


@exercise(least=1)
def reduce(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, dst)`: the tensor of dst ends as the sum of all, the others as they were."""
    tensor, dst = countable(rank, size), _root(p, size)
    if rank == dst:
        return [tensor, dst], [Left(tensor, _total(p, size), parts=1, root=True)]
    return [tensor, dst], [Left(tensor, countable(rank, size), only=f"that of rank {dst}")]


@exercise(least=1)
def broadcast(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, src)`: every rank's tensor ends as that of src."""
    tensor, src = countable(rank, size), _root(p, size)
    return [tensor, src], [Left(tensor, countable(src, size))]


@exercise(least=7)
def scatter(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, scatter_list, src)`: rank r's tensor ends as scatter_list[r] of src."""
    tensor, src = _blank(size), _root(p, size)
    parts = [countable(src, size, r) for r in range(p)]
    return [tensor, parts if rank == src else None, src], [Left(tensor, parts[rank].clone())]


@exercise(least=1)
def gather(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor, gather_list, dst)`: gather_list[r] of dst ends as rank r's tensor."""
    tensor, room, dst = countable(rank, size), [_blank(size) for _ in range(p)], _root(p, size)
    if rank != dst:
        return [tensor, None, dst], []
    return [tensor, room, dst], [Left(room[r], countable(r, size), f"gather_list[{r}]") for r in range(p)]


@exercise(least=7)
def all_gather(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, tensor_list, tensor)`: tensor_list[r] of every rank ends as rank r's tensor."""
    room, tensor = [_blank(size) for _ in range(p)], countable(rank, size)
    return [room, tensor], [Left(room[r], countable(r, size), f"tensor_list[{r}]") for r in range(p)]


@exercise(least=7)
def reduce_scatter(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, output, input_list)`: output of rank r ends as the sum of all input_list[r], which stay."""
    output, parts = _blank(size), [countable(rank, size, part) for part in range(p)]
    given = [Left(part, part.clone(), f"input_list[{r}]", only="the output") for r, part in enumerate(parts)]
    return [output, parts], [Left(output, _total(p, size, rank), parts=p), *given]


@exercise(least=7)
def all_to_all(rank: int, p: int, size: int) -> Case:
    """Check `function(comm, output_list, input_list)`: output_list[i] of rank j ends as input_list[j] of rank i, which stays."""
    room, parts = [_blank(size) for _ in range(p)], [countable(rank, size, r) for r in range(p)]
    given = [Left(part, part.clone(), f"input_list[{r}]", only="the output_list") for r, part in enumerate(parts)]
    return [room, parts], [*(Left(room[r], countable(r, size, rank), f"output_list[{r}]") for r in range(p)), *given]


# ---- a contest: the reader's all-reduce against the ring, on a machine of their choice ----------------------------------


def contest(function: Function, topology: Topology, nbytes: int = 160_000_000) -> Verdict:
    """Time `function(comm, tensor)` beside the ring all-reduce in the simulator; who has a wrong sum does not compete.

    >>> from d2lps.topology import hgx_h100
    >>> contest(lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="ring"), hgx_h100())
    passed: 8 ranks of HGX H100, 160 MB: 0.670 ms, ring 0.670 ms, 1.00 times as fast
    """
    verdict = all_reduce(function)
    if not verdict:
        return verdict
    ranks = f"{plural(len(topology.devices), 'rank')} of {topology.name}"
    if trouble := _wrong_sum(function, topology):
        return Verdict(False, f"with {ranks}, {trouble}")
    mine, ring = _time(function, topology, nbytes), _time(collectives.all_reduce, topology, nbytes)
    times = f"{mine * 1e3:.3f} ms, ring {ring * 1e3:.3f} ms"
    factor = ring / mine if mine else 1.0  # of one rank, which sends nothing
    times += f", {factor:.2f} times as fast" if mine else ""
    return Verdict(True, f"{ranks}, {nbytes / 1e6:g} MB: {times}", mine, factor)


def _wrong_sum(function: Function, topology: Topology) -> str:
    """What a function does only with more ranks than the check has, on more than one machine perhaps, must be right too."""

    def work(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = torch.randint(10**9, (2 * comm.size + 1,), generator=torch.Generator().manual_seed(comm.rank))
        collectives.all_reduce(comm, total := tensor.clone())
        function(comm, tensor)
        return tensor, total

    for rank, (tensor, total) in enumerate(simulate(work, topology, trace=False)):
        if not torch.equal(tensor, total):
            element = int((tensor != total).nonzero()[0])
            return f"rank {rank}, element {element}: {tensor[element]}, and the sum is {total[element]}"
    return ""


def _time(function: Function, topology: Topology, nbytes: int) -> float:
    blank = torch.empty(nbytes // 4, device="meta")
    return simulate(function, topology, blank, device="meta", trace=False).time
