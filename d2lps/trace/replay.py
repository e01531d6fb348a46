"""A trace once more, event by event, in an order in which every cause comes before its effect.

Two things come out of it that clocks cannot give, because they are the same in every run:

- rounds. A rank's round is how many messages it has had to wait for, one after another. A message belongs to the round
  after the later of its two ends (Lamport 1978 counts events this way). The number of rounds is what latency multiplies.
- origins. Which ranks' data a part of memory holds: a receive brings the sender's, a combine adds up both. A chunk that
  an algorithm adds twice, or not at all, is seen here, and so in every picture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from d2lps.trace.trace import Trace

_TOGETHER = (2, 3)  # waits of all ranks at once: "barrier" and "native", see recorder.ACTIONS


@dataclass(frozen=True)
class Part:
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


class Replay:
    """
    rounds: how many; round_of: the round of each message, 1 for the first; events: all, in a causal order.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.round_of = np.zeros(len(trace), dtype=np.int64)
        self.events = list(self._run())
        self.rounds = int(self.round_of.max(initial=0))

    def _programs(self) -> list[list[tuple[int, str, int]]]:
        """For each rank its events (seq, kind, row) in the order of its program."""
        trace, programs = self.trace, [[] for _ in range(self.trace.ranks)]  # type: ignore[var-annotated]
        m = trace.messages
        for kind, rank, seq in (
            ("post", m["src"], m["src_seq"]),
            ("sent", m["src"], m["src_done_seq"]),
            ("post", m["dst"], m["dst_seq"]),
            ("recv", m["dst"], m["dst_done_seq"]),
        ):
            for row, (r, s) in enumerate(zip(rank.tolist(), seq.tolist(), strict=True)):
                if s >= 0:
                    programs[r].append((s, kind, row))
        for row, (r, s) in enumerate(zip(trace.locals["rank"].tolist(), trace.locals["seq"].tolist(), strict=True)):
            programs[r].append((s, "local", row))
        for row in np.flatnonzero(np.isin(trace.waits["action"], _TOGETHER)).tolist():
            programs[int(trace.waits["rank"][row])].append((int(trace.waits["seq"][row]), "meet", row))
        return [sorted(program) for program in programs]

    def _run(self) -> Iterator[Event]:
        """Let every rank go on until it needs something that has not happened yet; repeat."""
        programs = self._programs()
        place = [0] * len(programs)
        self._clock = [0] * len(programs)
        self._posts: dict[int, int] = defaultdict(int)  # message -> how many of its two sides have been posted
        self._met: dict[tuple[int, int], set[int]] = defaultdict(set)  # (group, its k-th meeting) -> ranks there
        self._meetings: dict[tuple[int, int], int] = defaultdict(int)  # (group, rank) -> meetings left behind
        self._expected = self._sizes_of_groups()
        self._buffered: set[int] = set()  # messages whose send was complete before their receive was posted
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(programs):
                while place[rank] < len(program):
                    event = self._try(rank, *program[place[rank]][1:])
                    if event is None:
                        break
                    place[rank] += 1
                    moved = True
                    yield from event
            if not moved:
                released = self._release([program[k] for program, k in zip(programs, place, strict=True) if k < len(program)])
                moved = bool(released)
                yield from released

    def _release(self, lines: list[tuple[int, str, int]]) -> list[Event]:
        """All ranks wait, as they did not in the run: sends that stand in the way were buffered, the smallest at least."""
        nbytes = self.trace.messages["nbytes"]
        rows = [row for _, kind, row in lines if kind == "sent" and self._posts[row] == 1]
        rows = [row for row in rows if nbytes[row] == nbytes[rows].min()]
        self._buffered.update(rows)
        return [self._departure(row) for row in rows]

    def _try(self, rank: int, kind: str, row: int) -> list[Event] | None:
        """The events of one line of a rank's program; None while another rank has to come first."""
        if kind == "post":
            return self._post(rank, row)
        if kind in ("sent", "recv"):
            return self._complete(rank, kind, row)
        if kind == "meet":
            return self._meet(rank, row)
        table = self.trace.locals
        kind = "copy" if self.trace.ops[table["op"][row]] == "COPY" else "combine"
        into, source = self._part(table, "", row), self._part(table, "from_", row)
        return [Event(kind, rank, self._clock[rank], row, into, source)]

    def _post(self, rank: int, row: int) -> list[Event]:
        """The message leaves when the second of its two ends is posted, in the round after the later one."""
        self._posts[row] += 1
        if row in self._buffered:
            return []
        self.round_of[row] = max(self.round_of[row], self._clock[rank] + 1)
        return [self._departure(row)] if self._posts[row] == 2 else []

    def _departure(self, row: int) -> Event:
        m = self.trace.messages
        src, round = int(m["src"][row]), int(self.round_of[row])
        return Event("send", src, round, row, self._part(m, "dst_", row), self._part(m, "src_", row))

    def _complete(self, rank: int, kind: str, row: int) -> list[Event] | None:
        if kind == "sent" and row in self._buffered:
            return []  # the sender did not wait
        if self._posts[row] < 2:
            return None
        m, round = self.trace.messages, int(self.round_of[row])
        self._clock[rank] = max(self._clock[rank], round)
        if kind == "sent":
            return []
        return [Event("recv", rank, round, row, self._part(m, "dst_", row), self._part(m, "src_", row))]

    def _meet(self, rank: int, row: int) -> list[Event] | None:
        group = int(self.trace.waits["group"][row])
        met = self._met[group, self._meetings[group, rank]]
        if rank not in met:
            met.add(rank)
            if len(met) == self._expected[group]:  # the last one is here: all go on from the latest of their clocks
                latest = max(self._clock[other] for other in met)
                for other in met:
                    self._clock[other] = latest
        if len(met) < self._expected[group]:
            return None
        self._meetings[group, rank] += 1
        return [Event("meet", rank, self._clock[rank], row)]

    def _sizes_of_groups(self) -> dict[int, int]:
        """How many ranks ever met in each group."""
        waits = self.trace.waits
        together = np.isin(waits["action"], _TOGETHER)
        pairs = {(int(g), int(r)) for g, r in zip(waits["group"][together], waits["rank"][together], strict=True)}
        sizes: dict[int, int] = defaultdict(int)
        for group, _ in pairs:
            sizes[group] += 1
        return sizes

    @staticmethod
    def _part(table: dict[str, np.ndarray], side: str, row: int) -> Part:
        return Part(*(int(table[f"{side}{name}"][row]) for name in ("buffer", "offset", "length")))
