"""How often a large cluster stops, how often its job should save, and what share of the time then counts.

Everywhere in seconds: interval (of work between two checkpoints), save (what a checkpoint holds the job up), restart (from a
failure until the last checkpoint is loaded again), mtbf (the mean time between failures, those of an exponential distribution).
"""

from math import exp, expm1, log, sqrt

import torch

from d2lps.arguments import whole
from d2lps.comm import Communicator
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import star
from d2lps.topology.device import is_number


def mtbf(devices: int, each: float) -> float:
    """Of so many devices that all must work, and fail every `each` seconds by themselves: `mtbf(1000, each=3.6e6) == 3600`."""
    _check(devices=devices, each=each)
    return each / devices


def young(save: float, mtbf: float) -> float:
    """sqrt(2 save mtbf): half of an interval is lost at a failure, a checkpoint paid in each. Source: Young 1974.

    >>> young(save=60, mtbf=3 * 3600) / 60          # a minute to save, three hours from failure to failure: every 19 minutes
    18.973665961010276
    """
    _check(save=save, mtbf=mtbf)
    return sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Young's with the next terms, for failures that are not much rarer than checkpoints are long; mtbf, from save = 2 mtbf on.

    >>> round(daly(save=300, mtbf=15 * 60) / 60, 1), round(young(save=300, mtbf=15 * 60) / 60, 1)
    (9.1, 12.2)

    Source: Daly 2006, whose figures 3 to 5 have 117, 57 and 9.1 minutes for a save of 5 and an mtbf of 24 h, 6 h and 15 min.
    """
    _check(save=save, mtbf=mtbf)
    part = save / (2 * mtbf)
    return sqrt(2 * save * mtbf) * (1 + sqrt(part) / 3 + part / 9) - save if part < 1 else mtbf


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """The share of the time that ends up in the model, in the long run: interval / (M e^(R/M) (e^((interval + save)/M) - 1)).

    >>> round(goodput(interval=20 * 60, save=60, restart=600, mtbf=3 * 3600), 3)
    0.849

    Failures may come while it saves and while it restarts. Source: Daly 2006.
    """
    _check(interval=interval, save=save, mtbf=mtbf)
    if not is_number(restart):
        raise ValueError(f"restart={restart!r} is not a number of seconds from 0 up")
    segment = (interval + save) / mtbf
    if max(segment, restart / mtbf) > 700:
        return 0.0  # it never gets through
    return interval / (mtbf * exp(restart / mtbf) * expm1(segment))


def lives(
    jobs: int, work: float, interval: float, save: float, restart: float, mtbf: float, trace: bool = False
) -> Run:  # fmt: skip
    """So many jobs in virtual time, each until its `work` is saved, with failures drawn by chance: their goodputs.

    >>> [round(share, 2) for share in lives(2, 30 * 86400, interval=20 * 60, save=60, restart=600, mtbf=3 * 3600)]
    [0.85, 0.85]

    Failures come at the same times whatever the interval. A trace shows "train", work that is kept; between, unnamed, the job
    saves, loses what a failure takes, and restarts. ValueError for jobs that would hardly ever get through an interval.
    Cost: some 10 us for each interval and each failure.
    """
    whole("jobs", jobs)
    if goodput(interval, save, restart, mtbf) < 1e-3:
        raise ValueError(f"interval={interval!r}, save={save!r} s: with a failure every {mtbf!r} s it would never end")
    _check(work=work)
    return simulate(_live, star(jobs, 1.0), work, interval, save, restart, mtbf, trace=trace)


def _live(comm: Communicator, work: float, interval: float, save: float, restart: float, mtbf: float) -> float:
    start, done, left = comm.now(), 0.0, _chance(comm, mtbf)
    while done < work:
        step = min(interval, work - done)
        if step + save < left:
            comm.sleep(step, "train")
            comm.sleep(save)
            left, done = left - step - save, done + step
            continue
        comm.sleep(left)
        while (left := _chance(comm, mtbf)) < restart:
            comm.sleep(left)
        comm.sleep(restart)
        left -= restart
    return work / (comm.now() - start)


def _chance(comm: Communicator, mtbf: float) -> float:
    """Seconds until the next failure."""
    return -mtbf * log(1 - torch.rand((), generator=comm.generator, dtype=torch.float64).item())


def _check(**given: float) -> None:
    for name, value in given.items():
        if not (is_number(value) and value):
            raise ValueError(f"{name}={value!r} is not a number above 0")
