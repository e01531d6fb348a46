"""One key's place on a server: its value, its optimizer's state, and the pushes of rounds that are still open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping

import torch
from msgspec import Struct

from d2lps.kvstore.core.optimizers import Moments, Optimizer, optimize
from d2lps.kvstore.core.reductions import Contribution, Pushes, Rule, add_to, total

Rounds = dict[int, dict[int, list[Contribution]]]  # round -> worker -> its pushes, in order
Members = Callable[[int], set[int]]  # round -> who has taken part in it


class Store(MutableMapping[Hashable, torch.Tensor]):
    """Where tensors lie: in `Memory`, or in `Tiers`, which moves them to the disk and back."""

    budget: int | None = None  # bytes of the largest tensor that it takes

    def peek(self, key: Hashable) -> torch.Tensor:
        """The tensor, for somebody who only looks: nothing moves."""
        return self[key]


class Memory(dict[Hashable, torch.Tensor], Store):
    """All of it, always."""


class Offer(Struct):
    """A first value of a part, of which there may be several, and which life of which worker has brought it."""

    owner: tuple[int, int]
    value: torch.Tensor


class Entry:
    """
    >>> entry = Entry("w", torch.zeros(2))
    >>> entry.push(0, 1, (None, torch.ones(2)))             # round 0, worker 1
    >>> entry.apply({1: [(None, torch.ones(2))]}, workers=2)
    >>> entry.value, entry.version, entry.nbytes
    (tensor([1., 1.]), 1, 8)

    The tensors lie in `store`, which all entries of a server share. One that was changed is put there again, and what is asked
    often, the shape, is kept here.
    """

    def __init__(
        self,
        key: str,
        value: torch.Tensor,
        store: Store | None = None,
        moments: Moments | None = None,
        version: int = 0,
        owner: tuple[int, ...] = (),
        open: Rounds | None = None,
    ) -> None:
        self.key, self.store, self.owner = key, Memory() if store is None else store, owner  # owner: whose first value it was
        self.like = torch.empty_like(value, device="meta")  # its shape and dtype
        self.version = version  # how often the value has changed
        self.open: Rounds = {} if open is None else open
        self._pages: dict[str, int] = {}  # of the optimizer's tensors: their bytes
        self.store[self._page()] = value
        self.moments = moments or {}

    @property
    def value(self) -> torch.Tensor:
        return self.store[self._page()]

    @property
    def moments(self) -> Moments:
        """The optimizer's tensors."""
        return {name: self.store[self._page(name)] for name in self._pages}

    @moments.setter
    def moments(self, moments: Moments) -> None:
        for name in self._pages.keys() - moments.keys():
            del self.store[self._page(name)]
        self._pages = {name: moment.nbytes for name, moment in moments.items()}
        for name, moment in moments.items():
            self.store[self._page(name)] = moment

    def drop(self) -> None:
        """Let go of its tensors."""
        self.moments = {}
        del self.store[self._page()]

    def _page(self, name: str = "") -> tuple[str, str]:
        """Under which the value, or one of the optimizer's tensors, lies in the store."""
        return self.key, name

    def peek(self, name: str = "") -> torch.Tensor:
        """The value, or a tensor of the optimizer's, for somebody who only looks: nothing moves between memory and disk."""
        return self.store.peek(self._page(name))

    def peeked(self) -> tuple[torch.Tensor, Moments]:
        """All of them."""
        return self.peek(), {name: self.peek(name) for name in self._pages}

    @property
    def names(self) -> list[str]:
        """Of the optimizer's tensors."""
        return list(self._pages)

    @property
    def nbytes(self) -> int:
        """Of the value and the optimizer's state."""
        return self.like.nbytes + sum(self._pages.values())

    def push(self, round: int, worker: int, contribution: Contribution) -> None:
        """Put a push aside until its round ends."""
        self.open.setdefault(round, {}).setdefault(worker, []).append(contribution)

    def close(self, before: float, members: Members, optimizer: Optimizer | None = None, rule: Rule = total) -> None:
        """Apply the rounds before this clock, each as one change: of its members, and of who pushed and left before its end."""
        for round in sorted(self.open):
            if round < before:
                pushes = self.open.pop(round)
                self.apply(pushes, len(members(round) | pushes.keys()), optimizer, rule)

    def apply(self, pushes: Pushes, workers: int, optimizer: Optimizer | None = None, rule: Rule = total) -> None:
        """Change the value by what the rule makes of the pushes, or let the optimizer do it."""
        value = self.value
        if not value.is_floating_point():  # pushed before an optimizer was set; afterwards it is refused
            optimizer, rule = None, total
        rows, change = rule(value, pushes, workers)
        if optimizer is None:
            add_to(value, rows, change)
        else:
            moments = self.moments
            optimize(optimizer, value, moments, rows, change)
            self.moments = moments
        self.put(value)

    def put(self, value: torch.Tensor) -> None:
        """A new value, or the one that was changed."""
        self.store[self._page()] = value
        self.version += 1

    def read(self, rows: torch.Tensor | None = None, only_look: bool = False) -> torch.Tensor:
        """A copy of the whole value or of some rows."""
        value = self.peek() if only_look else self.value
        return value.clone() if rows is None else value[rows]
