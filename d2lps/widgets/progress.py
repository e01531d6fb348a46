"""How far an all-reduce has come, over time, from the origins of what every rank's memory holds."""

from itertools import groupby

import numpy as np

from d2lps.trace import Change, Origins, Trace
from d2lps.widgets.cells import Cells, inputs, seconds

Curve = list[tuple[float, float]]  # (t, share): the share from t on


def progress(trace: Trace) -> tuple[Curve, Curve]:
    """Two shares of the tensors that the ranks started with, whenever one of them changes: (complete, gathered).

    complete: of their bytes, those that hold the sum of all p ranks, each counted once. gathered: of the p summands that
    belong into each byte, those that are there, on average: 1/p at the start. A ring of 2 ranks, 4 s without latency:
    ([(0, 0), (2, 0.5), (4, 1)], [(0, 0.5), (2, 0.75), (4, 1)]).
    """
    origins = Origins(trace)
    cells = Cells(trace, origins, inputs(trace, origins), whole=True)
    if not cells.count:  # nobody had anything to add up
        return [(0.0, 1.0)], [(0.0, 1.0)]
    nbytes, everyone = np.concatenate([np.diff(cuts) for cuts in cells.cuts]), list(range(trace.ranks))
    full, summands = np.full(cells.count, trace.ranks == 1), np.ones(cells.count)
    complete: Curve = [(0.0, _mean(nbytes, full))]
    gathered: Curve = [(0.0, _mean(nbytes, summands) / trace.ranks)]

    def when(change: Change) -> float:
        return seconds(trace, change)

    for t, changes in groupby(sorted(origins.changes, key=when), key=when):
        for change in changes:
            for cell, pieces in cells.covered(change.into.buffer, change.pieces).items():
                ranks = cells.ranks(pieces)
                full[cell], summands[cell] = ranks == everyone, len(set(ranks))
        _note(complete, t, _mean(nbytes, full))
        _note(gathered, t, _mean(nbytes, summands) / trace.ranks)
    return complete, gathered


def _mean(nbytes: np.ndarray, values: np.ndarray) -> float:
    return float(nbytes @ values) / float(nbytes.sum())


def _note(curve: Curve, t: float, share: float) -> None:
    if abs(share - curve[-1][1]) > 1e-9:
        curve.append((t, share))
