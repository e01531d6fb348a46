"""All-reduce in levels: most of the work inside a machine, where links are fast, and only parts across machines."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from d2lps.collectives.all_reduce.placement import by_machine
from d2lps.collectives.all_reduce.rings import around
from d2lps.collectives.ring import Ring, all_gather_round, reduce_scatter_round
from d2lps.comm import Communicator, ReduceOp

Nest = Sequence[Any]  # ranks, or nests that are all equally deep: [[0, 1], [2, 3]] are two machines of two ranks


def hierarchical(comm: Communicator, data: Tensor, op: ReduceOp, *, groups: Nest | None = None) -> None:
    """Reduce-scatter inside each group, all-reduce of each part across the groups, all-gather inside; all by rings.

    groups: lists of ranks, or lists of such lists, and so on: a level for each level of the network; every rank once.
    By default, the ranks of each machine. Groups may differ in size: in a smaller one, a rank takes care of more parts.
    With k groups of g ranks: 2(g - 1) + 2(k - 1) steps; each rank sends 2(g - 1)/g n bytes inside and 2(k - 1)/k n/g
    across. Time: that of both rings, each with the alpha and beta of its own links.
    With 2 machines of 4, n beta = 10 ms inside and 80 ms across: 15 + 20 = 35 ms. Source: Cho et al. 2019 (BlueConnect).
    """
    groups = by_machine(comm) if groups is None else groups
    if not _depth(groups, groups) or sorted(rank for group in _innermost(groups) for rank in group) != list(range(comm.size)):
        raise ValueError(f"groups={groups!r} must be lists that hold each of the ranks 0 to {comm.size - 1} once")
    _all_reduce(comm, data, op, groups)


def _all_reduce(comm: Communicator, data: Tensor, op: ReduceOp, nest: Nest) -> None:
    if not _deep(nest):
        around(comm, [data], op, [nest])
        return
    innermost = _innermost(nest)
    mine = next(group for group in innermost if comm.rank in group)
    count = max(map(len, innermost))  # as many parts as the largest group has ranks
    edges = [data.numel() * number // count for number in range(count + 1)]
    first = [_first(k, len(mine), count) for k in range(len(mine) + 1)]
    chunks = [data[edges[first[k]] : edges[first[k + 1]]] for k in range(len(mine))]
    ring = Ring.of(comm.rank, mine, chunks)
    reduce_scatter_round(comm, [ring], op)
    held = (mine.index(comm.rank) + 1) % len(mine)  # the chunk with which the ring leaves this rank
    for number in range(first[held], first[held + 1]):
        _all_reduce(comm, data[edges[number] : edges[number + 1]], op, _holders(nest, number, count))
    all_gather_round(comm, [ring])


def _first(chunk: int, ranks: int, parts: int) -> int:
    """`[_first(k, 2, 3) for k in range(3)] == [0, 1, 3]`: of 3 parts, the first of 2 ranks gets 1, the second 2."""
    return chunk * parts // ranks


def _holders(nest: Nest, number: int, parts: int) -> Nest:
    """The nest of those who hold part `number`, one of each innermost group: `_holders([[0, 1], [2, 3]], 1, 2) == [0, 2]`."""
    if _deep(nest):
        return [_holders(group, number, parts) for group in nest]
    chunk = next(k for k in range(len(nest)) if number < _first(k + 1, len(nest), parts))
    return nest[chunk - 1]


def _deep(nest: Nest) -> bool:
    return isinstance(nest[0], list | tuple)


def _innermost(nest: Nest) -> list[Nest]:
    """`_innermost([[[0, 1], [2]], [[3]]]) == [[0, 1], [2], [3]]`"""
    return [group for inner in nest for group in _innermost(inner)] if _deep(nest) else [nest]


def _depth(nest: Any, groups: Nest) -> int:
    """How deep the lists of `groups` are inside `nest`, one of them; all must be equally deep."""
    if not isinstance(nest, list | tuple):
        return 0
    below = {_depth(inner, groups) for inner in nest}
    if len(below) != 1:
        raise ValueError(f"groups={groups!r}: {nest!r} is empty, or its members are not equally deep lists")
    return 1 + below.pop()
