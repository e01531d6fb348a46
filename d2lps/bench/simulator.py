"""How much wall clock a simulation takes: a ring all-reduce of a thousand ranks, and how it grows."""

import resource
import sys
import time

import torch

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.simulator import simulate
from d2lps.topology import Topology, fat_tree, star

_LINK = 1.25e9  # bytes/s: 10 Gb/s
_LATENCY = 1e-6

# On a star of 1024, what SimGrid's rules give by hand: 2 x 1023 steps of 2 us and 160,000 B at 1.25 GB/s.
EXACT = 2 * 1023 * (2 * _LATENCY + 160_000 / _LINK)


def table() -> str:
    """Wall clock, messages, virtual time; then growth with ranks, and with the links of the network."""
    lines = [f"{'ring all-reduce':34}{'floats':>12}{'messages':>11}{'virtual s':>12}{'wall s':>8}{'us/message':>12}"]
    for name, topology, floats in _cases():
        lines.append(_row(name, topology, floats))
    lines.append(f"exact virtual time of the first row: {EXACT:.6f} s; largest memory of this process {_memory():.2f} GB")
    return "\n".join(lines)


def _cases() -> list[tuple[str, Topology, int]]:
    thousand = star(1024, _LINK, _LATENCY)
    cases = [("star, 1024 ranks, equal chunks", thousand, 40_960_000), ("star, 1024 ranks, uneven chunks", thousand, 40_000_000)]
    cases += [(f"star, {p} ranks", star(p, _LINK, _LATENCY), 40_000 * p) for p in (64, 256)]
    return [*cases, ("fat tree, 128 ranks, 6 hops", fat_tree(8, _LINK, _LATENCY), 40_000 * 128)]


def _row(name: str, topology: Topology, floats: int) -> str:
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.empty(floats, device=comm.device), algorithm="ring")

    start = time.perf_counter()
    run = simulate(work, topology, device="meta", trace=False)
    wall, messages = time.perf_counter() - start, 2 * len(run) * (len(run) - 1)
    return f"{name:34}{floats:>12,}{messages:>11,}{run.time:>12.6f}{wall:>8.2f}{wall / messages * 1e6:>12.2f}"


def _memory() -> float:
    """GB; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
