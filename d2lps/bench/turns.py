"""Rivals in turn: what is ours, and what isn't, waits in processes of its own until it is called, is practised, and is timed.

A rival that is not ours is started as its own documentation starts it: `python -m d2lps.bench.turns TABLE HOW DOOR` calls
`start` of the table's file, which spawns its processes itself (or is one of mpirun's). Nothing of ours works in them: no
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

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


class Rival(NamedTuple):
    """Processes of one world, and what may be ordered of them."""

    name: str
    lines: list[Connection]
    pids: list[int]
    asleep: bool  # they are stopped while it is not their turn

    def time(self, order: Any) -> float:
        """Seconds from the first process's start to the last one's end."""
        if self.asleep:
            self.signal(signal.SIGCONT)
        for line in self.lines:
            line.send(order)
        spans = [_heard(self.name, line) for line in self.lines]
        if self.asleep:
            self.signal(signal.SIGSTOP)
        return float(max(end for _, end in spans) - min(start for start, _ in spans))

    def signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)


class Arena:
    """Where rivals come in, each by its own door; at the end all are sent home."""

    def __init__(self, folder: str, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack

    def ours(self, name: str, processes: int, start: Callable[[str], object]) -> Rival:
        """`start(door)` runs processes of ours, and returns when they have ended."""
        with self._door() as (door, listener):
            thread = threading.Thread(target=start, args=(door,), daemon=True)
            thread.start()
            self.stack.callback(thread.join, PATIENCE)
            return self._come_in(name, listener, processes)

    def program(
        self, name: str, processes: int, table: str, how: str, launcher: Sequence[str] = (), asleep: bool = False
    ) -> Rival:
        """A program of its own: the table's `start(door, how)` in a new Python, or in several that a launcher starts."""
        with self._door() as (door, listener):
            command = [*launcher, sys.executable, "-m", __name__, table, how, door]
            environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}  # PyTorch's tensors on huge pages, as ours and NumPy's are
            process = subprocess.Popen(command, env=environment)
            self.stack.callback(_ended, process)
            return self._come_in(name, listener, processes, asleep)

    @contextmanager
    def _door(self) -> Iterator[tuple[str, socket.socket]]:
        door = os.path.join(self.folder, str(len(os.listdir(self.folder))))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(64)
            listener.settimeout(PATIENCE)
            yield door, listener

    def _come_in(self, name: str, listener: socket.socket, processes: int, asleep: bool = False) -> Rival:
        rival = Rival(name, [], [], asleep)
        self.stack.callback(_send_home, rival)
        for _ in range(processes):
            rival.lines.append(Connection(listener.accept()[0].detach()))
            rival.pids.append(_heard(name, rival.lines[-1]))
        return rival


@contextmanager
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Arena(folder, stack)


def in_turn(orders: dict[str, tuple[Rival, Any]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each way, by name and round; a round before the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in orders}
    for number in range(rounds + 1):
        for name, (rival, order) in orders.items():
            seconds = rival.time(order)
            if number:
                times[name].append(seconds)
    return times


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


def _heard(name: str, line: Connection) -> Any:
    if not line.poll(PATIENCE):
        raise TimeoutError(f"{name}: nothing heard for {PATIENCE:g} s")
    try:
        return line.recv()
    except EOFError:
        raise RuntimeError(f"{name}: a process has ended without an answer; what it printed says why") from None


def _send_home(rival: Rival) -> None:
    if rival.asleep:
        rival.signal(signal.SIGCONT)
    for line in rival.lines:
        line.send(None)
        line.close()


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(PATIENCE)
    finally:
        process.kill()


if __name__ == "__main__":
    table, how, door = sys.argv[1:]
    importlib.import_module(f"d2lps.bench.{table}").start(door, how)
