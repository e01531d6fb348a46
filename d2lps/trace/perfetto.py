"""A trace in Chrome's trace event format: a track for each lane, what it does as slices, messages as arrows, memory as curves.

The format is a list of small dictionaries, times in microseconds:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from d2lps.trace.recorder import ACTIONS
from d2lps.trace.tables import Columns, Tables

Event = dict[str, Any]


def events(trace: Tables) -> dict[str, Any]:
    """{"traceEvents": [...]}: the names of the tracks, then what happened."""
    used = trace.lanes()
    first = (np.cumsum(used) - used).tolist()  # the track of each rank's own thread; what runs beside it lies below it
    bars = ((row, name, args) for row, name, args in _bars(trace) if row.end == row.end)  # not what never came to an end
    slices = [_slice(first[row.rank] + row.lane, name, row.start, row.end, args) for row, name, args in bars]
    listed = [*_tracks(used, first), *slices, *_memory(trace), *_messages(trace, first)]
    return {"traceEvents": listed, "displayTimeUnit": "ms"}


def _tracks(used: np.ndarray, first: list[int]) -> Iterator[Event]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "d2lps"}}
    for rank, count in enumerate(used.tolist()):
        for lane in range(count):
            name = f"rank {rank}, beside: {lane}" if lane else f"rank {rank}"
            yield {"ph": "M", "pid": 0, "tid": first[rank] + lane, "name": "thread_name", "args": {"name": name}}


def _slice(track: int, name: str, start: float, end: float, args: Event) -> Event:
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def _rows(table: Columns) -> Iterator[SimpleNamespace]:
    """Each with its columns by name."""
    for row in zip(*(column.tolist() for column in table.values()), strict=True):
        yield SimpleNamespace(**dict(zip(table, row, strict=True)))


def _bars(trace: Tables) -> Iterator[tuple[SimpleNamespace, str, Event]]:
    """Waits, arithmetic, blocks of computing and sleeps: (when and where, name, what else is known)."""
    for row in _rows(trace.waits):
        action = ACTIONS[row.action]
        whom = f" {'to' if action == 'send' else 'from'} {row.peer}" if row.peer >= 0 else ""
        yield row, action + whom, {"bytes": row.nbytes, "step": trace.steps[row.step]}
    for row in _rows(trace.locals):
        yield row, trace.ops[row.op].lower(), {"bytes": row.length, "step": trace.steps[row.step]}
    for row in _rows(trace.spans):
        if trace.kinds[row.kind] != "memory":
            known = {name: value for name, value in (("flops", row.flops), ("bytes", row.nbytes)) if value == value}
            yield row, trace.labels[row.label] or trace.kinds[row.kind], known


def _memory(trace: Tables) -> Iterator[Event]:
    """How much each rank holds, whenever that changes."""
    changes = []
    for row in _rows(trace.spans):
        if trace.kinds[row.kind] == "memory" and row.start != row.end:
            back = [(row.end, -row.nbytes, row.rank)] if row.end == row.end else []  # it may never be given back
            changes += [(row.start, row.nbytes, row.rank), *back]
    held = [0.0] * trace.ranks
    for t, nbytes, rank in sorted(changes):  # at one moment what is given back comes first
        held[rank] += nbytes
        yield {"ph": "C", "pid": 0, "name": f"memory of rank {rank}", "ts": t * 1e6, "args": {"bytes": held[rank]}}


def _messages(trace: Tables, first: list[int]) -> Iterator[Event]:
    """An arrow from where the sender was ready to where the receiver had it; it needs a slice, if only a dot, at each end."""
    for index, row in enumerate(_rows(trace.messages)):
        if row.end == row.end:  # not one that was never waited for
            arrow = {"pid": 0, "cat": "message", "name": "message", "id": index}
            tail, tip = first[row.src] + row.src_lane, first[row.dst] + row.dst_lane
            yield _slice(tail, f"to {row.dst}", row.sent, row.sent, {})
            yield {"ph": "s", "tid": tail, "ts": row.sent * 1e6, **arrow}
            yield _slice(tip, f"from {row.src}", row.end, row.end, {})
            yield {"ph": "f", "bp": "e", "tid": tip, "ts": row.end * 1e6, **arrow}
