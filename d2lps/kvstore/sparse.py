"""Rows: of an embedding of millions, a batch touches hundreds, and only those are pushed, pulled and changed.

A contribution is a pair (rows, values): values[i] belongs to row rows[i]; rows=None means the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d2lps.kvstore.optimizers import Moments, Optimizer

Contribution = tuple[torch.Tensor | None, torch.Tensor]


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
        total = torch.zeros_like(like)
        for rows, values in contributions:
            add_to(total, rows, values)
        return None, total
    union, places = torch.unique(torch.cat(touched), return_inverse=True)
    values = torch.cat([values for _, values in contributions])
    total = values.new_zeros(len(union), *values.shape[1:])
    add_to(total, places, values)
    return union, total


def add_to(value: torch.Tensor, rows: torch.Tensor | None, other: torch.Tensor) -> None:
    """`value[rows] += other`, counting every row as often as it occurs."""
    if rows is None:
        value.add_(other)
    else:
        value.index_add_(0, rows.to(value.device), other)


def optimize(optimizer: Optimizer, value: torch.Tensor, state: Moments, gradient: Contribution) -> None:
    """One step, on the touched rows of the value and of its state alone: the others don't even decay.

    That is what torch.optim.SparseAdam does too; rows must be distinct. Cost: the bytes of the rows, not of the tensor.
    """
    rows, change = gradient
    if rows is None:
        return optimizer.step(value, change, state)
    whole = {"": value} | {name: moment for name, moment in state.items() if moment.shape == value.shape and value.dim()}
    parts = {name: tensor[rows] for name, tensor in whole.items()}
    part = parts.pop("")
    moments = state | parts
    optimizer.step(part, change, moments)
    value[rows] = part
    for name in parts:
        whole[name][rows] = moments[name]
    return None
