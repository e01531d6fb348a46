"""The steps and bytes that each collective's docstring promises, counted in the traces of real runs.

p ranks, n bytes of the whole tensor, L = ceil(log2 p): the letters of the docstrings.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import ceil, log2

import numpy as np
import pytest
import torch
from oracles import ALGORITHMS, Call, perform, rooms_for

import d2lps
from d2lps.trace import Trace

RANKS = [1, 2, 3, 4, 5, 7, 8]
N = 4 * 2 * 840  # bytes: 840 floats, and half of all, are divisible by all these p


def L(p: int) -> int:
    return ceil(log2(p))


def q(p: int) -> int:
    """The largest power of two that is not above p."""
    return 2 ** int(log2(p))


def below(p: int) -> int:
    """Messages that carry one part each, if a tree of p ranks gives every part its own way: scatter's total."""
    return sum(bin(position).count("1") for position in range(p))


@dataclass(frozen=True)
class Promise:
    """What one algorithm costs, as functions of p and n: bytes of whom, and of all together."""

    steps: Callable[[int], int]
    busiest: Callable[[int, int], float]
    total: Callable[[int, int], float]
    received: bool = False  # whether the busiest rank is the one that receives most, as in reduce and gather
    everyone: bool = False  # whether all ranks have as much to do


def _each_passes_on_its_share(steps: Callable[[int], int]) -> Promise:
    """Every rank sends (p - 1)/p n bytes: all-gather, reduce-scatter, all-to-all."""
    return Promise(steps, lambda p, n: (p - 1) / p * n, lambda p, n: (p - 1) * n, everyone=True)


PROMISES = {
    ("broadcast", "flat"): Promise(lambda p: p - 1, lambda p, n: (p - 1) * n, lambda p, n: (p - 1) * n),
    ("broadcast", "tree"): Promise(L, lambda p, n: L(p) * n, lambda p, n: (p - 1) * n),
    ("reduce", "flat"): Promise(lambda p: p - 1, lambda p, n: (p - 1) * n, lambda p, n: (p - 1) * n, received=True),
    ("reduce", "tree"): Promise(L, lambda p, n: L(p) * n, lambda p, n: (p - 1) * n, received=True),
    ("scatter", "linear"): Promise(lambda p: p - 1, lambda p, n: (p - 1) / p * n, lambda p, n: (p - 1) / p * n),
    ("scatter", "tree"): Promise(L, lambda p, n: (p - 1) / p * n, lambda p, n: below(p) / p * n),
    ("gather", "linear"): Promise(lambda p: p - 1, lambda p, n: (p - 1) / p * n, lambda p, n: (p - 1) / p * n, received=True),
    ("gather", "tree"): Promise(L, lambda p, n: (p - 1) / p * n, lambda p, n: below(p) / p * n, received=True),
    ("all_gather", "ring"): _each_passes_on_its_share(lambda p: p - 1),
    ("all_gather", "bruck"): _each_passes_on_its_share(L),
    ("all_gather_into_tensor", "ring"): _each_passes_on_its_share(lambda p: p - 1),
    ("all_gather_into_tensor", "bruck"): _each_passes_on_its_share(L),
    ("reduce_scatter", "ring"): _each_passes_on_its_share(lambda p: p - 1),
    ("reduce_scatter", "pairwise"): _each_passes_on_its_share(lambda p: p - 1),
    ("reduce_scatter_tensor", "ring"): _each_passes_on_its_share(lambda p: p - 1),
    ("reduce_scatter_tensor", "pairwise"): _each_passes_on_its_share(lambda p: p - 1),
    ("all_to_all", "direct"): _each_passes_on_its_share(lambda p: min(1, p - 1)),
    ("all_to_all", "pairwise"): _each_passes_on_its_share(lambda p: p - 1),
    ("all_reduce", "flat"): Promise(lambda p: 2 * (p - 1), lambda p, n: (p - 1) * n, lambda p, n: 2 * (p - 1) * n),
    ("all_reduce", "tree"): Promise(lambda p: 2 * L(p), lambda p, n: L(p) * n, lambda p, n: 2 * (p - 1) * n),
    ("all_reduce", "ring"): Promise(
        lambda p: 2 * (p - 1), lambda p, n: 2 * (p - 1) / p * n, lambda p, n: 2 * (p - 1) * n, everyone=True
    ),
    ("all_reduce", "two_rings"): Promise(
        lambda p: 2 * (p - 1), lambda p, n: 2 * (p - 1) / p * n, lambda p, n: 2 * (p - 1) * n, everyone=True
    ),
    ("all_reduce", "blockwise"): Promise(
        lambda p: 2 * min(1, p - 1), lambda p, n: 2 * (p - 1) / p * n, lambda p, n: 2 * (p - 1) * n, everyone=True
    ),
    ("all_reduce", "halving_doubling"): Promise(
        lambda p: 2 * L(p) if p == q(p) else 2 * L(q(p)) + 2,
        lambda p, n: (2 * (q(p) - 1) / q(p) + (p > q(p))) * n,  # who folds for another one sends it the result at the end
        lambda p, n: 2 * (p - 1) * n,
    ),
    ("all_reduce", "native"): Promise(lambda p: 0, lambda p, n: 0, lambda p, n: 0),  # no trace sees its messages
}
ELSEWHERE = {("all_reduce", name) for name in ("double_tree", "hierarchical", "auto")}  # bounds: see test_all_reduce.py
WHOLE = ("broadcast", "reduce", "all_reduce")  # their n is each rank's tensor; that of the others is cut into p parts


@cache
def traces(p: int) -> dict[tuple[str, str], Trace]:
    """The trace of every algorithm on p ranks: one run, in which each has a group of its own to be told apart by."""
    calls = [Call(*promise, n=N // 4 if promise[0] in WHOLE else N // 4 // p) for promise in PROMISES]
    rooms = rooms_for(calls, p)

    def work(comm):
        for call, room in zip(calls, rooms, strict=True):
            perform(comm.split(0), [call], [room])

    trace = d2lps.run(work, p, trace=True).trace
    names = [f"world/{k + 1}.0" for k in range(len(calls))]
    return {promise: only(trace, name) for promise, name in zip(PROMISES, names, strict=True)}


def only(trace: Trace, group: str) -> Trace:
    """The messages of one group, as if there had been no others."""
    number = trace.groups.index(group) if group in trace.groups else -1

    def chosen(table: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: column[rows] for name, column in table.items()}

    messages, waits = (chosen(table, table["group"] == number) for table in (trace.messages, trace.waits))
    nothing = chosen(trace.locals, np.zeros(0, dtype=int))
    alone = copy(trace)
    vars(alone).update(messages=messages, locals=nothing, waits=waits)
    vars(alone).pop("replay", None)
    return alone


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("collective, algorithm", PROMISES)
def test_costs_what_its_docstring_says(collective: str, algorithm: str, p: int) -> None:
    trace, promise = traces(p)[collective, algorithm], PROMISES[collective, algorithm]
    moved = trace.bytes_received() if promise.received else trace.bytes_sent()
    assert trace.rounds == promise.steps(p), "steps"
    assert moved.max() == round(promise.busiest(p, N)), "bytes of the busiest rank"
    assert moved.sum() == round(promise.total(p, N)), "bytes of all ranks"
    if promise.everyone:
        assert set(moved) == {moved.max()}, "bytes of each rank"


def test_every_algorithm_has_its_promise() -> None:
    assert {(name, algorithm) for name in ALGORITHMS for algorithm in ALGORITHMS[name]} == set(PROMISES) | ELSEWHERE


def test_traces_are_told_apart_by_their_groups() -> None:
    assert sum(len(trace) for trace in traces(5).values()) > 200
    assert len(traces(5)["broadcast", "flat"]) == 4


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_the_root_is_the_busiest_rank_wherever_it_is(p: int) -> None:
    def work(comm):
        x, parts = torch.ones(8), [torch.ones(8)] * comm.size
        root = comm.size - 1
        d2lps.collectives.broadcast(comm.split(0), x, root)
        d2lps.collectives.scatter(comm.split(0), x, parts if comm.rank == root else None, root)

    trace = d2lps.run(work, p, trace=True).trace
    for group in ("world/1.0", "world/2.0"):
        assert only(trace, group).bytes_sent().argmax() == p - 1
