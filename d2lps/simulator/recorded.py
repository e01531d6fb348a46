"""The trace of a simulation, made from what it wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from d2lps.simulator.mailbox import Stream
from d2lps.simulator.recording import Recording
from d2lps.trace.columns import Columns
from d2lps.trace.merge import Merged, stacked
from d2lps.trace.recorder import ACTIONS, Log


class Recorded(Merged):
    """The tables of a simulation: its own messages, beside what ranks have noted otherwise."""

    def __init__(self, logs: Sequence[Log], ranks: int, recording: Recording, streams: Sequence[Stream]) -> None:
        super().__init__(logs, ranks)
        self.recording, self.streams = recording, streams

    def messages(self) -> Columns:
        others = super().messages()  # what was noted of messages that were not sent by `exchange`, `isend` or `irecv`
        start = np.concatenate([self._own("start"), others["start"]])
        order = np.argsort(start, kind="stable")
        # One column after the other: a million messages should not stand in memory three times.
        return {name: np.concatenate([self._own(name), others[name]])[order] for name in others}

    def unmatched(self) -> int:
        noted = sum(len(log.tables[side]) for log in self.logs for side in ("sends", "recvs"))
        left = sum(len(stream.sends) + len(stream.recvs) for stream in self.streams)
        return noted + left - 2 * (len(super().messages()["src"]))

    def table(self, name: str) -> Columns:
        table = super().table(name)
        return stacked([table, self._waits()]) if name == "waits" else table

    def _own(self, name: str) -> np.ndarray:
        """A column of the simulation's own messages."""
        column = self.recording.column
        if name in self._common:  # of all messages of a stream
            return self._common[name][column("stream")]
        if name == "start":
            return np.maximum(column("src_posted"), column("dst_posted"))
        return column({"sent": "src_posted", "posted": "dst_posted", "step": "src_step"}.get(name, name))

    @cached_property
    def _common(self) -> Columns:
        """What all messages of a stream have in common, by stream."""
        thread = {(log.rank, log.thread): index for index, log in enumerate(self.logs)}
        rows = []
        for stream in self.streams:
            group, src, dst, tag = stream.key
            ends = thread.get((src, stream.src_thread), -1), thread.get((dst, stream.dst_thread), -1)
            rows.append((src, dst, tag, self.words.groups.number((group,)), *ends))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        common = dict(zip(("src", "dst", "tag", "group", "src_thread", "dst_thread"), columns, strict=True))
        lanes = np.array([log.lane for log in self.logs], dtype=np.int64)
        return common | {f"{side}_lane": lanes[common[f"{side}_thread"]] for side in ("src", "dst")}

    def _waits(self) -> Columns:
        """Who waits for a message goes on when it is there; who waits for several, one after another, with the last."""
        own, sides = self._own, []
        for action, side, peer in (("send", "src", "dst"), ("recv", "dst", "src")):
            seq, waited = own(f"{side}_done_seq"), own(f"{side}_waited")
            start = np.where(np.isnan(waited), own(f"{side}_posted"), np.abs(waited))
            end = np.where(np.signbit(waited), start, own("end"))
            columns = {"seq": seq - 1, "action": np.full(len(seq), ACTIONS.index(action)), "peer": own(peer)}
            columns |= {name: own(name) for name in ("tag", "group", "nbytes")} | {"step": own(f"{side}_step")}
            columns |= {"start": start, "end": end, "rank": own(side)}
            columns |= {name: own(f"{side}_{name}") for name in ("lane", "thread")}
            sides.append({name: column[seq >= 0] for name, column in columns.items()})
        both = stacked(sides)
        order = np.lexsort((both["seq"], both["thread"]))
        both = {name: column[order] for name, column in both.items()}
        first = np.flatnonzero(np.diff(both["thread"], prepend=-1))
        for begin, end in pairwise([*first, len(order)]):
            upto = np.maximum.accumulate(both["end"][begin:end])
            both["end"][begin:end] = np.maximum(upto, both["start"][begin:end])
            both["start"][begin + 1 : end] = np.maximum(both["start"][begin + 1 : end], upto[:-1])
        return both
