"""What every rank did when, lane by lane: the bars that all pictures of a run draw.

Lane 0 is a rank's own thread of control; in lanes 1, 2, ... runs what `Communicator.start` has set going beside it.
"""

import numpy as np

from d2lps.trace.tables import Columns, Tables

Bars = Columns  # rank, lane, start, end (seconds), label


def lanes(trace: Tables) -> np.ndarray:
    """How many lanes each rank used: 1 where nothing ran beside it."""
    m, used = trace.messages, np.ones(trace.ranks, dtype=np.int64)
    ends = [(m["src"], m["src_lane"]), (m["dst"], m["dst_lane"])]
    for rank, lane in ends + [(table["rank"], table["lane"]) for table in (trace.locals, trace.waits, trace.spans)]:
        np.maximum.at(used, rank, lane + 1)
    return used


def bars(trace: Tables) -> dict[str, Bars]:
    """{what a lane did: its bars}, in the order of painting, since one may wait or add up while it computes; "moving" are
    messages on their way, once in the lane that sends and once in the lane that receives."""
    kinds = np.array(trace.kinds)[trace.spans["kind"]]
    m = trace.messages
    halves = [{"rank": m[end], "lane": m[f"{end}_lane"], "start": m["start"], "end": m["end"]} for end in ("src", "dst")]
    copies = np.array(trace.ops, dtype=object)[trace.locals["op"]] == "COPY"
    labels = np.array(trace.labels, dtype=object)[trace.spans["label"]]
    return {
        "computing": _bars(trace.spans, kinds == "compute", labels),
        "sleeping": _bars(trace.spans, kinds == "sleep", labels),
        "waiting": _bars(trace.waits),
        "combining": _bars(trace.locals, ~copies),
        "copying": _bars(trace.locals, copies),
        "moving": _bars({name: np.concatenate([half[name] for half in halves]) for name in halves[0]}),
    }


def _bars(table: Bars, chosen: np.ndarray | None = None, labels: np.ndarray | None = None) -> Bars:
    """The rows that came to an end."""
    columns = {name: table[name] for name in ("rank", "lane", "start", "end")}
    columns["label"] = np.full(len(columns["rank"]), "", dtype=object) if labels is None else labels
    ended = ~np.isnan(columns["end"]) & (True if chosen is None else chosen)
    return {name: column[ended] for name, column in columns.items()}
