"""Incast with the store's own servers, on the shaped hosts of test_shaped_hosts: what *From ring to server* shows.

    python tests/incast_on_hosts.py 5ms 40ms 200ms      # as root; for each such queue, the seconds of seven exchanges, sorted

Each host runs one process, or, where machines are workers and servers, two; all links have 50 Mb/s each way.
"""

import sys
from functools import partial

import test_shaped_hosts as box
import torch

import d2lps
from d2lps import Communicator, kvstore
from d2lps.collectives import all_reduce

NUMEL, REPEATS = 625_000, 7  # 2.5 MB
PLANS = {  # the host of each rank, and how many of the ranks are workers; the others are servers
    "ring of five": ([0, 1, 2, 3, 4], 0),
    "four workers, one server": ([0, 1, 2, 3, 4], 4),
    "five machines, colocated": ([0, 1, 2, 3, 4] * 2, 5),
    "four workers, four servers": ([0, 1, 2, 3, 4, 5, 6, 7], 4),
}


def exchange(kv: kvstore.KVWorker) -> list[float]:
    gradient, weights, laps = torch.ones(NUMEL), torch.zeros(NUMEL), []
    kv.init("weights", weights)
    for _ in range(REPEATS):
        kv.barrier()
        start = kv.comm.now()
        kv.push("weights", gradient)
        kv.clock()
        kv.pull("weights", weights).wait()
        laps.append(kv.comm.now() - start)
    return laps


def ring(comm: Communicator) -> list[float]:
    tensor, laps = torch.ones(NUMEL), []
    for _ in range(REPEATS):
        comm.barrier()
        start = comm.now()
        all_reduce(comm, tensor, algorithm="ring")
        laps.append(comm.now() - start)
    return laps


def job(plan: str, rank: int, hosts: list[str], port: int) -> dict[str, list[float]]:
    """One rank's process, on its host."""
    homes, workers = PLANS[plan]
    box.become(rank, len(homes), hosts[homes[rank]], port)
    if workers:
        laps = kvstore.run(exchange, workers, len(homes) - workers, split=1000).results
    else:
        laps = d2lps.run(ring, len(homes)).results
    return {plan: sorted(round(max(lap), 3) for lap in zip(*laps, strict=True))}


if __name__ == "__main__" and sys.argv[1] == "hosts":
    for number, (plan, (homes, _)) in enumerate(PLANS.items()):
        box.forked(partial(job, plan, rank, sys.argv[2:], 29500 + number) for rank in range(len(homes)))
elif __name__ == "__main__":
    for queue in sys.argv[1:]:
        box.on_hosts(__file__, 8, f"tbf rate {box.MEGABITS}mbit burst 32kb latency {queue}")
