"""From measured steps to the two numbers that no data sheet has."""

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

from d2lps.parallel.prediction.calibration import Calibration
from d2lps.parallel.prediction.predict import Prediction, described
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.transformer import Transformer
from d2lps.topology import Topology
from d2lps.topology.device import is_number

Row = tuple[Transformer, Plan, int, float]  # with a batch of so many sequences, a step took so many seconds
STEPS = 8


def calibrate(rows: Sequence[Row], cluster: Topology, start: Calibration | None = None) -> Calibration:
    """The efficiency and the overhead with which predictions come nearest to measured steps, in logarithms, least squares.

    >>> measured = [(gpt3, Plan(dp=4, tp=8, pp=16), 1536, 55.7), (small, Plan(dp=64), 512, 3.57)]       # doctest: +SKIP
    >>> calibrate(measured, dgx_a100_pod(64))                                                           # doctest: +SKIP
    Calibration(efficiency=0.71, overhead=0.0001)

    rows: of (transformer, plan, batch, seconds), all by one software on devices of `cluster`; one step gives the efficiency, two
    or more the overhead too. start: what stays as it is of it: memory, fused_attention, wide_gradients. Rows that are fitted say
    nothing about how good a prediction is: leave them out of a comparison. ValueError for rows without a time.
    """
    if not rows:
        raise ValueError("calibrate needs one measured row at least, of (transformer, plan, batch, seconds)")
    for *_, seconds in rows:
        if not (is_number(seconds) and seconds):
            raise ValueError(f"a step of seconds={seconds!r} was never measured")
    start = start or Calibration()
    found = np.array([1 / start.efficiency, start.overhead])
    free = min(len({row[:3] for row in map(tuple, rows)}), 2)  # a step that was measured twice is still one

    def errors(numbers: np.ndarray) -> np.ndarray:
        calibration = made(numbers)
        jobs = ((described(model, plan, cluster, batch, calibration), seconds) for model, plan, batch, seconds in rows)
        return np.array([log(Prediction(job, cluster).time / seconds) for job, seconds in jobs])

    def made(numbers: np.ndarray) -> Calibration:
        return replace(start, efficiency=float(1 / numbers[0]), overhead=float(numbers[1]))

    for _ in range(STEPS):  # Newton's: a step's time is nearly a straight line in 1 / efficiency and in the overhead
        now = errors(found)
        nudges = np.diag([1e-3 * found[0], 1e-6])[:free]
        slopes = np.array([(errors(found + nudge) - now) / nudge.sum() for nudge in nudges]).T
        before, found = found, _nearest(slopes, slopes @ found[:free] - now, found)
        if np.allclose(before, found, rtol=1e-6, atol=1e-9):
            break
    return made(found)


def _nearest(slopes: np.ndarray, wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The numbers whose slopes come nearest to what is wanted; if one would leave its bounds, it stays there."""
    best, free = found.copy(), slopes.shape[1]
    best[:free] = np.linalg.lstsq(slopes, wanted, rcond=None)[0]
    for number, least in ((1, 0.0), (0, 1.0)):
        if best[number] < least:
            best[number], other = least, slopes[:, [1 - number]] if free == 2 else slopes[:, :0]
            left = np.linalg.lstsq(other, wanted - slopes[:, number] * least, rcond=None)[0]
            best[[1 - number][: len(left)]] = left
    return np.maximum(best, (1.0, 0.0))
