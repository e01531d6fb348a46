"""What every lane of every rank does over time, as a player shows it under its pictures."""

from collections import defaultdict
from typing import Any

import numpy as np

from d2lps.trace import Trace
from d2lps.trace.lanes import bars, lanes, moving

_FINEST = 1 / 1000  # of the whole time: what is shorter is joined to its neighbour


def strip(trace: Trace, end: float, whole: bool = True) -> dict[str, Any]:
    """{"strip": [of each lane {"rank", "bars": [{"kind", "label", "times": "start end start end ..."}]}], "end": s}.

    whole: until the last bar ends, however late; else until `end`. Empty where there is nothing to see beside messages and
    waits: no block of computing, no sleep, nothing that ran beside a rank.
    """
    drawn, used = bars(trace), lanes(trace)
    if used.max(initial=1) == 1 and not len(drawn["computing"]["rank"]) + len(drawn["sleeping"]["rank"]):
        return {}
    if whole:
        end = float(max([end, *(table["end"].max(initial=0.0) for table in drawn.values())]))
    found: list[dict[str, Any]] = [{"rank": rank, "bars": []} for rank in range(trace.ranks) for _ in range(used[rank])]
    first = np.cumsum(used) - used  # the number of each rank's lane 0 among all lanes
    for kind, table in {**drawn, "moving": moving(trace)}.items():
        times: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        columns = first[table["rank"]] + table["lane"], table["label"], table["start"], np.minimum(table["end"], end)
        for lane, label, start, until in zip(*(column.tolist() for column in columns), strict=True):
            if start < until:
                times[lane, label].append((start, until))
        for (lane, label), pairs in times.items():
            text = " ".join(f"{t:.6g}" for pair in _joined(sorted(pairs), end * _FINEST) for t in pair)
            found[lane]["bars"].append({"kind": kind, "label": label, "times": text})
    return {"strip": found, "end": end}


def _joined(pairs: list[tuple[float, float]], least: float) -> list[list[float]]:
    """`_joined([(0, 4), (2, 5), (5, 7), (7.1, 7.2)], 1) == [[0, 5], [5, 7.2]]`: what overlaps, and what is short and near."""
    out: list[list[float]] = []
    for start, end in pairs:
        if out and (start < out[-1][1] or max(end - start, start - out[-1][1]) < least):
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out
