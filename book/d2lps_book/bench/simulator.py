"""How long a simulation takes: a ring all-reduce, ours beside SimGrid's, and how ours grows with ranks and with links."""

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from d2lps.collectives import all_reduce
from d2lps.simulator import simulate
from d2lps.topology import Topology, fat_tree, star
from d2lps_book.bench.turns import Row, in_turn, row, text

_LINK = 1.25e9  # bytes/s: 10 Gb/s
_LATENCY = 1e-6
_CHUNK = 40_000  # floats: those of the first case on 1024 ranks
OURS, SIMGRID = {"ours, without a trace": False, "ours, with its trace": True}, "SimGrid's SMPI"
# Its plain model of a link, and no time for what the program computes: the same question as ours.
_MODEL = ["network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "smpi/simulate-computation:no"]
_PLATFORM = """<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd"><platform version="4.1">
<cluster id="star" prefix="n" suffix="" radical="0-{last}" speed="1Gf" bw="1.25GBps" lat="1us" sharing_policy="SPLITDUPLEX"/>
</platform>"""


def exact(ranks: int) -> float:
    """By hand: each of the 2 (p - 1) steps takes two latencies and one chunk of 160 kB. `exact(1024) == 0.26598`."""
    return 2 * (ranks - 1) * (2 * _LATENCY + 4 * _CHUNK / _LINK)


BESIDE = {"virtual s": "{virtual:.6f}", "wall s": "{median:.2f}", "from": "{least:.2f}", "to": "{most:.2f}"}
BESIDE |= {"us/message": "{cost:.2f}", "x SimGrid": "{ratio:.2f}"}
ALONE = {"floats": "{floats:,}", "links": "{links:,}", "messages": "{messages:,}", "virtual s": "{virtual:.6f}"}
ALONE |= {"wall s": "{wall:.2f}", "us/message": "{cost:.2f}"}


def measure(name: str, topology: Topology, floats: int, ranks: int | None = None, trace: bool = False) -> Row:
    """Simulate a ring all-reduce of so many floats, without contents; "wall" and "virtual" in seconds, "cost" in us a message.

    "links" are those of the whole network, each direction counted.
    """
    ring, blank = partial(all_reduce, algorithm="ring"), torch.empty(floats, device="meta")
    start = time.perf_counter()
    run = simulate(ring, topology, blank, ranks=ranks, device="meta", trace=trace)
    return _figures(name, len(run), floats, run.time, time.perf_counter() - start) | {"links": len(topology.links)}


def _figures(name: str, ranks: int, floats: int, virtual: float, wall: float) -> Row:
    messages = 2 * ranks * (ranks - 1)
    cost = 1e6 * wall / messages
    return {"way": name, "ranks": ranks, "floats": floats, "messages": messages, "virtual": virtual, "wall": wall, "cost": cost}


def _least(times: int, *case: Any) -> Row:
    """The least disturbed of so many measurements."""
    return min((measure(*case) for _ in range(times)), key=lambda row: row["wall"])


def with_ranks(sizes: Sequence[int] = (64, 128, 256, 512, 1024)) -> list[Row]:
    """The same chunks on stars of more and more ranks: two links a rank."""
    return [_least(3 if p <= 256 else 1, f"star, {p} ranks", star(p, _LINK, _LATENCY), _CHUNK * p) for p in sizes]


def with_links(arities: Sequence[int] = (8, 10, 12, 14)) -> list[Row]:
    """The same 64 ranks in fat trees of more and more links, almost all of which carry nothing.

    Routes are found beforehand: a topology finds each once, however many messages take it.
    """
    rows = []
    for k in arities:
        tree = fat_tree(k, _LINK, _LATENCY)
        for place in range(64):
            tree.route(tree.devices[place], tree.devices[(place + 1) % 64])
        rows.append(_least(3, f"fat_tree({k}), 64 ranks", tree, _CHUNK * 64, 64))
    return rows


def beside(ranks: int = 128, rounds: int = 5) -> list[Row]:
    """One star in turn: ours untraced and traced, and SimGrid where there is one, which is the peer (see `turns.row`)."""
    floats = _CHUNK * ranks
    with tempfile.TemporaryDirectory() as folder:
        ways = {way: partial(measure, way, star(ranks, _LINK, _LATENCY), floats, trace=trace) for way, trace in OURS.items()}
        if _has_simgrid():
            ways[SIMGRID] = _simgrid(Path(folder), ranks)
        found = in_turn(ways, rounds)
    walls = {way: [each["wall"] for each in rows] for way, rows in found.items()}
    rows = [found[way][-1] | row(way, wall, walls.get(SIMGRID, [float("nan")])) for way, wall in walls.items()]
    return [each | {"cost": 1e6 * each["median"] / each["messages"]} for each in rows]


def _has_simgrid() -> bool:
    return bool(shutil.which("smpicc") and shutil.which("smpirun"))


def _simgrid(folder: Path, ranks: int) -> partial[Row]:
    """As in SMPI's documentation: a program in C, compiled by smpicc and run by smpirun, start and end of which are counted."""
    program, platform = str(folder / "ring"), folder / "star.xml"
    platform.write_text(_PLATFORM.format(last=ranks - 1))
    subprocess.run(["smpicc", "-O2", str(Path(__file__).with_name("ring.c")), "-o", program], check=True)
    command = ["smpirun", "-np", str(ranks), "-platform", str(platform), program, str(4 * _CHUNK), "--log=root.thresh:error"]
    return partial(_run, [*command, *(f"--cfg={option}" for option in _MODEL)], ranks)


def _run(command: list[str], ranks: int) -> Row:
    start = time.perf_counter()
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return _figures(SIMGRID, ranks, _CHUNK * ranks, float(said.split()[-1]), time.perf_counter() - start)


def table() -> tuple[str, list[Row]]:
    """Beside SimGrid; a thousand ranks, with and without a trace; growth with ranks, and with the links of the network."""
    rivals, thousand = beside(), star(1024, _LINK, _LATENCY)
    alone = [
        measure("star, 1024 ranks, equal chunks", thousand, 1024 * _CHUNK),
        measure("star, 1024 ranks, uneven chunks", thousand, 1000 * _CHUNK),
        measure("the same, with its trace", thousand, 1000 * _CHUNK, trace=True),
        *with_ranks((64, 128, 256, 512)),
        *with_links(),
    ]
    missing = "" if _has_simgrid() else "left out: SimGrid (no smpicc or no smpirun)"
    first = text("ring all-reduce, 128 ranks", BESIDE, rivals, "medians of 5 rounds, in turn; no contents", missing)
    notes = "no contents; no trace unless it says so; up to 256 ranks the least of three", f"largest memory {_memory():.2f} GB"
    return f"{first}\n\n{text('ours', ALONE, alone, *notes)}", [*rivals, *alone]


def _memory() -> float:
    """GB; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
