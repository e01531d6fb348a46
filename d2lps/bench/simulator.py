"""How long a simulation takes: a ring all-reduce, ours beside SimGrid's, and how ours grows with ranks and with links."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from d2lps.bench import turns
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.simulator import simulate
from d2lps.topology import Topology, fat_tree, star

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINK = 1.25e9  # bytes/s: 10 Gb/s
_LATENCY = 1e-6
_CHUNK = 40_000  # floats: those of the first case on 1024 ranks
SIMGRID = "SimGrid's SMPI"
# Its plain model of a link, and no time for what the program computes: the same question as ours.
_MODEL = ["network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "smpi/simulate-computation:no"]
_PLATFORM = """<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd"><platform version="4.1">
<cluster id="star" prefix="n" suffix="" radical="0-{last}" speed="1Gf" bw="1.25GBps" lat="1us" sharing_policy="SPLITDUPLEX"/>
</platform>"""


def exact(ranks: int) -> float:
    """By hand: each of the 2 (p - 1) steps takes two latencies and one chunk of 160 kB. `exact(1024) == 0.26598`."""
    return 2 * (ranks - 1) * (2 * _LATENCY + 4 * _CHUNK / _LINK)


BESIDE = {"virtual s": "{virtual:.6f}", "wall s": "{median:.2f}", "from": "{least:.2f}", "to": "{most:.2f}"}
BESIDE |= {"us/message": "{per_message:.2f}", "x SimGrid": "{ratio:.2f}"}
ALONE = {"floats": "{floats:,}", "links": "{links:,}", "messages": "{messages:,}", "virtual s": "{virtual:.6f}"}
ALONE |= {"wall s": "{wall:.2f}", "us/message": "{cost:.2f}"}


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


def measure(name: str, topology: Topology, floats: int, ranks: int | None = None, trace: bool = False) -> Row:
    """Simulate a ring all-reduce of so many floats, without contents, and take the time."""

    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.empty(floats, device=comm.device), algorithm="ring")

    start = time.perf_counter()
    run = simulate(work, topology, ranks=ranks, device="meta", trace=trace)
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


def beside(ranks: int = 128, rounds: int = 5) -> list[turns.Row]:
    """One star in turn: ours untraced and traced, and SimGrid where there is one, which is the peer (see `turns.row`).

    "virtual": the seconds simulated; "per_message": microseconds of wall clock.
    """
    topology, floats = star(ranks, _LINK, _LATENCY), _CHUNK * ranks
    ways: dict[str, Callable[[], Row]] = {
        "ours, without a trace": lambda: measure("", topology, floats),
        "ours, with its trace": lambda: measure("", topology, floats, trace=True),
    }
    done: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if has_simgrid():
            ways[SIMGRID] = _simgrid(Path(folder), ranks)
        for _ in range(rounds + 1):
            for way, act in ways.items():
                done.setdefault(way, []).append(act())
    walls = {way: [row.wall for row in rows[1:]] for way, rows in done.items()}
    peer = walls.get(SIMGRID, [float("nan")])
    figures = [turns.row(way, wall, peer, ranks=ranks, virtual=done[way][0].virtual) for way, wall in walls.items()]
    return [row | {"per_message": 1e6 * row["median"] / done[row["way"]][0].messages} for row in figures]


def has_simgrid() -> bool:
    return bool(shutil.which("smpicc") and shutil.which("smpirun"))


def _simgrid(folder: Path, ranks: int) -> Callable[[], Row]:
    """As in SMPI's documentation: a program in C, compiled by smpicc and run by smpirun, start and end of which are counted."""
    program, platform = folder / "ring", folder / "star.xml"
    platform.write_text(_PLATFORM.format(last=ranks - 1))
    subprocess.run(["smpicc", "-O2", str(Path(__file__).with_name("ring.c")), "-o", str(program)], check=True)
    command = ["smpirun", "-np", str(ranks), "-platform", str(platform), str(program), str(4 * _CHUNK)]
    command += ["--log=root.thresh:error", *(f"--cfg={option}" for option in _MODEL)]

    def act() -> Row:
        start = time.perf_counter()
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        wall = time.perf_counter() - start
        return Row(SIMGRID, ranks, 2 * ranks, _CHUNK * ranks, 2 * ranks * (ranks - 1), float(said.split()[-1]), wall)

    return act


def table() -> tuple[str, list[turns.Row]]:
    """Beside SimGrid; a thousand ranks, with and without a trace; growth with ranks, and with the links of the network."""
    rivals, rows = beside(), [row._asdict() | {"way": row.name, "cost": row.per_message} for row in _alone()]
    missing = "" if has_simgrid() else "left out: SimGrid (no smpicc or no smpirun)"
    first = turns.text("ring all-reduce, 128 ranks", BESIDE, rivals, "medians of 5 rounds, in turn; no contents", missing)
    notes = "no contents; no trace unless it says so; up to 256 ranks the least of three", f"largest memory {_memory():.2f} GB"
    return f"{first}\n\n{turns.text('ours', ALONE, rows, *notes)}", [*rivals, *rows]


def _alone() -> list[Row]:
    thousand = star(1024, _LINK, _LATENCY)
    once = [
        measure("star, 1024 ranks, equal chunks", thousand, 1024 * _CHUNK),
        measure("star, 1024 ranks, uneven chunks", thousand, 1000 * _CHUNK),
        measure("the same, with its trace", thousand, 1000 * _CHUNK, trace=True),
    ]
    return once + with_ranks((64, 128, 256, 512)) + with_links()


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
