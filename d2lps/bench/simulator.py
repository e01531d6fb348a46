"""How much wall clock a simulation takes: a ring all-reduce of a thousand ranks, and how it grows with ranks and with links."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.simulator import simulate
from d2lps.topology import Topology, fat_tree, star

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINK = 1.25e9  # bytes/s: 10 Gb/s
_LATENCY = 1e-6
_CHUNK = 40_000  # floats: those of the first case on 1024 ranks

# On a star of 1024, by hand: 2 x 1023 steps of 2 us and 160,000 B at 1.25 GB/s.
EXACT = 2 * 1023 * (2 * _LATENCY + 160_000 / _LINK)


class Row(NamedTuple):
    """One simulated ring all-reduce."""

    name: str
    ranks: int
    links: int  # of the whole network, each direction counted
    floats: int
    messages: int
    virtual: float  # seconds
    wall: float  # seconds

    @property
    def per_message(self) -> float:
        """Microseconds of wall clock."""
        return self.wall / self.messages * 1e6


def measure(name: str, topology: Topology, floats: int, ranks: int | None = None) -> Row:
    """Simulate a ring all-reduce of so many floats, without contents, and take the time."""

    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.empty(floats, device=comm.device), algorithm="ring")

    start = time.perf_counter()
    run = simulate(work, topology, ranks=ranks, device="meta", trace=False)
    wall, size = time.perf_counter() - start, len(run)
    return Row(name, size, len(topology.bandwidth), floats, 2 * size * (size - 1), run.time, wall)


def _best(name: str, topology: Topology, floats: int, ranks: int | None = None) -> Row:
    """Of short simulations the least disturbed one of three."""
    rows = [measure(name, topology, floats, ranks) for _ in range(3 if len(topology.devices) <= 256 or ranks else 1)]
    return min(rows, key=lambda row: row.wall)


def with_ranks(sizes: Sequence[int] = (64, 128, 256, 512, 1024)) -> list[Row]:
    """The same chunks on stars of more and more ranks: two links a rank."""
    return [_best(f"star, {p} ranks", star(p, _LINK, _LATENCY), _CHUNK * p) for p in sizes]


def with_links(arities: Sequence[int] = (8, 10, 12, 14)) -> list[Row]:
    """The same 64 ranks in fat trees of more and more links, almost all of which carry nothing.

    Routes are found beforehand: a topology finds each once, however many messages take it.
    """
    rows = []
    for k in arities:
        tree = fat_tree(k, _LINK, _LATENCY)
        for place in range(64):
            tree.route(tree.devices[place], tree.devices[(place + 1) % 64])
        rows.append(_best(f"fat_tree({k}), 64 ranks", tree, _CHUNK * 64, ranks=64))
    return rows


def table() -> str:
    """Wall clock, messages, virtual time; then growth with ranks, and with the links of the network."""
    thousand = star(1024, _LINK, _LATENCY)
    rows = [
        measure("star, 1024 ranks, equal chunks", thousand, 40_960_000),
        measure("star, 1024 ranks, uneven chunks", thousand, 40_000_000),
    ]
    rows += with_ranks((64, 128, 256, 512)) + with_links()
    lines = [f"{'ring all-reduce':34}{'floats':>12}{'links':>7}{'messages':>11}{'virtual s':>12}{'wall s':>8}{'us/message':>12}"]
    lines += [
        f"{row.name:34}{row.floats:>12,}{row.links:>7,}{row.messages:>11,}{row.virtual:>12.6f}{row.wall:>8.2f}{row.per_message:>12.2f}"
        for row in rows
    ]
    lines.append(f"exact virtual time of the first row: {EXACT:.6f} s; largest memory of this process {_memory():.2f} GB")
    return "\n".join(lines)


def plot(axes: Sequence[Axes]) -> None:
    """Wall clock for each message, against ranks on the first of two axes, against links on the second."""
    both = with_ranks(), with_links()
    top = max(row.per_message for rows in both for row in rows)
    for ax, rows, x in zip(axes, both, ("ranks", "links"), strict=True):
        numbers = [getattr(row, x) for row in rows]
        ax.plot(numbers, [row.per_message for row in rows], "o-", color="#0072b2")
        ax.set(xlabel=f"{x} of the network", ylabel="wall clock per message (µs)", ylim=(0, 1.1 * top), xscale="log")
        ax.set_xticks(numbers, [f"{number:,}" for number in numbers])
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)


def _memory() -> float:
    """GB; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
