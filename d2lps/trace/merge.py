"""From one log a lane to one trace: find for every send the receive that it met.

The rule is the communicator's own: first in, first out, by (group, source, destination, tag). So the k-th send of such
a stream meets its k-th receive, and the whole matching is one sort of each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from d2lps.trace.columns import Columns, Threads
from d2lps.trace.recorder import Log, Vocabulary
from d2lps.trace.trace import Trace

_OWN = {"step": "steps", "group": "groups", "op": "ops", "label": "labels"}  # columns of numbers that a log gave by itself


def merge(logs: Sequence[Log], ranks: int) -> Trace:
    """One Trace of the logs of all ranks, its clock starting when the first rank of a machine did."""
    return Trace(Merged(logs, ranks))


class Merged:
    """The tables of all logs, one below the other, in the words and on the clock of the whole run."""

    def __init__(self, logs: Sequence[Log], ranks: int) -> None:
        self.logs, self.ranks = logs, ranks
        self.words, self._become = _joined([log.vocabulary for log in logs])
        self._origins: dict[str, float] = {}
        for log in logs:
            self._origins[log.machine] = min(self._origins.get(log.machine, log.started), log.started)

    def threads(self) -> Threads:
        return Threads.of(self.logs)

    def table(self, name: str) -> Columns:
        tables = []
        for thread, log in enumerate(self.logs):
            columns = _rebased(log.tables[name].columns(), *self._become[id(log.vocabulary)], self._origins[log.machine])
            who = {"rank": log.rank, "lane": log.lane, "thread": thread}
            tables.append(columns | {key: np.full(len(columns["seq"]), number) for key, number in who.items()})
        return stacked(tables)

    def messages(self) -> Columns:
        return _meet(self.table("sends"), self.table("recvs"), self.ranks)

    def unmatched(self) -> int:
        ends = sum(len(log.tables[side]) for log in self.logs for side in ("sends", "recvs"))
        return ends - 2 * len(self.messages()["src"])


def _joined(vocabularies: Sequence[Vocabulary]) -> tuple[Vocabulary, dict[int, tuple[dict[str, np.ndarray], int]]]:
    """One vocabulary, and for each of those given: what becomes of its numbers, and of the first of its buffers."""
    words, become = Vocabulary(), {}
    for own in vocabularies:
        if id(own) not in become:
            numbers = {
                column: np.array([getattr(words, kind).number((text,)) for text in getattr(own, kind).strings], dtype=np.int64)
                for column, kind in _OWN.items()
            }
            become[id(own)] = numbers, len(words.buffers.seen)
            words.buffers.seen += [replace(buffer) for buffer in own.buffers.seen]
    return words, become


def _rebased(columns: Columns, numbers: dict[str, np.ndarray], first_buffer: int, origin: float) -> Columns:
    """Columns that speak of this rank's strings, buffers and clock, in the whole run's."""
    out = {}
    for name, column in columns.items():
        if name in numbers:
            column = numbers[name][column]
        elif name in ("buffer", "from_buffer"):
            column = column + first_buffer
        elif name in ("posted", "done", "start", "end"):
            column = column - origin
        out[name] = column
    return out


def stacked(tables: Sequence[Columns]) -> Columns:
    """One table's rows after the other's."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _meet(sends: Columns, recvs: Columns, ranks: int) -> Columns:
    """The messages: sends joined to receives, in the order in which they could start."""
    tags = np.unique(np.concatenate([sends["tag"], recvs["tag"]]))  # a tag may be large, so its place among them counts
    send_keys = _stream_places(sends["group"], sends["rank"], sends["peer"], sends["tag"], sends["seq"], ranks, tags)
    recv_keys = _stream_places(recvs["group"], recvs["peer"], recvs["rank"], recvs["tag"], recvs["seq"], ranks, tags)
    # A place in a stream is (stream, k); as one integer, so that numpy can intersect two columns of them.
    longest = 1 + max(int(keys[1].max(initial=0)) for keys in (send_keys, recv_keys))
    _, s, r = np.intersect1d(
        send_keys[0] * longest + send_keys[1], recv_keys[0] * longest + recv_keys[1], assume_unique=True, return_indices=True
    )
    start = np.maximum(sends["posted"][s], recvs["posted"][r])
    order = np.argsort(start, kind="stable")
    s, r = s[order], r[order]
    messages = {"src": sends["rank"][s], "dst": recvs["rank"][r]}
    messages |= {name: sends[name][s] for name in ("tag", "group", "nbytes", "step")}
    for side, table, rows in (("src", sends, s), ("dst", recvs, r)):
        names = ("buffer", "offset", "length", "seq", "done_seq", "lane", "thread")
        messages |= {f"{side}_{name}": table[name][rows] for name in names}
    messages |= {"sent": sends["posted"][s], "posted": recvs["posted"][r], "start": start[order], "end": recvs["done"][r]}
    return messages


def _stream_places(
    group: np.ndarray, src: np.ndarray, dst: np.ndarray, tag: np.ndarray, seq: np.ndarray, ranks: int, tags: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each row its stream as an integer, and its place in that stream by the order of posting."""
    stream = ((group * ranks + src) * ranks + dst) * len(tags) + np.searchsorted(tags, tag)
    order = np.lexsort((seq, stream))
    ordered = stream[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.zeros(0, dtype=bool)
    begin = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0)) if len(ordered) else ordered
    place = np.empty_like(stream)
    place[order] = np.arange(len(ordered)) - begin
    return stream, place
