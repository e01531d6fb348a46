"""A trace once more, event by event, in an order in which every cause comes before its effect.

Two things come out of it that clocks cannot give, because they are the same in every run:

- rounds. A rank's round is how many messages it has had to wait for, one after another. A message belongs to the round
  after the later of its two ends (Lamport 1978 counts events this way). The number of rounds is what latency multiplies.
- origins. Which ranks' data a part of memory holds: a receive brings the sender's, a combine adds up both. A chunk that
  an algorithm adds twice, or not at all, is seen here, and so in every picture.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from d2lps.trace.recorder import ACTIONS
from d2lps.trace.tables import Columns, Tables

_TOGETHER = (ACTIONS.index("barrier"), ACTIONS.index("native"))  # waits of all ranks at once
_JOIN = ACTIONS.index("join")


class Part(NamedTuple):
    """A run of bytes in a buffer (an index into `trace.buffers`)."""

    buffer: int
    offset: int
    length: int


@dataclass(frozen=True)
class Event:
    """`kind`: "send" as a message leaves, "recv" as it has arrived, "copy", "combine", or "meet" (a barrier).

    `index` is the row in the trace's table of messages, locals or waits; `source` is None for a barrier.
    """

    kind: str
    rank: int
    round: int
    index: int
    into: Part | None = None
    source: Part | None = None


# (seq, kind, point, row): a thread posts at a point ("post"), or goes on when all have posted there ("sent", "recv", "meet",
# "after"), or adds up and copies ("local"). A point is a message, a meeting, or the begin or end of a thread. The row of the
# message, meeting or local; -1 where there is none.
Action = tuple[float, str, Hashable, int]


class Replay:
    """
    rounds: how many; round_of: the round of each message, 1 for the first; events: all, in a causal order.
    """

    def __init__(self, trace: Tables) -> None:
        self.trace = trace
        self._missing = Counter[Hashable]()  # how many have still to post at a point
        self._latest = Counter[Hashable]()  # of the clocks of those who have; for a message, its round
        self._buffered: set[Hashable] = set()  # messages whose send was complete before their receive was posted
        self.events = list(self._run())
        self.round_of = np.array([self._latest[row] for row in range(len(trace))], dtype=np.int64)
        self.rounds = int(self.round_of.max(initial=0))

    def _lines(self) -> Iterator[tuple[int, Action]]:
        """(thread, line): messages, what was combined or copied, meetings, and threads that begin and end."""
        m, local, waits, threads = self.trace.messages, self.trace.locals, self.trace.waits, self.trace.threads
        for end, done in (("src", "sent"), ("dst", "recv")):
            for row, thread, seq, done_seq in _rows(m, f"{end}_thread", f"{end}_seq", f"{end}_done_seq"):
                yield thread, (seq, "post", row, row)
                if done_seq >= 0:
                    yield thread, (done_seq, done, row, row)
        for row, thread, seq in _rows(local, "thread", "seq"):
            yield thread, (seq, "local", None, row)
        meetings = Counter[tuple[int, int]]()  # of a thread in a group
        number = {(log.rank, log.thread): index for index, log in enumerate(threads)}
        for row, thread, seq, action, group, tag in _rows(waits, "thread", "seq", "action", "group", "tag"):
            if action in _TOGETHER:
                meetings[group, thread] += 1
                point = "meeting", group, meetings[group, thread]
                yield thread, (seq, "post", point, -1)
                yield thread, (seq, "meet", point, row)
            elif action == _JOIN:
                yield thread, (seq, "after", ("end", number[threads[thread].rank, tag]), -1)
        for child, log in enumerate(threads):
            if log.parent >= 0:
                yield number[log.rank, log.parent], (log.begins, "post", ("begin", child), -1)
                yield child, (0, "after", ("begin", child), -1)
                yield child, (inf, "post", ("end", child), -1)

    def _run(self) -> Iterator[Event]:
        """Let every thread go on until it needs something that has not happened yet; repeat."""
        programs: list[list[Action]] = [[] for _ in self.trace.threads]
        for thread, line in self._lines():
            programs[thread].append(line)
            _, kind, point, _ = line
            self._missing[point] += kind == "post"
        threads = [self._follow(thread, program) for thread, program in enumerate(programs)]
        self._at: list[Action | None] = [None] * len(threads)  # the line that each thread has come to
        while True:
            before = list(self._at)
            for events in threads:
                yield from takewhile(lambda event: event is not None, events)
            if self._at == before:
                released = self._release()
                if not released:
                    return
                yield from released

    def _release(self) -> list[Event]:
        """All ranks wait, as they did not in the run: sends that stand in the way were buffered, the smallest at least."""
        nbytes = self.trace.messages["nbytes"]
        sends = [row for _, kind, _, row in filter(None, self._at) if kind == "sent"]
        rows = [row for row in sends if self._missing[row] and row not in self._buffered]
        rows = [row for row in rows if nbytes[row] == nbytes[rows].min()]
        self._buffered.update(rows)
        return [self._moved("send", row) for row in rows]

    def _follow(self, thread: int, program: list[Action]) -> Iterator[Event | None]:
        """What happens in a thread, event by event; None as long as it needs something that has not happened yet."""
        rank, clock = self.trace.threads[thread].rank, 0
        for line in sorted(program, key=itemgetter(0)):
            _, kind, point, row = self._at[thread] = line
            if kind == "local":
                copies = self.trace.ops[self.trace.locals["op"][row]] == "COPY"
                yield Event("copy" if copies else "combine", rank, clock, row, *_parts(self.trace.locals, row, "", "from_"))
            elif kind == "post":
                self._missing[point] -= 1
                if point not in self._buffered:
                    message = row >= 0  # it belongs to the round after the later of its ends, and leaves with the second
                    self._latest[point] = max(self._latest[point], clock + message)
                    if message and not self._missing[point]:
                        yield self._moved("send", row)
            else:
                while self._missing[point] and point not in self._buffered:
                    yield None
                if kind != "sent" or point not in self._buffered:  # else the sender did not wait
                    clock = max(clock, self._latest[point])
                if kind == "recv":
                    yield self._moved("recv", row)
                elif kind == "meet":
                    yield Event("meet", rank, clock, row)

    def _moved(self, kind: str, row: int) -> Event:
        """A message leaves or has arrived."""
        m = self.trace.messages
        rank = int(m["src" if kind == "send" else "dst"][row])
        return Event(kind, rank, self._latest[row], row, *_parts(m, row, "dst_", "src_"))


def _rows(table: Columns, *names: str) -> Iterator[tuple[int, ...]]:
    """Of each row, its number and the numbers in these columns."""
    columns = [table[name].tolist() for name in names]
    return zip(range(len(columns[0])), *columns, strict=True)


def _parts(table: Columns, row: int, *sides: str) -> Iterator[Part]:
    for side in sides:
        yield Part(*(int(table[f"{side}{name}"][row]) for name in ("buffer", "offset", "length")))
