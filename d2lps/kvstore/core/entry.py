"""One key's place on a server: its value, its optimizer's state, and the pushes of rounds that are still open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, MutableMapping, Sequence

import torch

from d2lps.kvstore.core.optimizers import Moments, Optimizer

Contribution = tuple[torch.Tensor | None, torch.Tensor]  # values[i] belongs to row rows[i]; rows=None means the whole tensor
Rounds = dict[int, dict[int, list[Contribution]]]  # round -> worker -> its pushes, in order


class Store(MutableMapping[Hashable, torch.Tensor]):
    """Where tensors lie: in `Memory`, or in `Tiers`, which moves them to the disk and back."""

    budget: int | None = None  # bytes of the largest tensor that it takes

    def peek(self, key: Hashable) -> torch.Tensor:
        """The tensor, for somebody who only looks: nothing moves."""
        return self[key]


class Memory(dict[Hashable, torch.Tensor], Store):
    """All of it, always."""


class Entry:
    """
    >>> entry = Entry("w", torch.zeros(2))
    >>> entry.push(0, 1, (None, torch.ones(2)))             # round 0, worker 1
    >>> entry.apply([(None, torch.ones(2))], workers=2)
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
        self._lent: Callable[[], torch.Tensor | None] = lambda: None  # the value as readers have it, while they do
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

    def _page(self, name: str = "") -> tuple[str, str]:
        """Under which the value, or one of the optimizer's tensors, lies in the store."""
        return self.key, name

    def peeked(self) -> tuple[torch.Tensor, Moments]:
        """Value and moments, for somebody who only looks: nothing moves between memory and disk."""
        return self.store.peek(self._page()), {name: self.store.peek(self._page(name)) for name in self._pages}

    @property
    def nbytes(self) -> int:
        """Of the value and the optimizer's state."""
        return self.like.nbytes + sum(self._pages.values())

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
        value, lent = self.value, self._lent()
        if lent is not None and lent.data_ptr() == value.data_ptr():
            value = value.clone()
        rows, total = add_up(value, contributions)
        if optimizer is None:
            add_to(value, rows, total)
        else:
            moments, gradient = self.moments, total / workers if mean else total
            optimize(optimizer, value, moments, (rows, gradient))
            self.moments = moments
        self.store[self._page()] = value
        self.version += 1

    def read(self, rows: torch.Tensor | None = None, only_look: bool = False, lend: bool = False) -> torch.Tensor:
        """A copy of the whole value or of some rows. lend: the value itself, which is not changed while somebody has it."""
        value = self.store.peek(self._page()) if only_look else self.value
        if rows is not None:
            return value[rows]
        if not lend:
            return value.clone()
        lent = self._lent()
        if lent is None or lent.data_ptr() != value.data_ptr():
            self._lent = weakref.ref(lent := value.detach())
        return lent


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
