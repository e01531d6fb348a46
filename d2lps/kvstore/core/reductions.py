"""What becomes of the pushes of several workers: one rule, a function of what was pushed.

| rule | of n workers' gradients | who sends nonsense |
|---|---|---|
| sum | their sum | spoils it |
| mean | their sum, divided by n: one learning rate does for any number of workers | spoils it |
| median | of each element, the one in the middle, or the mean of the two | does no harm, if fewer than half do |
| trimmed_mean | of each element, the mean without the `trim` largest and smallest | does no harm, up to `trim` of them |

Source of the last two: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

Contribution = tuple[torch.Tensor | None, torch.Tensor]  # values[i] belongs to row rows[i]; rows=None means the whole tensor
Pushes = Mapping[int, Sequence[Contribution]]  # worker -> what it has pushed in a round, in order
Rule = Callable[[torch.Tensor, Pushes, int], Contribution]  # (the value, the pushes, how many workers there are) -> one change


def total(like: torch.Tensor, pushes: Pushes, workers: int) -> Contribution:
    """Added up by rank and then by time: the same in every run."""
    return add_up(like, [contribution for worker in sorted(pushes) for contribution in pushes[worker]])


def mean(like: torch.Tensor, pushes: Pushes, workers: int) -> Contribution:
    """Of all workers: one that has pushed nothing has pushed zeros."""
    rows, values = total(like, pushes, workers)
    return rows, values / workers


def median(like: torch.Tensor, pushes: Pushes, workers: int) -> Contribution:
    """What is left if as many as can be are left out at either end."""
    return trimmed_mean(like, pushes, workers, trim=len(pushes))


def trimmed_mean(like: torch.Tensor, pushes: Pushes, workers: int, trim: int = 1) -> Contribution:
    """Of those who have pushed; where that is no more than 2 trim, what is left is the median. NaN is larger than all numbers.

    >>> pushes = {worker: [(None, torch.tensor([x]))] for worker, x in enumerate([1.0, 2.0, 6.0, float("nan")])}
    >>> trimmed_mean(torch.zeros(1), pushes, workers=4), median(torch.zeros(1), pushes, workers=4)
    ((None, tensor([4.])), (None, tensor([4.])))

    Cost: n copies of what was pushed, sorted. Of rows, a worker has pushed zeros to those that only others have pushed.
    """
    rows, values = aligned(like, [add_up(like, pushes[worker]) for worker in sorted(pushes)])
    trim = min(trim, (len(values) - 1) // 2)
    return rows, values.sort(dim=0).values[trim : len(values) - trim].mean(dim=0)


RULES: dict[str, Rule] = {"sum": total, "mean": mean, "median": median, "trimmed_mean": trimmed_mean}
COMPARE = ("median", "trimmed_mean")  # those that need all pushes of a round at once


def make_rule(name: str, trim: int | None = None) -> Rule:
    """`make_rule("trimmed_mean", trim=2)`; ValueError for what there is not."""
    if name not in list(RULES):
        raise ValueError(f"reduction={name!r} is unknown: choose {', '.join(map(repr, RULES))}")
    if trim is None:
        return RULES[name]
    if name != "trimmed_mean" or type(trim) is not int or trim < 1:
        raise ValueError(f"trim={trim!r} with reduction={name!r}: how many 'trimmed_mean' leaves out at either end, from 1 up")
    return partial(trimmed_mean, trim=trim)


# ---- rows: of an embedding of millions a batch touches hundreds, and only those travel and change ---------------------------


def add_up(like: torch.Tensor, contributions: Sequence[Contribution]) -> Contribution:
    """The sum of contributions, in their order; rows that occur several times are summed and come out once.

    >>> rows, values = add_up(torch.zeros(9, 1), [(torch.tensor([7, 2, 7]), torch.tensor([[1.], [2.], [3.]]))])
    >>> rows.tolist(), values.tolist()
    ([2, 7], [[2.0], [4.0]])

    It is dense as soon as one of them is. Nothing that it is given is changed.
    """
    if len(contributions) == 1 and contributions[0][0] is None:
        return contributions[0]
    touched = [rows for rows, _ in contributions if rows is not None]
    if len(touched) < len(contributions):
        result = torch.zeros_like(like)
        for rows, values in contributions:
            add_to(result, rows, values)
        return None, result
    union, places = torch.unique(torch.cat(touched), return_inverse=True)
    values = torch.cat([values for _, values in contributions])
    result = values.new_zeros(len(union), *values.shape[1:])
    add_to(result, places, values)
    return union, result


def aligned(like: torch.Tensor, sums: Sequence[Contribution]) -> Contribution:
    """Each worker's sum beside the others', of the same rows: float[worker, row ...]."""
    touched = [rows for rows, _ in sums if rows is not None]
    union = torch.unique(torch.cat(touched)) if len(touched) == len(sums) else None
    shape = like.shape if union is None else (len(union), *like.shape[1:])
    values = like.new_zeros(len(sums), *shape)
    for mine, (rows, change) in zip(values, sums, strict=True):
        add_to(mine, rows if rows is None or union is None else torch.searchsorted(union, rows), change)
    return union, values


def add_to(value: torch.Tensor, rows: torch.Tensor | None, other: torch.Tensor) -> None:
    """`value[rows] += other`, counting every row as often as it occurs; of bools, `or`."""
    if rows is None:
        value.add_(other)
    else:
        value.index_add_(0, rows.to(value.device), other)
