"""From one log a rank to one trace: find for every send the receive that it met.

The rule is the communicator's own: first in, first out, by (group, source, destination, tag). So the k-th send of such
a stream meets its k-th receive, and the whole matching is one sort of each side.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from d2lps.trace.buffers import Buffer
from d2lps.trace.recorder import Log
from d2lps.trace.table import Names
from d2lps.trace.trace import Trace

Columns = dict[str, np.ndarray]


def merge(logs: Sequence[Log], ranks: int) -> Trace:
    """One Trace of the logs of all ranks, its clock starting when the first rank of a machine did."""
    steps, groups, ops = Names(), Names(), Names()
    buffers: list[Buffer] = []
    origins: dict[str, float] = {}
    for log in logs:
        origins[log.machine] = min(origins.get(log.machine, log.started), log.started)
    sides: dict[str, list[Columns]] = {"sends": [], "recvs": [], "locals": [], "waits": []}
    for log in logs:
        numbers = {
            "step": np.array([steps.number(s) for s in log.steps], dtype=np.int64),
            "group": np.array([groups.number(s) for s in log.groups], dtype=np.int64),
            "op": np.array([ops.number(s) for s in log.ops], dtype=np.int64),
        }
        for side, tables in sides.items():
            table = _rebased(getattr(log, side), numbers, len(buffers), origins[log.machine])
            tables.append(table | {"rank": np.full(len(table["seq"]), log.rank, dtype=np.int64)})
        buffers += [replace(buffer) for buffer in log.buffers]
    sends, recvs, locals_, waits = (_stacked(tables) for tables in sides.values())
    messages, unmatched = _meet(sends, recvs, ranks)
    return Trace(ranks, messages, locals_, waits, buffers, steps.strings, groups.strings, ops.strings, unmatched)


def _rebased(columns: Columns, numbers: dict[str, np.ndarray], first_buffer: int, origin: float) -> Columns:
    """Columns that speak of this rank's strings, buffers and clock, in the whole run's."""
    out = {}
    for name, column in columns.items():
        if name in numbers:
            column = numbers[name][column]
        elif name in ("buffer", "from_buffer"):
            column = column + first_buffer
        elif column.dtype == np.float64:
            column = column - origin
        out[name] = column
    return out


def _stacked(tables: list[Columns]) -> Columns:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _meet(sends: Columns, recvs: Columns, ranks: int) -> tuple[Columns, int]:
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
    messages |= {f"src_{name}": sends[name][s] for name in ("buffer", "offset", "length", "seq", "done_seq")}
    messages |= {f"dst_{name}": recvs[name][r] for name in ("buffer", "offset", "length", "seq", "done_seq")}
    messages |= {"sent": sends["posted"][s], "posted": recvs["posted"][r], "start": start[order], "end": recvs["done"][r]}
    return messages, len(sends["seq"]) + len(recvs["seq"]) - 2 * len(s)


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
