"""A trace once more, event by event, in an order in which every cause comes before its effect.

Two things come out of it that clocks cannot give, because they are the same in every run:

- rounds. A rank's round is how many messages it has had to wait for, one after another. A message belongs to the round
  after the later of its two ends (Lamport 1978 counts events this way). The number of rounds is what latency multiplies.
- origins. Which ranks' data a part of memory holds: a receive brings the sender's, a combine adds up both. A chunk that
  an algorithm adds twice, or not at all, is seen here, and so in every picture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from d2lps.trace.recorder import ACTIONS
from d2lps.trace.tables import Tables

_TOGETHER = (ACTIONS.index("barrier"), ACTIONS.index("native"))  # waits of all ranks at once
_JOIN = ACTIONS.index("join")


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

    def __init__(self, trace: Tables) -> None:
        self.trace = trace
        self.round_of = np.zeros(len(trace), dtype=np.int64)
        self.events = list(self._run())
        self.rounds = int(self.round_of.max(initial=0))

    def _programs(self) -> list[list[tuple[int, str, int]]]:
        """For each thread its events (seq, kind, row) against the order of its program: what comes next stands at the end."""
        m, local, waits = self.trace.messages, self.trace.locals, self.trace.waits
        programs: list[list[tuple[int, str, int]]] = [[] for _ in self.trace.threads]
        for kind, threads, numbers in (
            ("post", m["src_thread"], m["src_seq"]),
            ("sent", m["src_thread"], m["src_done_seq"]),
            ("post", m["dst_thread"], m["dst_seq"]),
            ("recv", m["dst_thread"], m["dst_done_seq"]),
            ("local", local["thread"], local["seq"]),
            ("meet", waits["thread"], np.where(np.isin(waits["action"], _TOGETHER), waits["seq"], -1)),
            ("join", waits["thread"], np.where(waits["action"] == _JOIN, waits["seq"], -1)),
        ):
            for row, (thread, seq) in enumerate(zip(threads.tolist(), numbers.tolist(), strict=True)):
                if seq >= 0:
                    programs[thread].append((seq, kind, row))
        for child, log in enumerate(self.trace.threads):
            if log.parent >= 0:
                programs[self._thread[log.rank, log.parent]].append((log.begins, "start", child))
                programs[child].append((0, "begin", child))
        return [sorted(program, reverse=True) for program in programs]

    def _run(self) -> Iterator[Event]:
        """Let every thread go on until it needs something that has not happened yet; repeat."""
        self._rank = [thread.rank for thread in self.trace.threads]
        self._thread = {(thread.rank, thread.thread): index for index, thread in enumerate(self.trace.threads)}
        self._left = programs = self._programs()
        self._clock = [0] * len(programs)
        self._begun: dict[int, int] = {}  # thread -> its parent's clock when it was started
        self._posts: dict[int, int] = defaultdict(int)  # message -> how many of its two sides have been posted
        self._met: dict[tuple[int, int], set[int]] = defaultdict(set)  # (group, its k-th meeting) -> threads there
        self._meetings: dict[tuple[int, int], int] = defaultdict(int)  # (group, thread) -> meetings left behind
        waits = self.trace.waits
        together = np.isin(waits["action"], _TOGETHER)
        met = set(zip(waits["group"][together].tolist(), waits["thread"][together].tolist(), strict=True))
        self._expected = Counter(group for group, _ in met)  # how many threads ever meet in each group
        self._buffered: set[int] = set()  # messages whose send was complete before their receive was posted
        moved = True
        while moved:
            moved = False
            for thread, program in enumerate(programs):
                while program:
                    event = self._try(thread, *program[-1][1:])
                    if event is None:
                        break
                    program.pop()
                    moved = True
                    yield from event
            if not moved:
                released = self._release([program[-1] for program in programs if program])
                moved = bool(released)
                yield from released

    def _release(self, lines: list[tuple[int, str, int]]) -> list[Event]:
        """All ranks wait, as they did not in the run: sends that stand in the way were buffered, the smallest at least."""
        nbytes = self.trace.messages["nbytes"]
        rows = [row for _, kind, row in lines if kind == "sent" and self._posts[row] == 1]
        rows = [row for row in rows if nbytes[row] == nbytes[rows].min()]
        self._buffered.update(rows)
        return [self._departure(row) for row in rows]

    def _try(self, thread: int, kind: str, row: int) -> list[Event] | None:
        """The events of one line of a thread's program; None while another thread has to come first."""
        if kind == "post":
            return self._post(thread, row)
        if kind in ("sent", "recv"):
            return self._complete(thread, kind, row)
        if kind == "meet":
            return self._meet(thread, row)
        if kind in ("start", "begin", "join"):
            return self._beside(thread, kind, row)
        table = self.trace.locals
        kind = "copy" if self.trace.ops[table["op"][row]] == "COPY" else "combine"
        into, source = self._part(table, "", row), self._part(table, "from_", row)
        return [Event(kind, self._rank[thread], self._clock[thread], row, into, source)]

    def _beside(self, thread: int, kind: str, row: int) -> list[Event] | None:
        """A thread begins after its parent has started it, and ends before its parent has waited for it."""
        if kind == "start":
            self._begun[row] = self._clock[thread]
        elif kind == "begin":
            if thread not in self._begun:
                return None
            self._clock[thread] = self._begun[thread]
        else:
            other = self._thread[self._rank[thread], int(self.trace.waits["tag"][row])]
            if self._left[other]:
                return None
            self._clock[thread] = max(self._clock[thread], self._clock[other])
        return []

    def _post(self, thread: int, row: int) -> list[Event]:
        """The message leaves when the second of its two ends is posted, in the round after the later one."""
        self._posts[row] += 1
        if row in self._buffered:
            return []
        self.round_of[row] = max(self.round_of[row], self._clock[thread] + 1)
        return [self._departure(row)] if self._posts[row] == 2 else []

    def _departure(self, row: int) -> Event:
        m = self.trace.messages
        src, round = int(m["src"][row]), int(self.round_of[row])
        return Event("send", src, round, row, self._part(m, "dst_", row), self._part(m, "src_", row))

    def _complete(self, thread: int, kind: str, row: int) -> list[Event] | None:
        if kind == "sent" and row in self._buffered:
            return []  # the sender did not wait
        if self._posts[row] < 2:
            return None
        m, round = self.trace.messages, int(self.round_of[row])
        self._clock[thread] = max(self._clock[thread], round)
        if kind == "sent":
            return []
        return [Event("recv", self._rank[thread], round, row, self._part(m, "dst_", row), self._part(m, "src_", row))]

    def _meet(self, thread: int, row: int) -> list[Event] | None:
        group = int(self.trace.waits["group"][row])
        met = self._met[group, self._meetings[group, thread]]
        if thread not in met:
            met.add(thread)
            if len(met) == self._expected[group]:  # the last one is here: all go on from the latest of their clocks
                latest = max(self._clock[other] for other in met)
                for other in met:
                    self._clock[other] = latest
        if len(met) < self._expected[group]:
            return None
        self._meetings[group, thread] += 1
        return [Event("meet", self._rank[thread], self._clock[thread], row)]

    @staticmethod
    def _part(table: dict[str, np.ndarray], side: str, row: int) -> Part:
        return Part(*(int(table[f"{side}{name}"][row]) for name in ("buffer", "offset", "length")))
