"""Rivals in turn: each waits in a program of its own until it is called, practises, and is timed.

A rival that is not ours is started as its own documentation starts it: `python -m d2lps.bench.turns MODULE NAME DOOR` calls
`start` of a table's module, which spawns its processes itself (or is one of mpirun's). Nothing of ours works in them: no
launcher, no communicator, no fork server. Each process goes to the door, a socket, and does what it is told there.
"""

import importlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Operation = Callable[[], object]
Plan = tuple[Operation, Operation, int]  # what to do, where to meet before, how often (0: this process only serves the others)
Row = dict[str, Any]

NEVER = float("inf"), -float("inf")
PATIENCE = 120.0  # seconds: for a process to come to the door, and for an order to be carried out
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def answer(door: str, prepare: Callable[[Any], Plan]) -> None:
    """Say who we are; then carry out orders, each once for practice, and tell when this process began and ended."""
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(door)
        line = Connection(way.detach())
    line.send(os.getpid())
    with line:
        while (order := line.recv()) is not None:
            line.send(_timed(*prepare(order)))


def _timed(operation: Operation, meet: Operation, repeats: int) -> tuple[float, float]:
    """On the machine's clock, which all processes read."""
    operation()
    meet()
    start = time.monotonic()
    for _ in range(repeats):
        operation()
    return (start, time.monotonic()) if repeats else NEVER


@dataclass(eq=False)
class Rival:
    """A program, and its processes' lines to the one who calls them in turn."""

    name: str
    module: str
    processes: int
    launcher: Sequence[str] = ()  # as mpirun, which starts several Pythons
    sleepless: bool = False  # its processes look for messages all the time, and are stopped while it is not their turn
    lines: list[Connection] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    @contextmanager
    def present(self, door: str) -> Iterator[None]:
        """Its processes have come to the door, and at the end are sent home."""
        command = [*self.launcher, sys.executable, "-m", __name__, self.module, self.name, door]
        environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}  # PyTorch's tensors on huge pages, as ours and NumPy's are
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(64)
            program = subprocess.Popen(command, env=environment)
            try:
                self._come_in(listener, program)
                yield
            finally:
                self._go_home(program)

    def time(self, order: Any) -> float:
        """Seconds from the first process's start to the last one's end."""
        self._signal(signal.SIGCONT)
        for line in self.lines:
            line.send(order)
        spans = [self._heard(line) for line in self.lines]
        self._signal(signal.SIGSTOP)
        return float(max(end for _, end in spans) - min(start for start, _ in spans))

    def _come_in(self, listener: socket.socket, program: "subprocess.Popen[bytes]") -> None:
        listener.settimeout(0.5)
        deadline = time.monotonic() + PATIENCE
        while len(self.lines) < self.processes:
            with suppress(TimeoutError):
                self.lines.append(Connection(listener.accept()[0].detach()))
            if program.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {len(self.lines)} of {self.processes} came; what they printed says why")
        self.pids = [self._heard(line) for line in self.lines]

    def _heard(self, line: Connection) -> Any:
        if not line.poll(PATIENCE):
            raise TimeoutError(f"{self.name}: nothing heard for {PATIENCE:g} s")
        try:
            return line.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: a process has ended without an answer; what it printed says why") from None

    def _signal(self, number: int) -> None:
        for pid in self.pids if self.sleepless else []:
            os.kill(pid, number)

    def _go_home(self, program: "subprocess.Popen[bytes]") -> None:
        with suppress(OSError):  # if one has failed, that has been said
            self._signal(signal.SIGCONT)
            for line in self.lines:
                line.send(None)
        for line in self.lines:
            line.close()
        try:
            program.wait(PATIENCE)
        finally:
            program.kill()


@contextmanager
def present(rivals: Sequence[Rival]) -> Iterator[None]:
    """All of them, one after the other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for number, rival in enumerate(rivals):
            stack.enter_context(rival.present(os.path.join(folder, str(number))))
        yield


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds that each way says it took, by name and round; a round before the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, act in ways.items():
            times[name].append(act())
    return {name: seconds[1:] for name, seconds in times.items()}


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
    return "\n".join([*texts, *filter(None, notes)])


if __name__ == "__main__":
    module, how, door = sys.argv[1:]
    importlib.import_module(module).start(door, how)
