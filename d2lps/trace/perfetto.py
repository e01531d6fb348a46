"""A trace in Chrome's trace event format: one lane a rank, its waits and its arithmetic as slices, messages as arrows.

The format is a list of small dictionaries, times in microseconds:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2lps.trace.recorder import ACTIONS

if TYPE_CHECKING:
    from d2lps.trace.columns import Tables


def save(trace: Tables, path: str | Path) -> Path:
    """Write the events to `path` and return it."""
    path = Path(path)
    path.write_text(json.dumps(events(trace)))
    return path


def events(trace: Tables) -> dict[str, Any]:
    return {"traceEvents": [*_lanes(trace), *_waits(trace), *_locals(trace), *_messages(trace)], "displayTimeUnit": "ms"}


def _lanes(trace: Tables) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "d2lps"}}
    for rank in range(trace.ranks):
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}


def _slice(rank: int, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": int(rank), "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def _waits(trace: Tables) -> Iterator[dict[str, Any]]:
    w = trace.waits
    for rank, action, peer, nbytes, step, start, end in zip(
        *(w[name].tolist() for name in ("rank", "action", "peer", "nbytes", "step", "start", "end")), strict=True
    ):
        whom = f" {'to' if ACTIONS[action] == 'send' else 'from'} {peer}" if peer >= 0 else ""
        yield _slice(rank, f"{ACTIONS[action]}{whom}", start, end, bytes=nbytes, step=trace.steps[step])


def _locals(trace: Tables) -> Iterator[dict[str, Any]]:
    t = trace.locals
    for rank, op, length, step, start, end in zip(
        *(t[name].tolist() for name in ("rank", "op", "length", "step", "start", "end")), strict=True
    ):
        yield _slice(rank, trace.ops[op].lower(), start, end, bytes=length, step=trace.steps[step])


def _messages(trace: Tables) -> Iterator[dict[str, Any]]:
    """An arrow from where the sender was ready to where the receiver had it; it needs a slice, if only a dot, at each end."""
    m = trace.messages
    for index, (src, dst, sent, end) in enumerate(zip(*(m[n].tolist() for n in ("src", "dst", "sent", "end")), strict=True)):
        if end == end:  # not one that was never waited for
            arrow = {"pid": 0, "cat": "message", "name": "message", "id": index}
            yield _slice(src, f"to {dst}", sent, sent)
            yield {"ph": "s", "tid": src, "ts": sent * 1e6, **arrow}
            yield _slice(dst, f"from {src}", end, end)
            yield {"ph": "f", "bp": "e", "tid": dst, "ts": end * 1e6, **arrow}
