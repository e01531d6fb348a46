"""A trace with lanes, made by hand: what a run tells, put into lane 1, and beside it in lane 0 what a test says."""

from copy import copy
from math import nan

import numpy as np

from d2lps.trace import Trace

KINDS = ["compute", "sleep", "memory"]
Span = tuple[int, str, str, float, float] | tuple[int, str, str, float, float, float]  # rank, kind, label, start, end[, bytes]


def beside(trace: Trace, *spans: Span, lane: int = 1) -> Trace:
    """`beside(trace, (0, "compute", "backward", 0.0, 2.0))`: rank 0 computes while all of `trace` happens in lane 1."""
    out = copy(trace)
    m, local, waits = trace.messages, trace.locals, trace.waits
    out.messages = m | {name: np.full(len(m["src"]), lane) for name in ("src_lane", "dst_lane")}
    out.locals, out.waits = (table | {"lane": np.full(len(table["rank"]), lane)} for table in (local, waits))
    rows = [(*span, nan)[:6] for span in spans]
    ranks, kinds, labels, starts, ends, nbytes = zip(*rows, strict=True) if rows else ([],) * 6
    out.kinds, out.labels = KINDS, list(dict.fromkeys(labels))
    whole = {"rank": ranks, "lane": [0] * len(rows), "seq": range(1, len(rows) + 1)}
    whole |= {"kind": [KINDS.index(kind) for kind in kinds], "label": [out.labels.index(label) for label in labels]}
    parts = {"flops": [nan] * len(rows), "nbytes": nbytes, "start": starts, "end": ends}
    out.spans = {name: np.array(list(column), dtype=np.int64) for name, column in whole.items()}
    out.spans |= {name: np.array(list(column), dtype=np.float64) for name, column in parts.items()}
    return out
