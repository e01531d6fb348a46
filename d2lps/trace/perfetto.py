"""A trace in Chrome's trace event format: a track for each lane, what it does as slices, messages as arrows, memory as curves.

The format is a list of small dictionaries, times in microseconds:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from d2lps.trace.lanes import lanes
from d2lps.trace.recorder import ACTIONS
from d2lps.trace.tables import Columns, Tables

Event = dict[str, Any]
Bar = tuple[int, int, str, float, float, Event]  # rank, lane, name, start, end (s), and what else is known


def events(trace: Tables) -> dict[str, Any]:
    """{"traceEvents": [...]}: the names of the tracks, then what happened."""
    used = lanes(trace)
    first = (np.cumsum(used) - used).tolist()  # the track of each rank's own thread; what runs beside it lies below it
    bars = chain(_waits(trace), _locals(trace), _spans(trace))
    slices = [_slice(first[rank] + lane, name, start, end, args) for rank, lane, name, start, end, args in bars if end == end]
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


def _rows(table: Columns, *columns: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].tolist() for name in columns), strict=True)


def _waits(trace: Tables) -> Iterator[Bar]:
    columns = ("rank", "lane", "action", "peer", "nbytes", "step", "start", "end")
    for rank, lane, action, peer, nbytes, step, start, end in _rows(trace.waits, *columns):
        whom = f" {'to' if ACTIONS[action] == 'send' else 'from'} {peer}" if peer >= 0 else ""
        yield rank, lane, f"{ACTIONS[action]}{whom}", start, end, {"bytes": nbytes, "step": trace.steps[step]}


def _locals(trace: Tables) -> Iterator[Bar]:
    columns = ("rank", "lane", "op", "length", "step", "start", "end")
    for rank, lane, op, length, step, start, end in _rows(trace.locals, *columns):
        yield rank, lane, trace.ops[op].lower(), start, end, {"bytes": length, "step": trace.steps[step]}


def _spans(trace: Tables) -> Iterator[Bar]:
    """Blocks of computing, with what they computed where it is known, and sleeps."""
    columns = ("rank", "lane", "kind", "label", "flops", "nbytes", "start", "end")
    for rank, lane, kind, label, flops, nbytes, start, end in _rows(trace.spans, *columns):
        if trace.kinds[kind] != "memory":
            known = {name: value for name, value in (("flops", flops), ("bytes", nbytes)) if value == value}
            yield rank, lane, trace.labels[label] or trace.kinds[kind], start, end, known


def _memory(trace: Tables) -> Iterator[Event]:
    """How much each rank holds, whenever that changes."""
    changes = []
    for rank, kind, nbytes, start, end in _rows(trace.spans, "rank", "kind", "nbytes", "start", "end"):
        if trace.kinds[kind] == "memory":
            changes += [(start, nbytes, rank)] + [(end, -nbytes, rank)] * (end == end)  # it may never be given back
    held = [0.0] * trace.ranks
    for t, nbytes, rank in sorted(changes):  # at one moment what is given back comes first
        held[rank] += nbytes
        yield {"ph": "C", "pid": 0, "name": f"memory of rank {rank}", "ts": t * 1e6, "args": {"bytes": held[rank]}}


def _messages(trace: Tables, first: list[int]) -> Iterator[Event]:
    """An arrow from where the sender was ready to where the receiver had it; it needs a slice, if only a dot, at each end."""
    columns = ("src", "src_lane", "dst", "dst_lane", "sent", "end")
    for index, (src, src_lane, dst, dst_lane, sent, end) in enumerate(_rows(trace.messages, *columns)):
        if end == end:  # not one that was never waited for
            arrow = {"pid": 0, "cat": "message", "name": "message", "id": index}
            tail, tip = first[src] + src_lane, first[dst] + dst_lane
            yield _slice(tail, f"to {dst}", sent, sent, {})
            yield {"ph": "s", "tid": tail, "ts": sent * 1e6, **arrow}
            yield _slice(tip, f"from {src}", end, end, {})
            yield {"ph": "f", "bp": "e", "tid": tip, "ts": end * 1e6, **arrow}
