"""From the call to the end of the first all-reduce, of four ranks: `d2lps.run` beside what PyTorch has for starting processes.

Each side has a Python of its own, in which nothing else happens: this file is the program of ours, `starters.py` of PyTorch's.
"""

import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.launch import run
from d2lps_book.bench import starters
from d2lps_book.bench.turns import Row, in_turn, row, text

SPAWN = "torch.multiprocessing.spawn"
PYTORCH = {SPAWN: "spawn", "start_processes, fork": "fork", "start_processes, forkserver": "forkserver"}
OURS = "d2lps.run"
COLUMNS = {"s": "{median:.3f}", "from": "{least:.3f}", "to": "{most:.3f}", "x spawn": "{ratio:.1f}"}


def measure(rounds: int = 5) -> list[Row]:
    """A row for each way (see `turns.row`); the peer is spawn.

    A fork server's first call loads PyTorch: a row of its own, of one sample.
    """
    with _python(starters.__file__) as pytorch, _python("-m", __name__) as ours:
        ways = {way: partial(_seconds, pytorch, method) for way, method in PYTORCH.items()} | {OURS: partial(_seconds, ours)}
        begun = {f"{way}, the first": [ways[way]()] for way in ways if way.endswith(("forkserver", OURS))}
        times = in_turn(ways, rounds)
    return [row(way, seconds, times[SPAWN]) for way, seconds in (begun | times).items()]


def table(rounds: int = 5) -> tuple[str, list[Row]]:
    """Medians and ranges, and the ratio to spawn."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in which all ways take turns, after the first of each"
    left_out = "left out: torchrun, which starts an agent first"
    return text(f"first all-reduce of {starters.RANKS} ranks", COLUMNS, rows, note, left_out), rows


def _python(*what: str) -> Any:
    """It ends when its input does."""
    return subprocess.Popen([sys.executable, *what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _seconds(python: Any, method: str = "") -> float:
    print(method, file=python.stdin, flush=True)
    return float(python.stdout.readline())


def _reduced(comm: Communicator) -> float:
    all_reduce(comm, torch.ones(1), algorithm="native")
    return time.monotonic()


if __name__ == "__main__":
    for _ in sys.stdin:
        start = time.monotonic()
        print(max(run(_reduced, starters.RANKS)) - start, flush=True)
