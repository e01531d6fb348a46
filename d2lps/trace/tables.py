"""What a run left behind, as tables of numbers: the logs of all lanes, one below the other.

For every send they find the receive that it met. The rule is the communicator's own: first in, first out, by (group, source,
destination, tag). So the k-th send of such a stream meets its k-th receive, and the whole matching is one sort of each side.
"""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np

from d2lps.trace.recorder import ACTIONS, COLUMNS, KINDS, About, Recorder, Vocabulary, axis_of

Columns = dict[str, np.ndarray]
_TIMES = ("posted", "waited", "done", "start", "end")
_MUCH = 1 << 26  # bytes


class Tables:
    """Columns of numbers, one entry a row; real and simulated runs leave the same ones. Made when they are first looked at.

    messages: src, dst (ranks of the whole run), tag, group, nbytes, src_buffer, src_offset, src_length, dst_buffer,
    dst_offset, dst_length (bytes), step, sent, posted (when either side was ready), start, end (when the receiver had
    it), and where lines are noted src_line, dst_line (the reader's line at each end, an index into `lines`).
    locals: rank, op, what was combined or copied, from where, start, end. waits: rank, action, peer, start, end.
    spans: rank, kind, label, flops, nbytes, start, end: what was computed, slept, held in memory.
    Each of them says in which lane: 0 is a rank's own thread of control, the others are what it has started.
    Times are seconds since the first rank of a machine began. `step`, `group`, `op` and `label` are indices into `steps`,
    `groups`, `ops` and `labels`, a span's `kind` into `kinds`, buffers are indices into `buffers`; `axes` are those of `groups`.
    `about` has of each of `steps` what its messages carry, where `Communicator.about` has said so, or None.
    The `*seq` columns number the events of a thread, which is one of `threads`, in the order of its program.
    """

    kinds: Sequence[str] = KINDS

    def __init__(self, logs: Sequence[Recorder], ranks: int) -> None:
        self.threads, self.ranks = logs, ranks  # a rank's own thread of control, and one for each call of `start`
        self.topology: Any = None  # of a simulated run: the cluster, and the node of each rank
        self.nodes: list[Any] = []
        self._began = {log.machine: log.started for log in sorted(logs, key=lambda log: -log.started)}  # the first of each
        words, self._become = _joined([log.vocabulary for log in logs])
        streams = np.array([(words.group[group,], *key) for group, *key in words.stream], dtype=np.int32).reshape(-1, 4)
        self._streams = dict(zip(("group", "src", "dst", "tag"), streams.T, strict=True))  # what their messages have in common
        names = words.step, words.group, words.op, words.label
        self.steps, self.groups, self.ops, self.labels = (labels.strings for labels in names)
        self.about = [next((part for part in label if isinstance(part, About)), None) for label in words.step]
        self.axes = [axis_of(group) for group in self.groups]  # of each group: "tp", or "" for one of no mesh
        self.buffers = words.buffers.seen
        self.lines: list[Any] = list(words.line)  # (file, number); none if the trace has no lines
        self._tables: dict[str, Columns] = {}

    @cached_property
    def messages(self) -> Columns:
        ends = self._table("ends")
        stream, posted = ends["stream"], ends["posted"]
        sends = self._streams["src"][stream] == ends["rank"]  # nobody sends to itself

        def queued(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Their rows, stream by stream in the order of posting; and of each, its stream and its place there as one number."""
            rows = np.flatnonzero(chosen & ~np.isnan(posted))
            rows = rows[np.lexsort((ends["seq"][rows], stream[rows]))]
            queues = stream[rows].astype(np.int64)
            return rows, queues * len(stream) + np.arange(len(rows)) - np.searchsorted(queues, queues)

        (sent, theirs), (received, mine) = queued(sends), queued(~sends)
        _, s, r = np.intersect1d(theirs, mine, assume_unique=True, return_indices=True)
        sent, received = sent[s], received[r]
        start = np.maximum(posted[sent], posted[received])
        order = np.lexsort((*(self._streams[name][stream[sent]] for name in ("tag", "dst", "src", "group")), start))
        sent, received = sent[order], received[order]
        messages = {name: values[stream[sent]] for name, values in self._streams.items()}
        messages |= {name: ends[name][sent] for name in ("nbytes", "step")}
        for side, rows in (("src", sent), ("dst", received)):
            names = ("buffer", "offset", "length", "seq", "done_seq", "lane", "thread")
            messages |= {f"{side}_{name}": ends[name][rows] for name in (*names, *(["line"] if self.lines else []))}
        times = {"sent": posted[sent], "posted": posted[received], "start": start[order], "end": ends["done"][received]}
        self._expect(messages, times["start"])
        return messages | times

    def _expect(self, messages: Columns, start: np.ndarray) -> None:
        """Who listens all the time (its `seq` is 0) expects a message from the moment at which it is sent."""
        ends, listens = self._table("ends"), messages["dst_seq"] == 0
        for thread in np.unique(messages["dst_thread"][listens]):
            rows = listens & (messages["dst_thread"] == thread)
            known = (ends["thread"] == thread) & (ends["done_seq"] >= 0)
            before = np.searchsorted(ends["done"][known], start[rows], "right")
            messages["dst_seq"][rows] = np.concatenate([[0], ends["done_seq"][known]])[before]

    @cached_property
    def locals(self) -> Columns:
        return self._table("locals")

    @cached_property
    def spans(self) -> Columns:
        return self._table("spans")

    @cached_property
    def waits(self) -> Columns:
        """Those for messages of a simulation stand in the rows of the messages. Who waits for several messages, one after
        another, goes on with the last."""
        ends = self._table("ends")
        rows = np.flatnonzero((ends["done_seq"] >= 0) & ~np.isnan(ends["waited"] + ends["done"]))
        place = ends["thread"][rows] * 2.0**32 + ends["done_seq"][rows]  # almost sorted already
        rows = rows[np.argsort(place, kind="stable")]
        stream, rank, waited = ends["stream"][rows], ends["rank"][rows], ends["waited"][rows]
        src, dst, tag, group = (self._streams[name][stream] for name in ("src", "dst", "tag", "group"))
        action = np.where(src == rank, ACTIONS.index("send"), ACTIONS.index("recv"))
        waits = {"seq": ends["done_seq"][rows] - 1, "action": action, "peer": np.where(src == rank, dst, src)}
        waits |= {"tag": tag, "group": group} | {name: ends[name][rows] for name in ("nbytes", "step", "rank", "lane", "thread")}
        first = np.flatnonzero(np.diff(waits["thread"], prepend=-1))  # of each thread
        each = np.split(np.maximum(ends["done"][rows], waited), first[1:])
        waits["end"] = np.concatenate([np.maximum.accumulate(end) for end in each])
        before = np.roll(waits["end"], 1)
        before[first] = 0.0
        waits["start"] = np.maximum(waited, before)
        told = self._table("waits").items()
        return {name: np.concatenate([column, waits.pop(name)], dtype=column.dtype, casting="same_kind") for name, column in told}

    def moving(self) -> Columns:
        """Messages on their way, once in the lane that sends and once in the lane that receives."""
        m = self.messages
        ends = [{"rank": m[end], "lane": m[f"{end}_lane"], "start": m["start"], "end": m["end"]} for end in ("src", "dst")]
        return {name: np.concatenate([end[name] for end in ends]) for name in ends[0]}

    def lanes(self) -> np.ndarray:
        """How many lanes each rank used: 1 where nothing ran beside it."""
        used = np.ones(self.ranks, dtype=np.int64)
        for table in (self.moving(), self.locals, self.waits, self.spans):
            np.maximum.at(used, table["rank"], table["lane"] + 1)
        return used

    def bars(self) -> dict[str, Columns]:
        """{what lanes did: rank, lane, start, end and label of each time that it came to an end}, in the order of painting, since
        one may wait or add up while it computes."""
        kinds = np.array(self.kinds)[self.spans["kind"]]
        spans = self.spans | {"label": np.array(self.labels, dtype=object)[self.spans["label"]]}
        copies = np.array(self.ops, dtype=object)[self.locals["op"]] == "COPY"
        return {
            "computing": _bars(spans, kinds == "compute"),
            "sleeping": _bars(spans, kinds == "sleep"),
            "waiting": _bars(self.waits),
            "combining": _bars(self.locals, ~copies),
            "copying": _bars(self.locals, copies),
            "moving": _bars(self.moving()),
        }

    @property
    def unmatched(self) -> int:
        """Messages of which only one side was ever posted."""
        return int(np.count_nonzero(~np.isnan(self._table("ends")["posted"]))) - 2 * len(self)

    def __len__(self) -> int:
        """How many messages."""
        return len(self.messages["src"])

    def _table(self, name: str) -> Columns:
        """All logs' rows one below the other, in the words and on the clock of the whole run. The logs give theirs up: there may
        be millions."""
        if name not in self._tables:
            kinds, tables = COLUMNS[name], [log.tables[name] for log in self.threads]
            nbytes = 8 * sum(map(len, tables))
            _give_back(nbytes)  # a thousand tables have grown beside one another, each from hole to larger hole
            told = self._tables[name] = {}
            for place, (column, kind) in enumerate(kinds.items()):
                cells = (np.frombuffer(table)[place :: len(kinds)].astype(kind) for table in tables)
                told[column] = np.concatenate(list(map(self._told, repeat(column), self.threads, cells)))
            who = [(log.rank, log.lane, thread) for thread, log in enumerate(self.threads)]
            rows = np.repeat(np.array(who, dtype=np.int32), [len(table) // len(kinds) for table in tables], axis=0)
            told |= zip(("rank", "lane", "thread"), rows.T.copy(), strict=True)
            if name == "ends" and self.lines:  # of a communicator that was there before the recording began, none
                lines = (self._told("line", log, np.frombuffer(log.lines, np.int32)) for log in self.threads)
                told["line"] = np.concatenate(list(lines))
            for table in tables:
                del table[:]
            _give_back(nbytes)
        return self._tables[name]

    def _told(self, column: str, log: Recorder, cells: np.ndarray) -> np.ndarray:
        become = self._become[id(log.vocabulary)]
        if column in _TIMES:
            return cells - self._began[log.machine]
        return become[column][cells] if column in become else cells


def _give_back(nbytes: int) -> None:
    """After so many have been freed in small pieces: let the machine have what lies free between others, 40 ms for a gigabyte.

    Linux (glibc), which otherwise keeps it for small pieces to come, while large arrays take new memory.
    """
    if nbytes >= _MUCH and sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _joined(vocabularies: Sequence[Vocabulary]) -> tuple[Vocabulary, dict[int, Columns]]:
    """One vocabulary, and for each of those given what becomes of its numbers, by column."""
    words, become = Vocabulary(), dict[int, Columns]()
    for own in {id(own): own for own in vocabularies}.values():
        first = len(words.buffers.seen)
        words.buffers.seen += own.buffers.seen
        become[id(own)] = dict.fromkeys(("buffer", "from_buffer"), np.arange(first, len(words.buffers.seen), dtype=np.int32))
        for column, names in vars(own).items():
            if column != "buffers":
                become[id(own)][column] = np.array([getattr(words, column)[label] for label in names], dtype=np.int32)
    return words, become


def _bars(table: Columns, chosen: np.ndarray | bool = True) -> Columns:
    columns = {"label": np.full(len(table["rank"]), "", dtype=object)} | table
    ended = ~np.isnan(table["end"]) & chosen
    return {name: columns[name][ended] for name in ("rank", "lane", "start", "end", "label")}
