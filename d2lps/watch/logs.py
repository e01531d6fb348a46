"""The logs of all ranks in one place, and in an order in which no effect stands before its cause.

The clocks of machines differ, by more than a message takes. So a line carries two times: what the rank's clock says, and how many
collectives of the group the rank has been through. That is a clock of Lamport's (Commun. ACM 21, 1978): what a rank writes before
a collective has a smaller number than what any rank writes after it, whatever their clocks say.
"""

import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from d2lps.comm import Communicator
from d2lps.comm.watcher import Watcher

Line = dict[str, Any]


class Log(Watcher):
    """Lines of JSON, one a call: who, when by both clocks, and what; collectors such as Fluent Bit read them as they come.

    >>> log = Log(comm, open(f"log{comm.rank}.jsonl", "w"))                                 # doctest: +SKIP
    >>> log("loss", step=7, value=2.31)                                                     # doctest: +SKIP
    {"rank": 2, "clock": 14, "time": 1781604183.21, "said": "loss", "step": 7, "value": 2.31}

    clock: this rank's, in seconds. The count is of the collectives of `comm` itself, not of its parts.
    A line is written out at once: what a rank said last is there when it dies. ValueError for a name that is the log's own.
    """

    def __init__(self, comm: Communicator, out: TextIO, clock: Callable[[], float] = time.time) -> None:
        self.comm, self.out, self.clock = comm, out, clock
        self.passed, self.latest = 0, float("-inf")
        comm.watchers.append(self)

    def left(self, comm: Communicator) -> None:
        self.passed += comm.name == self.comm.name

    def __call__(self, said: str, **more: Any) -> None:
        self.latest = max(self.latest, self.clock())  # a machine's clock may be set back
        line = {"rank": self.comm.members[self.comm.rank], "clock": self.passed, "time": self.latest, "said": said}
        if own := line.keys() & more.keys():
            raise ValueError(f"{sorted(own)} in {more!r}: the log writes that itself")
        print(json.dumps(line | more), file=self.out, flush=True)


def merged(*logs: Iterable[str]) -> Iterator[Line]:
    """The lines of all ranks, each log being a rank's own, in order: by what they had been through, then by the time.

    >>> early = '{"rank": 0, "clock": 0, "time": 9.0, "said": "go"}'
    >>> late = '{"rank": 1, "clock": 1, "time": 2.0, "said": "gone"}'           # its clock is seven seconds late
    >>> [line["said"] for line in merged([early], [late])]
    ['go', 'gone']

    ValueError names a line that is no log's. Cost: one line of each in memory.
    """
    return heapq.merge(*map(_read, logs), key=lambda line: (line["clock"], line["time"]))


def _read(log: Iterable[str]) -> Iterator[Line]:
    for text in log:
        try:
            line = json.loads(text)
            line["clock"], line["time"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"this is no line of a log: {text[:80]!r}") from None
        yield line
