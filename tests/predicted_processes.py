"""Plans on four processes of this machine, predicted and measured: where the band comes from that the chapter states.

    python tests/predicted_processes.py [rounds]

All plans are trained by the same four processes, a step of each in turn, so whatever else this machine does meets them alike.
Two of them are calibrated with, the others predicted. "worked" is the processors' time of a step, of all ranks together: who
waits for a core, or for a message, does not count.

What no prediction knows: where ranks share cores, one that waits leaves its core to another. So a pipeline's bubble costs little
on fewer cores than ranks, and is predicted in full: medians on two busy cores, with a pipeline, were 0.8 to 1.7 of what was
measured, without one 0.5 to 1.1.
"""

import sys
import time
from functools import partial
from statistics import median

import torch

import d2lps
from d2lps import Communicator
from d2lps.parallel import Plan, Trainer, Transformer, calibrate, predict, text
from d2lps.parallel.prediction.calibrate import measured

SMALL, BATCH = Transformer(layers=4, hidden=128, heads=4, vocab=96, sequence=64), 16
plan = partial(Plan, precision="fp32")
FITTED = [plan(dp=4, micro_batch=1), plan(dp=4, micro_batch=4)]
PREDICTED = [
    plan(dp=4, micro_batch=2), plan(dp=4, micro_batch=2, overlap=False), plan(dp=4, micro_batch=4, zero=1),
    plan(dp=4, micro_batch=4, zero=3), plan(tp=4, micro_batch=8), plan(dp=2, tp=2, micro_batch=4),
    plan(dp=2, cp=2, micro_batch=4), plan(dp=2, pp=2, micro_batch=2), plan(pp=4, micro_batch=2),
    plan(pp=4, micro_batch=2, schedule="gpipe"), plan(dp=2, pp=2, micro_batch=2, schedule="interleaved", interleave=2),
]  # fmt: skip


def in_turn(comm: Communicator, plans: list[Plan], rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """Of each plan the seconds of its steps, and what this rank's processor worked for them."""
    trainers = [Trainer(comm, SMALL, plan, text(64), BATCH, partial(torch.optim.Adam, lr=1e-3)) for plan in plans]
    laps: list[list[float]] = [[] for _ in plans]
    worked: list[list[float]] = [[] for _ in plans]
    for round_ in range(-1, rounds):
        for trainer, lap, work in zip(trainers, laps, worked, strict=True):
            comm.barrier()
            start, begun = comm.now(), time.process_time()
            trainer.step()
            busy = time.process_time() - begun
            comm.barrier()
            if round_ >= 0:  # in the first step memory is new
                lap.append(comm.now() - start)
                work.append(busy)
    return laps, worked


def main(rounds: int) -> None:
    here = d2lps.run(measured, 4)[0]
    device = here.device(here.devices[0])
    print(f"{device.flops / 1e9:.3g} GFLOP/s, {device.memory_bandwidth / 1e9:.3g} GB/s; ", end="")
    print(f"links {here.bandwidth[0] / 1e9:.3g} GB/s, {here.latency[0] * 1e6:.3g} us")
    plans = FITTED + PREDICTED
    run = d2lps.run(in_turn, 4, plans, rounds)
    laps = run[0][0]
    calibration = calibrate([(SMALL, plan, BATCH, median(lap)) for plan, lap in zip(FITTED, laps, strict=False)], here)
    print(f"efficiency {calibration.efficiency:.3g}, overhead {calibration.overhead * 1e6:.3g} us")
    for number, plan in enumerate(plans):
        told = predict(SMALL, plan, here, BATCH, calibration)
        ratios = sorted(told.time / lap for lap in laps[number])
        worked = sum(median(rank[1][number]) for rank in run)
        where = ", ".join(f"{label} {1e3 * seconds:.0f}" for label, seconds in told.parts.items() if seconds > 5e-4)
        took = f"{1e3 * median(laps[number]):6.1f} (least {1e3 * min(laps[number]):6.1f})"
        print(f"{str(plan).replace(' precision=fp32', ''):58} {1e3 * told.time:6.1f} ms, measured {took}, ", end="")
        print(f"ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), worked {1e3 * worked:.0f}; {where}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
