"""What a run left behind, as tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from d2lps.trace.buffers import Buffer
from d2lps.trace.recorder import KINDS, Log, Vocabulary

Columns = dict[str, np.ndarray]


@dataclass
class Threads:
    """The ranks' threads of control, a row each: one for each rank, and one for each call of `start`."""

    rank: np.ndarray
    lane: np.ndarray
    parent: np.ndarray  # the thread that started it, -1 for none
    begins: np.ndarray  # the seq of the parent at which it did
    number: np.ndarray  # among those of its rank, 0 for the rank's own
    names: list[str]

    @classmethod
    def of(cls, logs: Sequence[Log]) -> Threads:
        at = {(log.rank, log.thread): index for index, log in enumerate(logs)}
        rows = [(log.rank, log.lane, at.get((log.rank, log.parent), -1), log.begins, log.thread) for log in logs]
        rank, lane, parent, begins, number = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return cls(rank, lane, parent, begins, number, [log.name for log in logs])


class Source(Protocol):
    """Where the columns come from."""

    ranks: int
    words: Vocabulary

    def messages(self) -> Columns: ...

    def table(self, name: str) -> Columns: ...

    def threads(self) -> Threads: ...

    def unmatched(self) -> int: ...


class Tables:
    """Columns of numbers, one entry a row; real and simulated runs leave the same ones. Made when they are first looked at.

    messages: src, dst (ranks of the whole run), tag, group, nbytes, src_buffer, src_offset, src_length, dst_buffer,
    dst_offset, dst_length (bytes), step, sent, posted (when either side was ready), start, end (when the receiver had
    it). locals: rank, op, what was combined or copied, from where, start, end. waits: rank, action, peer, start, end.
    spans: rank, kind, label, flops, nbytes, start, end: what was computed, slept, held in memory.
    Each of them says in which lane: 0 is a rank's own thread of control, the others are what it has started.
    Times are seconds since the run began. `step`, `group`, `op` and `label` are indices into `steps`, `groups`, `ops` and
    `labels`, a span's `kind` into `kinds`, buffers are indices into `buffers`. The `*seq` columns number the events of a
    thread, a row of `threads`, in the order of its program.
    """

    kinds = KINDS

    def __init__(self, source: Source) -> None:
        self.source, self.ranks = source, source.ranks
        self.topology: Any = None  # of a simulated run: the cluster, and the node of each rank
        self.nodes: list[Any] = []

    @cached_property
    def messages(self) -> Columns:
        return self.source.messages()

    @cached_property
    def locals(self) -> Columns:
        return self.source.table("locals")

    @cached_property
    def waits(self) -> Columns:
        return self.source.table("waits")

    @cached_property
    def spans(self) -> Columns:
        return self.source.table("spans")

    @cached_property
    def threads(self) -> Threads:
        return self.source.threads()

    @cached_property
    def unmatched(self) -> int:
        """Messages of which only one side was ever posted."""
        return self.source.unmatched()

    @cached_property
    def steps(self) -> list[str]:
        return self.source.words.steps.strings

    @cached_property
    def groups(self) -> list[str]:
        return self.source.words.groups.strings

    @cached_property
    def ops(self) -> list[str]:
        return self.source.words.ops.strings

    @cached_property
    def labels(self) -> list[str]:
        return self.source.words.labels.strings

    @property
    def buffers(self) -> list[Buffer]:
        return self.source.words.buffers.seen

    def __len__(self) -> int:
        """How many messages."""
        return len(self.messages["src"])
