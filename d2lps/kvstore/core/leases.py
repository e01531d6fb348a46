"""A step's batch in parts that workers lease one by one: each part counts once, whoever brings it.

Elsewhere a round sums what each worker has pushed, and a worker that is gone takes its share of the batch along. Here the shares
belong to the key: what a lost worker had leased is leased again, and a step's sum is the same, whoever has come or gone.
"""

from __future__ import annotations

from typing import Any

import torch


class Leases:
    """
    >>> leases = Leases(parts=2)
    >>> leases.take(worker=7), leases.take(worker=8), leases.take(worker=9)
    (0, 1, None)
    >>> leases.give_back(worker=7), leases.take(worker=9)
    (None, 0)
    >>> leases.bring(0, 1, torch.ones(1)), leases.end(), leases.bring(0, 0, torch.ones(1)), leases.end(), leases.step
    (None, None, None, {0: tensor([1.]), 1: tensor([1.])}, 1)

    A worker has at most one lease, and keeps it until it has brought that part, or is gone. `step`: how many have ended.
    """

    def __init__(self, parts: int, step: int = 0, held: dict[int, int] | None = None, came: Any = None) -> None:
        self.parts, self.step = parts, step
        self.held: dict[int, int] = held or {}  # by worker: the part that it works on
        self.came: dict[int, torch.Tensor] = came or {}  # of this step, by part

    def take(self, worker: int) -> int | None:
        """The part that this worker has leased, or the first that nobody has; None if there is none now."""
        if worker not in self.held:
            taken = self.came.keys() | set(self.held.values())
            free = next((part for part in range(self.parts) if part not in taken), None)
            if free is None:
                return None
            self.held[worker] = free
        return self.held[worker]

    def give_back(self, worker: int) -> None:
        """It is gone, or done with it."""
        self.held.pop(worker, None)

    def bring(self, step: int, part: int, value: torch.Tensor) -> None:
        """Take a part in, unless it is here, or of a step that is over."""
        if step == self.step and part not in self.came:
            self.came[part] = value
            self.held = {worker: mine for worker, mine in self.held.items() if mine != part}

    def end(self) -> dict[int, torch.Tensor] | None:
        """If all parts are here, the step is over: they, in order."""
        if len(self.came) < self.parts:
            return None
        complete, self.came, self.held, self.step = dict(sorted(self.came.items())), {}, {}, self.step + 1
        return complete

    def state(self) -> list[Any]:
        """What `Leases(*state)` is made of."""
        return [self.parts, self.step, dict(self.held), dict(self.came)]
