"""This machine as a described one: what each of its processes can do while all the others do the same."""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp
from d2lps.comm.memory import of_this_machine
from d2lps.topology import Device, Topology, star

ROUNDS = 7
SMALL, LARGE = 1 << 10, 1 << 22  # bytes of the all-reduces
SQUARE, COPIED = 256, 1 << 24  # rows and columns of a matrix; bytes of a copy, more than a cache holds


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
