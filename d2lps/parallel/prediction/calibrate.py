"""What only measuring tells: this machine as a described one, and the two numbers of a software that no data sheet has."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import log
from statistics import median

import numpy as np
import torch

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp
from d2lps.comm.memory import of_this_machine
from d2lps.parallel.prediction.predict import Prediction, described
from d2lps.parallel.prediction.program import Calibration
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.transformer import Transformer
from d2lps.topology import Device, Topology, star
from d2lps.topology.device import is_number

Row = tuple[Transformer, Plan, int, float]  # with a batch of so many sequences, a step took so many seconds
STEPS = 8

ROUNDS = 7
SMALL, LARGE = 1 << 10, 1 << 22  # bytes of the all-reduces
SQUARE, COPIED = 256, 1 << 24  # rows and columns of a matrix; bytes of a copy, more than a cache holds


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


# ---- this machine, as what each of its processes can do while all the others do the same --------------------------------


def measured(comm: Communicator) -> Topology:
    """As many devices around a switch as there are ranks, each as fast as a rank is while all of them work at once.

    >>> here = d2lps.run(measured, 4)[0]                                        # doctest: +SKIP
    >>> predict(small, Plan(dp=2, tp=2, precision="fp32"), here, batch=8)       # doctest: +SKIP

    flops: of FP32 matrix products; memory_bandwidth: of copies; bandwidth and latency of a link: those with which a simulated
    ring all-reduce takes what a real one did, of 4 MB and of 1 KB. Each is a median of 7, and the mean over the ranks, so that
    all get the same. memory: an equal part of the machine's. ValueError for one rank, that has no link. Cost: about two seconds.
    """
    if comm.size == 1:
        raise ValueError("one rank alone has no link that could be measured")
    square, old, new = torch.randn(SQUARE, SQUARE), torch.ones(COPIED // 4), torch.empty(COPIED // 4)
    small, large = torch.ones(SMALL // 4), torch.ones(LARGE // 4)
    multiplying = _seconds(comm, 64, lambda: square @ square, flops=2 * SQUARE**3, bytes=0)
    copying = _seconds(comm, 8, lambda: new.copy_(old), flops=0, bytes=2 * COPIED)
    short, long = _seconds(comm, 16, lambda: all_reduce(comm, small)), _seconds(comm, 2, lambda: all_reduce(comm, large))
    beta, steps = max(long - short, 1e-9) / (LARGE - SMALL), 2 * (comm.size - 1)  # of a ring: each a p-th of the bytes
    latency = max(short - beta * SMALL, 0.0) / steps / 2  # a step passes two links
    device = Device(2 * SQUARE**3 / multiplying, of_this_machine() / comm.size, 2 * COPIED / copying)
    return star(comm.size, steps / comm.size / beta, latency, device)


def _seconds(comm: Communicator, count: int, work: Callable[[], object], **cost: float) -> float:
    """Of one of so many, one after another, on all ranks at once: long enough for ranks that share a core to take turns."""
    laps = []
    for _ in range(ROUNDS):
        comm.barrier()
        start = comm.now()
        for _ in range(count):
            with comm.compute("measuring", **cost) if cost else nullcontext():
                work()
        laps.append((comm.now() - start) / count)
    mean = torch.tensor(median(laps), dtype=torch.float64)
    all_reduce(comm, mean, ReduceOp.AVG)
    return mean.item()
