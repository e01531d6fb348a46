"""PyTorch's own ways to start four ranks, timed to the end of their first sum: `python starters.py`, nothing of ours in it.

For each line of its input, the name of a start method, it starts the ranks and prints the seconds.
"""

import multiprocessing
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4


def started(method: str) -> float:
    """The clock is the machine's, so the moment at which the last rank had the sum can be read in another process."""
    ends = mp.get_context(method).SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = time.monotonic()
    mp.start_processes(rank_of, (port, ends), RANKS, start_method=method)
    return float(max(ends.get() for _ in range(RANKS))) - start


def rank_of(rank: int, port: int, ends: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(1))
    ends.put(time.monotonic())
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["__main__", "torch.distributed"])
    for line in sys.stdin:
        print(started(line.strip()), flush=True)
