"""How far apart may workers drift? Bulk synchronous, stale synchronous, asynchronous, and one that adapts.

A worker's clock counts the iterations that it has ended. It may read when the slowest live worker is at most `staleness`
clocks behind it.

| name | staleness | pushes take effect | source |
|---|---|---|---|
| bsp | 0 | at the end of their round, summed in rank order | Valiant 1990 |
| ssp | s | as they arrive | Ho et al., NIPS 2013 |
| asp | no bound | as they arrive | Dean et al., NIPS 2012 |
| adaptive | moves between 0 and s | as they arrive | after Zhao et al., ICDCS 2019 |
"""

from __future__ import annotations

import math

from d2lps.cost.numbers import whole


class Consistency:
    """A bound on staleness that stays as it is: bsp, ssp and asp."""

    def __init__(self, staleness: float, rounds: bool = False) -> None:
        self.staleness = staleness
        self.rounds = rounds  # whether pushes wait for the end of their round
        self.waited = False  # whether a read had to wait since the slowest clock moved

    def may_read(self, position: float, slowest: float) -> bool:
        """`Consistency(2).may_read(position=5, slowest=3)`"""
        return slowest >= position - self.staleness

    def round_ended(self, spread: int) -> bool:
        """The slowest clock has moved, the fastest is `spread` ahead; whether the bound has thereby changed."""
        self.waited = False
        return False


class Adaptive(Consistency):
    """Each time that the slowest clock moves: if a read had to wait since the last time, staleness grows by one, up to `most`;
    if none had to, and nobody is that far ahead, it shrinks by one, down to 0. Each server goes by what it sees itself.

    >>> rule = Adaptive(most=2)
    >>> rule.waited = True
    >>> rule.round_ended(spread=1), rule.staleness
    (True, 1)
    >>> rule.round_ended(spread=1), rule.staleness      # just enough
    (False, 1)
    >>> rule.round_ended(spread=0), rule.staleness      # more than enough
    (True, 0)
    """

    def __init__(self, most: float) -> None:
        super().__init__(staleness=0)
        self.most = most

    def round_ended(self, spread: int) -> bool:
        before = self.staleness
        if self.waited:
            self.staleness = min(self.staleness + 1, self.most)
        elif spread < self.staleness:
            self.staleness -= 1
        self.waited = False
        return self.staleness != before


def make_consistency(name: str, staleness: int = 0) -> Consistency:
    """`make_consistency("ssp", 3)`: by name; with "adaptive", `staleness` is the most that it may become."""
    whole("staleness", staleness, least=0)
    if name not in ("bsp", "ssp", "asp", "adaptive"):
        raise ValueError(f"consistency={name!r} is unknown: choose 'bsp', 'ssp', 'asp' or 'adaptive'")
    if staleness and name in ("bsp", "asp"):
        raise ValueError(f"staleness={staleness}, but {name} knows no such bound: choose 'ssp' or 'adaptive'")
    if name == "adaptive":
        return Adaptive(staleness)
    return Consistency({"bsp": 0, "ssp": staleness, "asp": math.inf}[name], rounds=name == "bsp")
