"""Who makes the others wait: a rank whose own computing is long, or a cable whose messages are.

In synchronous training all ranks' steps take equally long, since all wait for the slowest. So what is compared is never a whole
step: it is blocks of computing with the same block on the other ranks, and messages with their like. A rank that waits is not
slow, however long it waits.

The test needs no bell curve. Where nobody is slow, a rank is above the upper median of the others in at most half of the steps,
whatever the noise is like, if it does not last from one step to the next. A counter goes up by 1 when a rank is above it (and
above it by more than `tolerance`), and down by 2, though never below 0, when it is not. With g the golden ratio, g + g**-2 = 2:
so g**counter does not grow on average, and the chance that a count begun at any one step ever reaches `patience` is at most
g**-patience (Doob). Over T steps of p ranks that is at most p T g**-patience false alarms: for 1,000 steps, 8 ranks and a
patience of 40, one in 28,000 such trainings. A straggler is named after `patience` steps, or somewhat more. It is Page's
cumulative sum (Biometrika 41, 1954), of signs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d2lps.trace import Trace

GOLDEN = (1 + 5**0.5) / 2
Pair = tuple[int, int]  # source and destination of messages
Kind = Callable[[int, int], Any]


@dataclass(frozen=True)
class Straggler:
    """What is slow, by which factor, and since which step: of `ranks` one that computes, or those that a cable serves."""

    what: str
    ranks: tuple[int, ...]
    factor: float
    since: int

    def __str__(self) -> str:
        return f"{self.what} takes {self.factor:.1f} times as long as its like, since step {self.since}"


def false_alarms(columns: int, steps: int, patience: int = 40) -> float:
    """How many are to be expected at most: `false_alarms(8, 1000) < 4e-5`."""
    return columns * steps * GOLDEN**-patience


def others(seconds: np.ndarray) -> np.ndarray:
    """For each of the numbers the upper median of all others.

    >>> others(np.array([1.0, 2.0, 9.0]))
    array([9., 9., 2.])
    """
    middle = (len(seconds) - 1) // 2
    low, high = np.sort(seconds)[middle : middle + 2]
    return np.where(seconds <= low, high, low)


class Suspicion:
    """Counts against each column of a table that grows by rows: how often it was above the others lately.

    >>> suspicion = Suspicion(columns=3, patience=3)
    >>> [suspicion.look([1.0, 1.1, 2.2]) for step in range(4)]          # column 2 takes twice as long, since row 0
    [[], [], [(2, 2.0, 0)], []]

    tolerance: what counts as slow: more than 1 + tolerance times the others' median. patience: see above. A column is named
    once, and again if it has been well in between; its factor is the median of its last rows. Online, rows are the seconds that
    the ranks have computed in a step, gathered at its end (8 bytes a rank). Cost: a sort of the row.
    """

    def __init__(self, columns: int, tolerance: float = 0.1, patience: int = 40) -> None:
        if columns < 2 or patience < 1 or not 0 <= tolerance < np.inf:
            raise ValueError(f"{columns=} must be at least 2, {patience=} at least 1, {tolerance=} a number from 0 up")
        self.tolerance, self.patience, self.row = tolerance, patience, 0
        self.count, self.since = np.zeros(columns, dtype=int), np.zeros(columns, dtype=int)
        self.named = np.zeros(columns, dtype=bool)
        self.ratios: deque[np.ndarray] = deque(maxlen=4 * patience)

    def look(self, row: Sequence[float] | np.ndarray) -> list[tuple[int, float, int]]:
        """The columns that become suspect with this row: (column, times the others' median, since which row)."""
        seconds = np.asarray(row, dtype=float)
        if seconds.shape != self.count.shape or not np.all(seconds >= 0):
            raise ValueError(f"a row is {len(self.count)} times in seconds, not {row!r}")
        self.ratios.append(seconds / np.maximum(others(seconds), 1e-12))
        slow = self.ratios[-1] > 1 + self.tolerance
        self.since[slow & (self.count == 0)] = self.row
        self.count = np.maximum(self.count + np.where(slow, 1, -2), 0)
        new = (self.count >= self.patience) & ~self.named
        self.named, self.row = (self.named | new) & (self.count > 0), self.row + 1
        return [(column, self._factor(column), int(self.since[column])) for column in np.flatnonzero(new).tolist()]

    def _factor(self, column: int) -> float:
        return float(np.median([ratio[column] for ratio in self.ratios][self.since[column] - self.row :]))


def stragglers(trace: Trace, tolerance: float = 0.1, patience: int = 40, kind: Kind | None = None) -> list[Straggler]:
    """What a recorded run says: ranks whose blocks of `comm.compute` are slow, cables whose messages are.

    >>> print(*stragglers(d2lps.simulate(train, cluster, faults=[Slow("gpu2", 3)]).trace))              # doctest: +SKIP
    rank 2's "backward" takes 3.0 times as long as its like, since step 0

    Blocks of one label are compared across the ranks, the nth with the nth; messages of one step label, size and kind of route
    likewise. kind(src, dst): what two routes must have in common; by default, in a simulation, their links' bandwidths and
    latencies. Flows that share a link by design must be told apart by it. Messages of real processes are compared only if it is
    given: their times include that of waking who waits, which depends on how long it has waited; ask where they are large.
    Two ranks have no majority: the slower one is named, even if it is the other one that is uncommonly quick. Of the two or three
    ways round a ring of as many ranks a slow cable serves two, with which the others are compared: it is not named.
    Needs as many steps as its patience. Cost: some microseconds a block and message.
    """
    found, how = [], (tolerance, patience)
    for label, table in _blocks(trace):
        found += [Straggler(f"rank {rank}'s {label!r}", (rank,), factor, since) for rank, factor, since in _slow(table, *how)]
    slow: dict[Pair, tuple[float, int]] = {}
    if kind is None and trace.topology is None:
        return found
    for pairs, table in _messages(trace, kind or (lambda src, dst: [link[1:] for link in _links(trace, src, dst)])):
        slow |= {pairs[column]: (factor, since) for column, factor, since in _slow(table, *how)}
    return found + list(_cables(trace, slow))


def _slow(table: np.ndarray, tolerance: float, patience: int) -> list[tuple[int, float, int]]:
    if table.shape[1] < 2:
        return []
    suspicion = Suspicion(table.shape[1], tolerance, patience)
    return [told for row in table for told in suspicion.look(row)]


def _table(queues: Sequence[Sequence[float]]) -> np.ndarray:
    """[the nth of each, of whom]: as many rows as the shortest queue has."""
    return np.array(list(zip(*queues, strict=False)))


def _blocks(trace: Trace) -> Iterator[tuple[str, np.ndarray]]:
    """(label, seconds[which, rank]) of what all ranks have computed."""
    bars, queues = trace.bars()["computing"], defaultdict[str, dict[int, list[float]]](dict)
    for label, rank, seconds in zip(bars["label"], bars["rank"].tolist(), (bars["end"] - bars["start"]).tolist(), strict=True):
        queues[label].setdefault(rank, []).append(seconds)
    for label, of in queues.items():
        if len(of) == trace.ranks:
            yield label, _table([of[rank] for rank in range(trace.ranks)])


def _messages(trace: Trace, kind: Kind) -> Iterator[tuple[list[Pair], np.ndarray]]:
    """(pairs of ranks, seconds[which, pair]) of messages that should take equally long."""
    m, classes = trace.messages, defaultdict[Any, dict[Pair, list[float]]](dict)
    kinds = {pair: str(kind(*pair)) for pair in trace.bytes_by_link()}
    columns = (m[name].tolist() for name in ("step", "nbytes", "src", "dst"))
    for step, nbytes, src, dst, seconds in zip(*columns, (m["end"] - m["start"]).tolist(), strict=True):
        if seconds == seconds:  # it has arrived
            classes[step, nbytes, kinds[src, dst]].setdefault((src, dst), []).append(seconds)
    for of in classes.values():
        yield list(of), _table(list(of.values()))


def _links(trace: Trace, src: int, dst: int) -> list[tuple[str, Any]]:
    """The cables from rank to rank, with what is known of them; of real processes, one without a name."""
    if (topology := trace.topology) is None:
        return [(f"the way from rank {src} to rank {dst}", None)]
    ends = [topology.links[link] for link in topology.route(trace.nodes[src], trace.nodes[dst]).links]
    return [(f"the cable {' - '.join(sorted(map(str, link)))}", dict(topology.graph.edges[link])) for link in ends]


def _cables(trace: Trace, slow: dict[Pair, tuple[float, int]]) -> Iterator[Straggler]:
    """The cables that explain the slow pairs of ranks: every pair that has used such a cable is slow. The busiest comes first."""
    over = defaultdict[str, set[Pair]](set)
    for pair in trace.bytes_by_link():
        for name, _ in _links(trace, *pair):
            over[name].add(pair)
    left = set(slow)
    while left:
        found = {name: pairs & left for name, pairs in over.items() if pairs <= slow.keys()} or {"the network": left}
        name, pairs = max(found.items(), key=lambda item: len(item[1]))
        pairs = pairs or left
        factors, since = zip(*(slow[pair] for pair in pairs), strict=True)
        yield Straggler(name, tuple(sorted({rank for pair in pairs for rank in pair})), float(np.median(factors)), min(since))
        left -= pairs
