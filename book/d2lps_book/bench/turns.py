"""Rivals in turn: each waits in a program of its own until it is called, practises, and is timed.

A rival that is not ours is started as its own documentation starts it: `python -m d2lps_book.bench.turns FUNCTION SPAWN DOOR ...`
has PyTorch spawn the processes, or is one of mpirun's. Nothing of ours works in them: no launcher, no communicator, no fork
server. Each process goes to the door, a socket, and does what it is told there. No program, ours neither, has a variable that
the shell lacks from which all are started: what a rival shall have, it must get by itself, as in a user's own script.
"""

import os
import pkgutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

import torch.multiprocessing as mp

Operation = Callable[[], object]
Row = dict[str, Any]

MOST_ROUNDS = int(os.environ.get("D2LPS_MOST_ROUNDS", 0))  # 0: as many as a table asks for. Tests of the code need only one
PATIENCE = 120.0  # seconds: for a process to come to the door, and for an order to be carried out


def answer(door: str, prepare: Callable[[str, Row], tuple[Operation, Operation]]) -> None:
    """Carry out orders, each once for practice, and tell when this process began and ended.

    prepare(way, case): what to do, and where to meet the other processes before.
    """
    with Client(door) as line, suppress(EOFError):
        while True:
            way, case = line.recv()
            operation, meet = prepare(way, case)
            operation()
            meet()
            start = time.monotonic()  # the machine's clock, which all processes read
            for _ in range(case.get("repeats", 1)):
                operation()
            line.send((start, time.monotonic()))


@dataclass(eq=False)
class Rival:
    """A program, and its processes' lines to the one who calls them in turn."""

    name: str
    function: Callable[..., object]  # of a module, where the program finds it; called with the door and the arguments
    processes: int  # that come to the door
    arguments: Sequence[str] = ()
    spawn: int = 0  # how many processes call the function, with their rank before the rest; 0: the program itself does
    launcher: Sequence[str] = ()  # as mpirun, which starts several Pythons
    sleepless: bool = False  # its processes look for messages all the time, and are stopped while it is not their turn

    @contextmanager
    def present(self, door: str) -> Iterator[None]:
        """Its processes have come to the door, and at the end are sent home."""
        function = f"{self.function.__module__}:{self.function.__name__}"
        command = [*self.launcher, sys.executable, "-m", __name__, function, str(self.spawn), door, *self.arguments]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(64)
            self.lines: list[Connection] = []
            self.program = subprocess.Popen(command, process_group=0 if self.sleepless else None)
            try:
                self._come_in(listener)
                yield
            finally:
                self._signal(signal.SIGCONT)
                for line in self.lines:
                    line.close()
                try:
                    self.program.wait(PATIENCE)
                finally:
                    self.program.kill()

    def time(self, way: str, case: Row) -> float:
        """Seconds from the first process's start to the last one's end."""
        self._signal(signal.SIGCONT)
        for line in self.lines:
            line.send((way, case))
        starts, ends = zip(*map(self._heard, self.lines), strict=True)
        self._signal(signal.SIGSTOP)
        return float(max(ends) - min(starts))

    def _come_in(self, listener: socket.socket) -> None:
        listener.settimeout(0.5)
        deadline = time.monotonic() + PATIENCE
        while len(self.lines) < self.processes:
            with suppress(TimeoutError):
                self.lines.append(Connection(listener.accept()[0].detach()))
            if self.program.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {len(self.lines)} of {self.processes} came; what they printed says why")

    def _heard(self, line: Connection) -> Any:
        if not line.poll(PATIENCE):
            raise TimeoutError(f"{self.name}: nothing heard for {PATIENCE:g} s")
        try:
            return line.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"{self.name}: a process has ended without an answer; what it printed says why") from None

    def _signal(self, number: int) -> None:
        if self.sleepless:
            with suppress(ProcessLookupError):  # if it has failed, that has been said
                os.killpg(self.program.pid, number)


# ---- tables -----------------------------------------------------------------------------------------------------------


def compare(rivals: Mapping[str, Rival], peer: str, cases: Iterable[Row], rounds: int, unit: float = 1.0) -> list[Row]:
    """A row for each case and way (see `row`), with the case's own columns; "repeats": how often it is done at a time."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for number, rival in enumerate(dict.fromkeys(rivals.values())):
            stack.enter_context(rival.present(os.path.join(folder, str(number))))
        for case in cases:
            times = in_turn({way: partial(rival.time, way, case) for way, rival in rivals.items()}, rounds)
            once = unit * case.get("repeats", 1)
            rows += [row(way, seconds, times[peer], once, **case) for way, seconds in times.items()]
    return rows


def in_turn(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each way says, by name and round; a round before the first is not counted."""
    said = [{name: act() for name, act in ways.items()} for _ in range(min(rounds, MOST_ROUNDS or rounds) + 1)]
    return {name: [each[name] for each in said[1:]] for name in ways}


def row(way: str, seconds: Sequence[float], peer: Sequence[float], unit: float = 1.0, **more: Any) -> Row:
    """ "way"; "median", "least" and "most" in units of so many seconds; "ratio": times as fast as the peer; and more."""
    median = statistics.median(seconds)
    figures = {"median": median / unit, "least": min(seconds) / unit, "most": max(seconds) / unit}
    return {"way": way, **figures, "ratio": statistics.median(peer) / median, **more}


def text(heading: str, columns: dict[str, str], rows: Sequence[Row], *notes: str) -> str:
    """A table: a column for each way to format a row.

    >>> print(text("four ranks", {"s": "{median:.1f}"}, [row("gloo", [2.0, 4.0], [3.0])], "as measured"))
    four ranks    s
    gloo        3.0
    as measured
    """
    lines = [[heading, *columns], *([row["way"], *(form.format(**row) for form in columns.values())] for row in rows)]
    first, *rest = (max(map(len, column)) for column in zip(*lines, strict=True))
    texts = ["  ".join([f"{way:{first}}", *map(str.rjust, cells, rest)]) for way, *cells in lines]
    cut = f"cut to {MOST_ROUNDS} rounds by D2LPS_MOST_ROUNDS" if MOST_ROUNDS else ""
    return "\n".join([*texts, *filter(None, [*notes, cut])])


if __name__ == "__main__":
    function, spawn, arguments = pkgutil.resolve_name(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:])
    mp.spawn(function, arguments, spawn) if spawn else function(*arguments)
