"""One key's place on a server: its value, its optimizer's state, and the pushes of rounds that are still open."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from d2lps.kvstore.optimizers import Moments, Optimizer
from d2lps.kvstore.sparse import Contribution, add_to, add_up, optimize


@dataclass
class Entry:
    """
    >>> entry = Entry(torch.zeros(2))
    >>> entry.push(0, 1, (None, torch.ones(2)))             # round 0, worker 1
    >>> entry.apply([(None, torch.ones(2))], workers=2)
    >>> entry.value, entry.version, entry.nbytes
    (tensor([1., 1.]), 1, 8)
    """

    value: torch.Tensor
    moments: Moments = field(default_factory=dict)  # the optimizer's
    version: int = 0  # how often the value has changed
    open: dict[int, dict[int, list[Contribution]]] = field(default_factory=dict)  # round -> worker -> its pushes, in order

    @property
    def nbytes(self) -> int:
        """Of the value and the optimizer's state."""
        return self.value.nbytes + sum(moment.nbytes for moment in self.moments.values())

    def push(self, round: int, worker: int, contribution: Contribution) -> None:
        """Put a push aside until its round ends."""
        self.open.setdefault(round, {}).setdefault(worker, []).append(contribution)

    def close(self, before: float, live: set[int], optimizer: Optimizer | None = None, mean: bool = True) -> None:
        """Apply the rounds before this clock, each as one sum, added up by rank and then by time: the same in every run."""
        for round in sorted(self.open):
            if round < before:
                pushes = self.open.pop(round)
                ordered = [contribution for worker in sorted(pushes) for contribution in pushes[worker]]
                self.apply(ordered, len(live | pushes.keys()), optimizer, mean)

    def apply(
        self, contributions: list[Contribution], workers: int, optimizer: Optimizer | None = None, mean: bool = True
    ) -> None:
        """Change the value by the sum of contributions, or let the optimizer do it; what it gets may be the mean over workers."""
        rows, total = add_up(self.value, contributions)
        if optimizer is None:
            add_to(self.value, rows, total)
        else:
            gradient = total / workers if mean else total
            optimize(optimizer, self.value, self.moments, (rows, gradient))
        self.version += 1

    def read(self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy, of the whole value or of some rows; the whole one in `out`, if that has as many bytes."""
        if rows is not None:
            return self.value[rows]
        if out is None or out.nbytes != self.value.nbytes:
            return self.value.clone()
        return out.flatten().view(self.value.dtype).view(self.value.shape).copy_(self.value)
