"""How far everybody is. A worker's clock counts the iterations that it has ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

Span = tuple[int, int, int]  # a worker, its first round, and the one after its last
ALL = None  # stands for all keys that have no front of their own


class Front:
    """Who has come how far, and how far the slowest: kept up to date, for with 512 workers a minimum is asked for often.

    >>> front = Front({0: 0, 1: 0})
    >>> front.move(0, 2), front.slowest
    (False, 0)
    >>> front.move(1, 1), front.slowest
    (True, 1)
    >>> front.remove(0), front.members(1), front.members(2)     # worker 0 had ended rounds 0 and 1 before it left
    (False, {0, 1}, {1})
    """

    def __init__(
        self, at: Mapping[int, int], reached: int = 0, began: Mapping[int, int] | None = None, left: Iterable[Span] = ()
    ) -> None:
        self.at = dict(at)
        self.began = dict(began or {})  # of those who came later: their first round
        self.left = list(left)  # of those who left when they were ahead of others
        self.reached = min(self.at.values(), default=reached)  # where the slowest is, or was when the last one left
        self._count = Counter(self.at.values())

    @property
    def slowest(self) -> float:
        """Infinite if nobody is left: then there is nobody to wait for."""
        return self.reached if self.at else math.inf

    def move(self, worker: int, to: int) -> bool:
        """One goes on, never back; whether the slowest has thereby moved."""
        before = self.slowest
        here = self.at[worker]
        if to > here:
            self.at[worker] = to
            self._count[to] += 1
            self._gone(here)
        return self.slowest != before

    def add(self, worker: int, at: int) -> None:
        """A newcomer begins at a place no earlier than the slowest one's."""
        if worker not in self.at:
            if not self.at:
                self.reached, self.left = at, []
            self.at[worker] = self.began[worker] = at
            self._count[at] += 1

    def remove(self, worker: int) -> bool:
        """Nobody waits for this one any more; whether the slowest has thereby moved."""
        before = self.slowest
        if worker in self.at:
            span = worker, self.began.pop(worker, 0), self.at.pop(worker)
            self.left = [found for found in (*self.left, span) if found[2] > self.reached]  # the rounds before that are over
            self._gone(span[2])
        return self.slowest != before

    def members(self, round: int) -> set[int]:
        """Who has taken part in a round, with or without a push: it depends on what they did, not on who was heard first."""
        here = {worker for worker in self.at if self.began.get(worker, 0) <= round}
        return here.union(worker for worker, first, end in self.left if first <= round < end)

    def past(self) -> tuple[int, dict[int, int], list[Span]]:
        """What a front is made of, beside `at`."""
        return self.reached, dict(self.began), list(self.left)

    def _gone(self, place: int) -> None:
        self._count[place] -= 1
        if not self._count[place]:
            del self._count[place]
            self.reached = min(self._count, default=self.reached)


class Clocks:
    """A front for all, and one of its own for each key of which a worker can be done before its iteration is.

    >>> clocks = Clocks({0: 0, 1: 0})
    >>> clocks.done("w", 0), clocks.position(0), clocks.position(0, "w")
    (set(), 0, 1)
    >>> clocks.tick(1, 1), clocks.slowest(), clocks.slowest("w")
    ({'w'}, 0, 1)
    """

    def __init__(self, at: Iterable[int] | Mapping[int, int]) -> None:
        self.all = Front(at if isinstance(at, Mapping) else dict.fromkeys(at, 0))
        self.keys: dict[Hashable, Front] = {}

    @property
    def at(self) -> dict[int, int]:
        """The clock of every live worker."""
        return self.all.at

    def front(self, key: Hashable = ALL) -> Front:
        return self.keys.get(key, self.all)

    def position(self, worker: int, key: Hashable = ALL) -> int:
        """The worker's clock where this key is concerned."""
        return self.front(key).at[worker]

    def slowest(self, key: Hashable = ALL) -> float:
        return self.front(key).slowest

    def spread(self) -> int:
        """How many clocks lie between the fastest and the slowest."""
        return max(self.at.values(), default=0) - min(self.at.values(), default=0)

    # Each of these returns the keys whose slowest worker has moved on; ALL stands for all that have no front of their own.

    def tick(self, worker: int, clock: int) -> set[Hashable]:
        """A worker has ended an iteration."""
        return {key for key, front in self._fronts() if front.move(worker, clock)}

    def done(self, key: Hashable, worker: int) -> set[Hashable]:
        """A worker has ended its present iteration for this key alone."""
        front = self.keys.setdefault(key, Front(self.at, *self.all.past()))
        return {key} if front.move(worker, self.at[worker] + 1) else set()

    def leave(self, worker: int) -> set[Hashable]:
        return {key for key, front in self._fronts() if front.remove(worker)}

    def join(self, worker: int) -> None:
        """A newcomer begins with the first iteration of which nothing is over, for no key."""
        begin = max(front.reached for _, front in self._fronts())
        for _, front in self._fronts():
            front.add(worker, begin)

    def _fronts(self) -> list[tuple[Hashable, Front]]:
        return [(ALL, self.all), *self.keys.items()]
