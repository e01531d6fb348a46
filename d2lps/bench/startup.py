"""From the call to the end of the first all-reduce, of four ranks: `d2lps.run` beside torch.multiprocessing.spawn."""

import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.launch import run

RANKS = 4


def table(repeats: int = 5) -> str:
    """Medians, the two in turn, and their ratio; the first call of `d2lps.run` starts the fork server and stands apart."""
    first = _ours()
    ours, spawned = [], []
    for _ in range(repeats):
        ours.append(_ours())
        spawned.append(_spawned())
    fast, slow = statistics.median(ours), statistics.median(spawned)
    lines = [f"first all-reduce of {RANKS} ranks, seconds from the call (median of {repeats}, and the range)"]
    lines.append(f"{'torch.multiprocessing.spawn':34}{slow:8.3f}   {min(spawned):.3f} to {max(spawned):.3f}")
    lines.append(f"{'d2lps.run, the first':34}{first:8.3f}")
    lines.append(f"{'d2lps.run, from the second on':34}{fast:8.3f}   {min(ours):.3f} to {max(ours):.3f}")
    lines.append(f"ratio {slow / fast:.1f}")
    return "\n".join(lines)


def _reduced(comm: Communicator) -> float:
    all_reduce(comm, torch.ones(1), algorithm="native")
    return time.monotonic()


def _ours() -> float:
    start = time.monotonic()
    return float(max(run(_reduced, RANKS, backend="gloo"))) - start


def _spawned() -> float:
    """The clock is the machine's, so the moment at which the last rank had the sum can be read in another process."""
    ends = mp.get_context("spawn").SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = time.monotonic()
    mp.spawn(_spawned_rank, (port, ends), RANKS)
    return max(ends.get() for _ in range(RANKS)) - start


def _spawned_rank(rank: int, port: int, ends: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(1))
    ends.put(time.monotonic())
    dist.destroy_process_group()
