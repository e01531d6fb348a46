"""How far every worker is, and so who may read: a worker's clock counts the iterations that it has ended.

| rule | a read waits until the slowest worker is at most | pushes take effect | source |
|---|---|---|---|
| bsp | 0 clocks behind | at the end of their round, summed in rank order | Valiant 1990 |
| ssp | `staleness` clocks behind | as they arrive | Ho et al., NIPS 2013 |
| asp | any number of clocks behind: it never waits | as they arrive | Dean et al., NIPS 2012 |
| adaptive | a bound between 0 and `staleness` behind, which moves | as they arrive | after Zhao et al., ICDCS 2019 |
"""

from __future__ import annotations

import math

from msgspec import Struct, field

from d2lps.arguments import named, whole

ALL = None  # stands for all keys of which no worker has ended its iteration ahead of its clock
Moved = set[str | None]  # keys whose slowest worker has moved on, ALL among them if that of all other keys has


class Span(Struct, frozen=True):
    """The rounds of a worker that has left: from `first` up to before `end`, and of the keys in `ahead` the round `end`, too."""

    worker: int
    first: int
    end: int
    ahead: tuple[str, ...] = ()


class Clocks(Struct):
    """The clock table.

    >>> clocks = Clocks({0: 0, 1: 0})
    >>> clocks.end(0, "w"), clocks.position(0), clocks.position(0, "w")     # worker 0 has ended its iteration of key "w" alone
    (set(), 0, 1)
    >>> clocks.tick(1, 1), clocks.slowest(), clocks.slowest("w")
    ({'w'}, 0, 1)

    For a single key, a worker can be at most one iteration ahead of its clock: so a key needs no clocks of its own.
    Cost: with 512 workers the slowest is asked for often, so it is kept up to date; a `tick` looks once at each key in `ahead`.
    """

    at: dict[int, int]  # the clock of every live worker
    ahead: dict[str, set[int]] = field(default_factory=dict)  # by key: who has ended the present iteration of this key alone
    over: set[str] = field(default_factory=set)  # the keys of which all of the slowest workers have
    began: dict[int, int] = field(default_factory=dict)  # of those who came later: their first round
    left: list[Span] = field(default_factory=list)  # of those who left ahead of others
    reached: int = 0  # the clock of the slowest, or the one that it had when the last one left
    last: int = 0  # how many workers are at that clock

    def __post_init__(self) -> None:
        self._find_slowest()

    def position(self, worker: int, key: str | None = ALL) -> int:
        """The worker's clock where this key is concerned."""
        return self.at[worker] + (worker in self.ahead.get(key or "", ()))

    def slowest(self, key: str | None = ALL) -> float:
        """Infinite if nobody is left: then there is nobody to wait for."""
        return self.reached + (key in self.over) if self.at else math.inf

    def spread(self) -> int:
        """How many clocks lie between the fastest and the slowest."""
        return max(self.at.values(), default=0) - min(self.at.values(), default=0)

    def members(self, round: int, key: str) -> set[int]:
        """Who has taken part in a round, with or without a push: it depends on what they did, not on who was heard first."""
        gone = {span.worker for span in self.left if span.first <= round < span.end + (key in span.ahead)}
        return gone | {worker for worker in self.at if self.began.get(worker, 0) <= round}

    # ---- each of these returns the keys whose slowest worker has moved on ---------------------------------------------------

    def tick(self, worker: int, clock: int) -> Moved:
        """A worker has ended an iteration. It never goes back."""
        if clock <= (before := self.at[worker]):
            return set()
        self._forget_ahead(worker)
        self.at[worker] = clock
        return self._left_behind(before)

    def end(self, worker: int, key: str) -> Moved:
        """A worker has ended its present iteration for this key alone."""
        self.ahead.setdefault(key, set()).add(worker)
        if key in self.over or not self._is_over(key):
            return set()
        self.over.add(key)
        return {key}

    def leave(self, worker: int) -> Moved:
        """Nobody waits for this worker any more."""
        if worker not in self.at:
            return set()
        ahead, end = self._forget_ahead(worker), self.at.pop(worker)
        spans = [*self.left, Span(worker, self.began.pop(worker, 0), end, ahead)]
        self.left = [span for span in spans if span.end + bool(span.ahead) > self.reached]  # all rounds of the others are over
        return self._left_behind(end)

    def join(self, worker: int) -> None:
        """A newcomer begins with the first iteration of which nothing is over, for no key."""
        if worker in self.at:
            return
        if not self.at:
            self.left = []
        begin = self.reached + bool(self.over)
        self.at[worker] = self.began[worker] = begin
        self.last += begin == self.reached

    # ---- how the slowest is kept up to date ---------------------------------------------------------------------------------

    def _find_slowest(self) -> None:
        self.reached = min(self.at.values(), default=self.reached)
        self.last = sum(clock == self.reached for clock in self.at.values())

    def _forget_ahead(self, worker: int) -> tuple[str, ...]:
        """The worker goes away from where it is; the keys of which it was ahead there."""
        keys = tuple(key for key, done in self.ahead.items() if worker in done)
        for key in keys:
            self.ahead[key].remove(worker)
            if not self.ahead[key]:
                del self.ahead[key]
        return keys

    def _left_behind(self, place: int) -> Moved:
        """There is one worker less at this clock."""
        if place > self.reached:
            return set()
        self.last -= 1
        if on := not self.last:
            self._find_slowest()
            self.over = set()
        came = {key for key in self.ahead if key not in self.over and self._is_over(key)}
        self.over |= came
        return {*came, ALL} if on else {*came}

    def _is_over(self, key: str) -> bool:
        """Whether all of the slowest workers have ended their present iteration for this key."""
        done = self.ahead[key]
        return len(done) >= self.last and all(worker in done for worker, at in self.at.items() if at == self.reached)


class Consistency(Struct):
    """How far behind a reader the slowest may be. rounds: whether pushes wait for the end of theirs. most: of one that adapts.

    A worker that has read ends one iteration more: so none is ever more than staleness + 1 ended iterations ahead of the slowest.
    An adaptive bound changes each time that the slowest clock moves: if a read had to wait since the last time, it grows by one,
    up to `most`; if none had to, and nobody is that far ahead, it shrinks by one, down to 0. Each server goes by what it sees.

    >>> rule = make_consistency("adaptive", 2)
    >>> rule.waited = True
    >>> rule.round_ended(spread=1), rule.staleness
    (None, 1)
    >>> rule.round_ended(spread=1), rule.staleness      # just enough
    (None, 1)
    >>> rule.round_ended(spread=0), rule.staleness      # more than enough
    (None, 0)
    """

    staleness: float
    rounds: bool = False
    most: float | None = None
    waited: bool = False  # whether a read had to wait since the slowest clock moved

    def may_read(self, position: float, slowest: float) -> bool:
        """`make_consistency("ssp", 2).may_read(position=5, slowest=3)`"""
        return slowest >= position - self.staleness

    def round_ended(self, spread: int) -> None:
        """The slowest clock has moved, and the fastest is `spread` ahead of it."""
        if self.most is not None and self.waited:
            self.staleness = min(self.staleness + 1, self.most)
        elif self.most is not None and spread < self.staleness:
            self.staleness -= 1
        self.waited = False


def make_consistency(name: str, staleness: int = 0) -> Consistency:
    """`make_consistency("ssp", 3)`: by name; with "adaptive", `staleness` is the most that it may become."""
    whole("staleness", staleness, least=0)
    rules = {
        "bsp": Consistency(0, rounds=True),
        "ssp": Consistency(staleness),
        "asp": Consistency(math.inf),
        "adaptive": Consistency(0, most=staleness),
    }
    if staleness and name in ("bsp", "asp"):
        raise ValueError(f"staleness={staleness}, but {name} knows no such bound: choose 'ssp' or 'adaptive'")
    return named("consistency", name, rules)
