"""From the call to the end of the first all-reduce, of four ranks: `d2lps.run` beside what PyTorch has for starting processes.

Each side has a Python of its own, in which nothing else happens: this file is the program of ours, `starters.py` of PyTorch's.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from d2lps.bench import starters
from d2lps.bench.turns import Row, row, text
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.launch import run

SPAWN = "torch.multiprocessing.spawn"
PYTORCH = {SPAWN: "spawn", "start_processes, fork": "fork", "start_processes, forkserver": "forkserver"}
OURS = "d2lps.run"
COLUMNS = {"s": "{median:.3f}", "from": "{least:.3f}", "to": "{most:.3f}", "x spawn": "{ratio:.1f}"}


def measure(rounds: int = 5) -> list[Row]:
    """A row for each way (see `turns.row`); the peer is spawn.

    A fork server's first call loads PyTorch: a row of its own, of one sample.
    """
    with _python(starters.__file__) as pytorch, _python("-m", __name__) as ours:
        ways = {way: (pytorch, method) for way, method in PYTORCH.items()} | {OURS: (ours, "")}
        first = {way: [_seconds(*how)] for way, how in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, how in ways.items():
                times[way].append(_seconds(*how))
    begun = {f"{way}, the first": first[way] for way in ways if way.endswith(("forkserver", OURS))}
    return [row(way, seconds, times[SPAWN]) for way, seconds in (begun | times).items()]


def table(rounds: int = 5) -> tuple[str, list[Row]]:
    """Medians and ranges, and the ratio to spawn."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in which all ways take turns, after the first of each"
    left_out = "left out: torchrun, which starts an agent first"
    return text(f"first all-reduce of {starters.RANKS} ranks", COLUMNS, rows, note, left_out), rows


@contextmanager
def _python(*what: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, *what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()  # which ends it


def _seconds(process: "subprocess.Popen[str]", method: str) -> float:
    assert process.stdin and process.stdout
    print(method, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def _reduced(comm: Communicator) -> float:
    all_reduce(comm, torch.ones(1), algorithm="native")
    return time.monotonic()


def main() -> None:
    for _ in sys.stdin:
        start = time.monotonic()
        print(float(max(run(_reduced, starters.RANKS))) - start, flush=True)


if __name__ == "__main__":
    main()
