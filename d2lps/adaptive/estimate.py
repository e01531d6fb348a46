"""What an all-reduce would take by each logical topology, from what was measured, and from nothing else.

A topology that was used has a line of its own, seconds = a + b n, in which crowded links are included: nobody has to be told
where they are. One that was never used gets the formula of d2lps.cost, with the best alpha and beta that the others have shown.
That is hopeful, since formulas know of no crowd; whoever believes it should try it on little first.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from d2lps import cost
from d2lps.trace import Trace

SAME = 0.25  # a measured time that differs by less from the last one of its kind is the same, but for noise
HOPE = 0.5  # what a time may have shrunk to by a change that was seen elsewhere
TICK = 1e-12  # less than any clock tells: ranks of one simulated node exchange messages in no time
OLD = 5  # times the patience: rows do not get older than that
NEAR = 4  # a size that differs by no larger factor is about the same
AlphaBeta = tuple[float, float]  # seconds, and seconds per byte
Key = tuple[str, int]  # a topology, and how many ranks


class Row(NamedTuple):
    """What was measured of a topology at a size, and in which step."""

    seconds: float
    step: int


class Estimate:
    """Lines through measured times; old ones count less, and those from before a change in the network not at all.

    >>> estimate = Estimate(patience=100)
    >>> for nbytes in (0, 1e6):                     # a ring of 4 with alpha = 10 us, beta = 1 ns
    ...     _ = estimate.learn("ring", 4, nbytes, cost.all_reduce("ring", nbytes, 4, 10e-6, 1e-9), step=1)
    >>> [round(1e6 * estimate.seconds(name, 4, 2e6)) for name in ("ring", "tree")]      # never tried: by the formula
    [3060, 8040]
    """

    def __init__(self, patience: float) -> None:
        self.patience, self.step = patience, 0
        self.rows: dict[Key, dict[float, Row]] = {}  # by bytes
        self.sure: set[Key] = set()  # measured since the last change that was seen
        self.hope: dict[Key, float] = {}  # of those not measured since: by how much they may be quicker now

    def learn(self, name: str, ranks: int, nbytes: float, seconds: float, step: int) -> float:
        """A measured time; by what factor it differs from what is known, 1 if it does not."""
        self.step, key, seconds = step, (name, ranks), max(seconds, TICK)
        rows = self.rows.setdefault(key, {})
        known = nbytes in rows or _tell(rows)
        factor = seconds / self.seconds(name, ranks, nbytes) if known else 1.0
        if abs(factor - 1) > (SAME if nbytes in rows else 2 * SAME):  # a line through other sizes is less exact
            rows = self.rows[key] = {size: row for size, row in rows.items() if row.step == step}
        else:
            seconds = (seconds + rows[nbytes].seconds) / 2 if nbytes in rows else seconds
            factor = 1.0
        rows[nbytes] = Row(seconds, step)
        self.sure.add(key)
        self.hope.pop(key, None)
        return factor

    def doubt(self, kept: str, ranks: int, factor: float) -> None:
        """The network has changed, `kept` takes `factor` times as long: what is known of the others is a memory now."""
        for key in [*self.rows]:
            if key != (kept, ranks):
                self.hope[key] = HOPE * min(1.0, factor)
        self.sure &= {(kept, ranks)}

    def seconds(self, name: str, ranks: int, nbytes: float) -> float:
        """As measured; by the line, where another size was; by the formula, where nothing was."""
        rows = self.rows.get((name, ranks), {})
        if nbytes in rows:
            return rows[nbytes].seconds
        a, b = self._line(name, ranks)
        return a + b * nbytes

    def hopeful(self, name: str, ranks: int, nbytes: float) -> float:
        """The least that it may take by now: what was measured long ago, at about this size, says less and less."""
        age = self.step - self._nearest(name, ranks, nbytes)[1]
        hope = 1.0 if self.knows(name, ranks, nbytes) else self.hope.get((name, ranks), HOPE)
        return self.seconds(name, ranks, nbytes) * hope * math.exp(-age / self.patience)

    def knows(self, name: str, ranks: int, nbytes: float) -> bool:
        """Whether it was measured at about this size since the last change that was seen. Else there are only hopes."""
        return (name, ranks) in self.sure and self._nearest(name, ranks, nbytes)[0] <= NEAR

    def _nearest(self, name: str, ranks: int, nbytes: float) -> tuple[float, int]:
        """Of the sizes that were measured the nearest one: by what factor it is another, and the step."""
        rows = self.rows.get((name, ranks), {}).items()
        return min(((max(size, nbytes, 1) / max(min(size, nbytes), 1), row.step) for size, row in rows), default=(math.inf, 0))

    def _line(self, name: str, ranks: int) -> AlphaBeta:
        rows = self.rows.get((name, ranks), {})
        if _tell(rows):
            return self._fitted(rows)
        a, b = self._formula(name, ranks)
        for nbytes, row in rows.items():  # with one size alone, which share of it is latency is the formula's guess
            share = row.seconds / (a + b * nbytes)
            a, b = a * share, b * share
        return a, b

    def _fitted(self, rows: Mapping[float, Row]) -> AlphaBeta:
        """Relative least squares, of which old rows count less."""
        sizes, seconds, steps = np.array([(size, *row) for size, row in rows.items()]).T
        fresh = np.exp(np.maximum(steps - self.step, -OLD * self.patience) / self.patience)
        b, a = np.polyfit(sizes, seconds, 1, w=fresh / seconds)
        return max(float(a), 0.0), max(float(b), 0.0)

    def _formula(self, name: str, ranks: int) -> AlphaBeta:
        """With the least alpha and beta that a measured topology shows."""
        lines = [(key, self._fitted(rows)) for key, rows in self.rows.items() if _tell(rows)]
        alpha = min((a / parts(*key)[0] for key, (a, _) in lines if a), default=cost.ALPHA)
        beta = min((b / parts(*key)[1] for key, (_, b) in lines if b), default=cost.BETA)
        steps, tensors = parts(name, ranks)
        return steps * alpha, tensors * beta


def _tell(rows: Mapping[float, Row]) -> bool:
    """Whether they tell latency from bandwidth."""
    return len(rows) > 1 and max(rows) > 2 * min(rows)


def parts(name: str, ranks: int) -> tuple[float, float]:
    """What alpha and n beta are multiplied by: `parts("ring", 4) == (6, 1.5)`."""
    return cost.all_reduce(name, 0, ranks, 1, 0), cost.all_reduce(name, 1, ranks, 0, 1)


def by_link(trace: Trace, kind: Callable[[int, int], str]) -> dict[str, AlphaBeta]:
    """(alpha, beta) of each kind of link, by least squares over the recorded messages.

    >>> by_link(run.trace, lambda src, dst: "same" if src // 8 == dst // 8 else "other")        # doctest: +SKIP
    {'same': (1.0e-06, 2.2e-12), 'other': (1.0e-05, 8.0e-11)}

    kind: of the link from a rank to another. Messages that share a link are slower than it is: a ring's do not. ValueError for a
    kind of which all messages are equally long: they do not tell alpha from beta.
    """
    m = trace.messages
    kinds = np.array([kind(int(src), int(dst)) for src, dst in zip(m["src"], m["dst"], strict=True)])
    found = {}
    for name in sorted(set(kinds)):
        sizes, seconds = m["nbytes"][kinds == name], (m["end"] - m["start"])[kinds == name]
        if len(set(sizes)) < 2:
            raise ValueError(f"all messages of kind {name!r} have {sizes[0]} bytes: alpha and beta can't be told apart")
        found[name] = cost.fit(sizes, seconds)
    return found
