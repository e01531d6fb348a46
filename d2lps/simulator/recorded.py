"""The trace of a simulation, made from what it wrote down."""

from __future__ import annotations

from collections.abc import Sequence

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
        others, own = super().messages(), self._own()
        own |= {"step": own["src_step"], "sent": own["src_posted"], "posted": own["dst_posted"]}
        own |= {"start": np.maximum(own["sent"], own["posted"])}
        both = stacked([{name: own[name] for name in others}, others])
        order = np.argsort(both["start"], kind="stable")
        return {name: column[order] for name, column in both.items()}

    def unmatched(self) -> int:
        noted = sum(len(log.tables[side]) for log in self.logs for side in ("sends", "recvs"))
        left = sum(len(stream.sends) + len(stream.recvs) for stream in self.streams)
        return noted + left - 2 * (len(super().messages()["src"]))

    def table(self, name: str) -> Columns:
        table = super().table(name)
        return stacked([table, self._waits()]) if name == "waits" else table

    def _own(self) -> Columns:
        """The rows, with what all messages of a stream have in common."""
        rows = self.recording.columns()
        thread = {(log.rank, log.thread): index for index, log in enumerate(self.logs)}
        lanes = np.array([log.lane for log in self.logs], dtype=np.int64)
        common = []
        for stream in self.streams:
            group, src, dst, tag = stream.key
            ends = thread.get((src, stream.src_thread), -1), thread.get((dst, stream.dst_thread), -1)
            common.append((src, dst, tag, self.words.groups.number((group,)), *ends))
        table = np.array(common, dtype=np.int64).reshape(-1, 6)[rows.pop("stream")]
        rows |= dict(zip(("src", "dst", "tag", "group", "src_thread", "dst_thread"), table.T, strict=True))
        return rows | {f"{side}_lane": lanes[rows[f"{side}_thread"]] for side in ("src", "dst")}

    def _waits(self) -> Columns:
        """Who waits for a message goes on when it is there; who waits for several, one after another, with the last."""
        own, sides = self._own(), []
        for action, side, peer in (("send", "src", "dst"), ("recv", "dst", "src")):
            seq, waited = own[f"{side}_done_seq"], own[f"{side}_waited"]
            start = np.where(np.isnan(waited), own[f"{side}_posted"], np.abs(waited))
            end = np.where(np.signbit(waited), start, own["end"])
            columns = {"seq": seq - 1, "action": np.full(len(seq), ACTIONS.index(action)), "peer": own[peer]}
            columns |= {name: own[name] for name in ("tag", "group", "nbytes")} | {"step": own[f"{side}_step"]}
            columns |= {"start": start, "end": end, "rank": own[side]}
            columns |= {name: own[f"{side}_{name}"] for name in ("lane", "thread")}
            sides.append({name: column[seq >= 0] for name, column in columns.items()})
        both = stacked(sides)
        order = np.lexsort((both["seq"], both["thread"]))
        both = {name: column[order] for name, column in both.items()}
        first = np.flatnonzero(np.diff(both["thread"], prepend=-1))
        for begin, end in zip(first, [*first[1:], len(order)], strict=True):
            upto = np.maximum.accumulate(both["end"][begin:end])
            both["end"][begin:end] = np.maximum(upto, both["start"][begin:end])
            both["start"][begin + 1 : end] = np.maximum(both["start"][begin + 1 : end], upto[:-1])
        return both
