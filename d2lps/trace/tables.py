"""What a run left behind, as tables of numbers: the logs of all lanes, one below the other.

For every send they find the receive that it met. The rule is the communicator's own: first in, first out, by (group, source,
destination, tag). So the k-th send of such a stream meets its k-th receive, and the whole matching is one sort of each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from d2lps.trace.recorder import ACTIONS, KINDS, Recorder, Vocabulary

Columns = dict[str, np.ndarray]
_TIMES = ("posted", "waited", "done", "start", "end")


class Tables:
    """Columns of numbers, one entry a row; real and simulated runs leave the same ones. Made when they are first looked at.

    messages: src, dst (ranks of the whole run), tag, group, nbytes, src_buffer, src_offset, src_length, dst_buffer,
    dst_offset, dst_length (bytes), step, sent, posted (when either side was ready), start, end (when the receiver had
    it). locals: rank, op, what was combined or copied, from where, start, end. waits: rank, action, peer, start, end.
    spans: rank, kind, label, flops, nbytes, start, end: what was computed, slept, held in memory.
    Each of them says in which lane: 0 is a rank's own thread of control, the others are what it has started.
    Times are seconds since the first rank of a machine began. `step`, `group`, `op` and `label` are indices into `steps`,
    `groups`, `ops` and `labels`, a span's `kind` into `kinds`, buffers are indices into `buffers`. The `*seq` columns number
    the events of a thread, which is one of `threads`, in the order of its program.
    """

    kinds: Sequence[str] = KINDS

    def __init__(self, logs: Sequence[Recorder], ranks: int) -> None:
        self.threads, self.ranks = logs, ranks  # a rank's own thread of control, and one for each call of `start`
        self.topology: Any = None  # of a simulated run: the cluster, and the node of each rank
        self.nodes: list[Any] = []
        self._began = {log.machine: log.started for log in sorted(logs, key=lambda log: -log.started)}  # the first of each
        words, self._become = _joined([log.vocabulary for log in logs])
        self._streams = _streams(words)
        names = words.step, words.group, words.op, words.label
        self.steps, self.groups, self.ops, self.labels = (labels.strings for labels in names)
        self.buffers = words.buffers.seen

    @cached_property
    def messages(self) -> Columns:
        ends = self._table("ends")
        ends = {name: column[~np.isnan(ends["posted"])] for name, column in ends.items()}
        sends = self._streams["src"][ends["stream"]] == ends["rank"]  # nobody sends to itself
        place = _places(ends["seq"], 2 * ends["stream"] + sends)
        place += ends["stream"] * (1 + place.max(initial=0))  # as one integer, so that numpy can intersect them
        sent, received = np.flatnonzero(sends), np.flatnonzero(~sends)
        _, s, r = np.intersect1d(place[sent], place[received], assume_unique=True, return_indices=True)
        sent, received = sent[s], received[r]
        start = np.maximum(ends["posted"][sent], ends["posted"][received])
        messages = {name: column[ends["stream"][sent]] for name, column in self._streams.items()}
        order = np.lexsort((messages["tag"], messages["dst"], messages["src"], messages["group"], start))
        s, r, messages = sent[order], received[order], {name: column[order] for name, column in messages.items()}
        messages |= {"nbytes": ends["nbytes"][s], "step": ends["step"][s]}
        for side, rows in (("src", s), ("dst", r)):
            names = ("buffer", "offset", "length", "seq", "done_seq", "lane", "thread")
            messages |= {f"{side}_{name}": ends[name][rows] for name in names}
        return messages | {"sent": ends["posted"][s], "posted": ends["posted"][r], "start": start[order], "end": ends["done"][r]}

    @cached_property
    def locals(self) -> Columns:
        return self._table("locals")

    @cached_property
    def spans(self) -> Columns:
        return self._table("spans")

    @cached_property
    def waits(self) -> Columns:
        """Those for messages of a simulation stand in the rows of the messages."""
        each = [self._columns(thread, "ends") for thread in range(len(self.threads))]
        return stacked([self._table("waits"), *map(self._waits, each)])

    def _waits(self, ends: Columns) -> Columns:
        """Who waits for several messages, one after another, goes on with the last."""
        chosen = np.flatnonzero((ends["done_seq"] >= 0) & ~np.isnan(ends["waited"]) & ~np.isnan(ends["done"]))
        chosen = chosen[np.argsort(ends["done_seq"][chosen])]
        ends = {name: column[chosen] for name, column in ends.items()}
        src, dst, tag, group = (self._streams[name][ends["stream"]] for name in ("src", "dst", "tag", "group"))
        sends = src == ends["rank"]
        action = np.where(sends, ACTIONS.index("send"), ACTIONS.index("recv"))
        waits = {"seq": ends["done_seq"] - 1, "action": action, "peer": np.where(sends, dst, src), "tag": tag, "group": group}
        waits |= {name: ends[name] for name in ("nbytes", "step", "rank", "lane", "thread")}
        end = np.maximum.accumulate(np.maximum(ends["done"], ends["waited"]))
        start = np.maximum(ends["waited"], np.r_[0.0, end[:-1]][: len(end)])
        return waits | {"start": start, "end": end}

    @property
    def unmatched(self) -> int:
        """Messages of which only one side was ever posted."""
        return sum(len(log.tables["ends"]) for log in self.threads) - 2 * len(self)

    def __len__(self) -> int:
        """How many messages."""
        return len(self.messages["src"])

    def _table(self, name: str) -> Columns:
        return stacked([self._columns(thread, name) for thread in range(len(self.threads))])

    def _columns(self, thread: int, name: str) -> Columns:
        """One log's, in the words and on the clock of the whole run."""
        log = self.threads[thread]
        columns, become = log.tables[name].columns(), self._become[id(log.vocabulary)]
        columns = {name: become[name][column] if name in become else column for name, column in columns.items()}
        columns |= {name: columns[name] - self._began[log.machine] for name in _TIMES if name in columns}
        who = {"rank": log.rank, "lane": log.lane, "thread": thread}
        return columns | {key: np.full(len(columns["seq"]), number) for key, number in who.items()}


def _joined(vocabularies: Sequence[Vocabulary]) -> tuple[Vocabulary, dict[int, Columns]]:
    """One vocabulary, and for each of those given what becomes of its numbers, by column."""
    words, become = Vocabulary(), dict[int, Columns]()
    for own in vocabularies:
        if id(own) not in become:
            become[id(own)] = {
                column: np.array([getattr(words, column)[label] for label in names], dtype=np.int64)
                for column, names in vars(own).items()
                if column != "buffers"
            }
            first = len(words.buffers.seen)
            words.buffers.seen += own.buffers.seen
            become[id(own)] |= dict.fromkeys(("buffer", "from_buffer"), np.arange(first, len(words.buffers.seen)))
    return words, become


def _streams(words: Vocabulary) -> Columns:
    """What all messages of a stream have in common."""
    rows = [(words.group[group,], *key) for group, *key in words.stream]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return dict(zip(("group", "src", "dst", "tag"), columns, strict=True))


def _places(seq: np.ndarray, queue: np.ndarray) -> np.ndarray:
    """For each row its place in its queue."""
    order = np.lexsort((seq, queue))
    ordered, place = queue[order], np.empty_like(queue)
    place[order] = np.arange(len(queue)) - np.searchsorted(ordered, ordered)
    return place


def stacked(tables: Sequence[Columns]) -> Columns:
    """One table's rows after the other's."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
