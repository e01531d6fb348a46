"""The exercises: what a function gets, what it must leave, and the least it could do it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from d2lps.check.diagnose import wrong_copy, wrong_sum
from d2lps.check.exercise import Exercise
from d2lps.check.values import countable, labelled
from d2lps.check.verdict import Verdict
from d2lps.result import Run

_ROOT = 0


def _blank(size: int) -> torch.Tensor:
    """Room to be written: -1 is no value of any rank's."""
    return torch.full((size,), -1, dtype=torch.int64)


def _expect_copies(expected: Callable[[int, int, int, tuple[Any, ...]], list[tuple[str, torch.Tensor, torch.Tensor]]]) -> Any:
    """A judge that compares (name, what is there, what should be) pair by pair."""

    def judge(rank: int, p: int, size: int, arguments: tuple[Any, ...], run: Run) -> str:
        for name, got, wanted in expected(rank, p, size, arguments):
            if not torch.equal(got, wanted):
                return wrong_copy(rank, name, got, wanted)
        return ""

    return judge


def _total(p: int, size: int, part: int = 0) -> torch.Tensor:
    return sum((countable(rank, size, part) for rank in range(p)), start=torch.zeros(size, dtype=torch.int64))


def _judge_sum(rank: int, p: int, size: int, arguments: tuple[Any, ...], run: Run) -> str:
    got, wanted = arguments[0], _total(p, size)
    return "" if torch.equal(got, wanted) else wrong_sum(rank, got, wanted, p, 1, run.trace)


def _judge_part(rank: int, p: int, size: int, arguments: tuple[Any, ...], run: Run) -> str:
    got, wanted = arguments[0], _total(p, size, rank)
    return "" if torch.equal(got, wanted) else wrong_sum(rank, got, wanted, p, p, run.trace)


def _judge_root_sum(rank: int, p: int, size: int, arguments: tuple[Any, ...], run: Run) -> str:
    got, wanted = arguments[0], _total(p, size) if rank == _ROOT else countable(rank, size)
    if torch.equal(got, wanted):
        return ""
    if rank != _ROOT:
        return f"rank {rank}'s tensor was changed; only that of rank {_ROOT} should be"
    return wrong_sum(rank, got, wanted, p, 1, run.trace)


def all_reduce(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, tensor)`: every rank's tensor ends as the sum of all.

    >>> def lazy(comm, tensor):
    ...     pass
    >>> all_reduce(lazy)
    not yet: with 2 ranks and 8 elements, rank 0, elements 0 to 7: rank 1 is missing (no message brought rank 0 this element)
    """
    return Exercise(
        "all_reduce",
        lambda rank, p, size: (countable(rank, size),),
        _judge_sum,
        lambda p, n: 2 * (p - 1) / p * n,
    ).check(function)


def reduce(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, tensor, dst)`: the tensor of dst ends as the sum of all, the others as they were."""
    return Exercise(
        "reduce",
        lambda rank, p, size: (countable(rank, size), _ROOT),
        _judge_root_sum,
        lambda p, n: n if p > 1 else 0,
    ).check(function)


def broadcast(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, tensor, src)`: every rank's tensor ends as that of src."""
    return Exercise(
        "broadcast",
        lambda rank, p, size: (labelled(rank, 0, size), p - 1),
        _expect_copies(lambda rank, p, size, a: [("tensor", a[0], labelled(p - 1, 0, size))]),
        lambda p, n: n if p > 1 else 0,
    ).check(function)


def scatter(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, tensor, scatter_list, src)`: rank r's tensor ends as scatter_list[r] of src."""
    return Exercise(
        "scatter",
        lambda rank, p, size: (_blank(size), [labelled(0, r, size) for r in range(p)] if rank == _ROOT else None, _ROOT),
        _expect_copies(lambda rank, p, size, a: [("tensor", a[0], labelled(0, rank, size))]),
        lambda p, n: (p - 1) * n,
    ).check(function)


def gather(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, tensor, gather_list, dst)`: gather_list[r] of dst ends as rank r's tensor."""
    return Exercise(
        "gather",
        lambda rank, p, size: (labelled(rank, 0, size), [_blank(size) for _ in range(p)] if rank == _ROOT else None, _ROOT),
        _expect_copies(
            lambda rank, p, size, a: [(f"gather_list[{r}]", a[1][r], labelled(r, 0, size)) for r in range(p) if rank == _ROOT]
        ),
        lambda p, n: n if p > 1 else 0,
    ).check(function)


def all_gather(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, tensor_list, tensor)`: tensor_list[r] of every rank ends as rank r's tensor."""
    return Exercise(
        "all_gather",
        lambda rank, p, size: ([_blank(size) for _ in range(p)], labelled(rank, 0, size)),
        _expect_copies(lambda rank, p, size, a: [(f"tensor_list[{r}]", a[0][r], labelled(r, 0, size)) for r in range(p)]),
        lambda p, n: (p - 1) * n,
    ).check(function)


def reduce_scatter(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, output, input_list)`: output of rank r ends as the sum of all ranks' input_list[r]."""
    return Exercise(
        "reduce_scatter",
        lambda rank, p, size: (_blank(size), [countable(rank, size, part) for part in range(p)]),
        _judge_part,
        lambda p, n: (p - 1) * n,
    ).check(function)


def all_to_all(function: Callable[..., Any]) -> Verdict:
    """Check `function(comm, output_list, input_list)`: output_list[i] of rank j ends as input_list[j] of rank i."""
    return Exercise(
        "all_to_all",
        lambda rank, p, size: ([_blank(size) for _ in range(p)], [labelled(rank, r, size) for r in range(p)]),
        _expect_copies(lambda rank, p, size, a: [(f"output_list[{r}]", a[0][r], labelled(r, rank, size)) for r in range(p)]),
        lambda p, n: (p - 1) * n,
    ).check(function)
