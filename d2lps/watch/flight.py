"""A flight recorder: the last collectives that every rank has entered, in files that can be read while the job hangs.

A hang has one rank to blame and many that wait, and only a comparison tells them apart. Collectives are numbered: in one group
all ranks call the same ones in the same order, so if rank 2 has entered 41 of them and all others 42, everybody waits for
rank 2, and the line at which it left the 41st is where to look. PyTorch's Flight Recorder compares the same numbers.
The entries lie in a file of fixed size, written before the wait: they are there when a process is stopped, or killed.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from d2lps.comm import Communicator
from d2lps.comm.status import readers_line
from d2lps.comm.watcher import Watcher

_SLOT = 4096  # bytes of an entry: a group of so many ranks that it does not fit is left out of it


class Entry(NamedTuple):
    """A collective, as one rank has entered it: the nth of a group, at which line, when, and whether it is through."""

    call: str
    number: int  # 1 for the first of its group
    group: str
    members: list[int]
    file: str
    line: int
    function: str
    entered: float  # time.time()
    left: float = 0.0  # 0 as long as it is inside

    @property
    def place(self) -> str:
        return f"{self.call} {self.number} (in {self.function}, line {self.line})"


class FlightRecorder(Watcher):
    """Note what a rank enters and leaves, until it is closed, in a file of its own.

    >>> with FlightRecorder(comm, "flights"):               # on every rank                 # doctest: +SKIP
    ...     train(comm)
    >>> print(*absent(flights("flights")), sep="\\n")       # from anywhere, meanwhile      # doctest: +SKIP
    rank 2 has not entered all_reduce 42 (in train, line 8), where 0, 1, 3 wait: it has left all_reduce 41 (in train, line 8)

    Collectives of d2lps in all of the communicator's groups; plain messages and barriers are not noted. size: how many are kept.
    Cost: two writes of a few hundred bytes a collective, no message.
    """

    def __init__(self, comm: Communicator, folder: str | Path, size: int = 64) -> None:
        if size < 1:
            raise ValueError(f"size={size!r} is not a number of entries from 1 up")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = open(Path(folder) / f"rank{comm.rank}", "wb", 0)
        self.comm, self.size = comm, size
        self._slots, self._numbers = count(), Counter[str]()
        self._inside: dict[str, tuple[int, Entry]] = {}  # by group: one lane has it
        comm.watchers.append(self)

    def entered(self, comm: Communicator, collective: str) -> None:
        self._numbers[comm.name] += 1
        line = readers_line(sys._getframe())
        entry = Entry(collective, self._numbers[comm.name], comm.name, list(comm.members), *line, time.time())
        self._inside[comm.name] = slot, _ = next(self._slots) % self.size, entry
        self._write(slot, entry)

    def left(self, comm: Communicator) -> None:
        slot, entry = self._inside.pop(comm.name)
        self._write(slot, entry._replace(left=time.time()))

    def _write(self, slot: int, entry: Entry) -> None:
        note = json.dumps(entry).encode()
        note = note if len(note) <= _SLOT else json.dumps(entry._replace(members=[])).encode()
        os.pwrite(self.file.fileno(), note.ljust(_SLOT), slot * _SLOT)

    def __enter__(self) -> "FlightRecorder":
        return self

    def __exit__(self, *error: object) -> None:
        """What the file holds stays."""
        self.comm.watchers.remove(self)
        self.file.close()


def flights(folder: str | Path) -> dict[int, list[Entry]]:
    """{rank: its entries, the oldest first} of all that have a file there."""
    found = {}
    for file in Path(folder).glob("rank*"):
        notes = file.read_bytes()
        slots = (notes[start : start + _SLOT] for start in range(0, len(notes), _SLOT))
        entries = [Entry(*json.loads(slot)) for slot in slots]
        found[int(file.name.removeprefix("rank"))] = sorted(entries, key=lambda entry: entry.entered)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Absent:
    """Ranks wait in a collective that one of the group has not entered, or has entered another one in its place."""

    rank: int
    waited: Entry  # what the others are in
    waiting: list[int]  # the others
    last: Entry | None  # the last that it has entered itself, in any group

    @property
    def to_blame(self) -> bool:
        """Whether it is in no collective itself: else it waits, too, for somebody else."""
        return self.last is None or bool(self.last.left) or self.last.number == self.waited.number

    def __str__(self) -> str:
        last = "it has entered none" if self.last is None else f"it {'has left' if self.last.left else 'is in'} {self.last.place}"
        told = f"rank {self.rank} has not entered {self.waited.place}"
        return f"{told}, where {', '.join(map(str, self.waiting))} wait{'s' if len(self.waiting) == 1 else ''}: {last}"


def absent(flights: Mapping[int, list[Entry]]) -> list[Absent]:
    """Who is missing where others wait; those to blame first. Empty if nobody waits, or if all have come (look at the links)."""
    latest = {rank: {entry.group: entry for entry in entries} for rank, entries in flights.items()}
    found = []
    for group in dict.fromkeys(entry.group for mine in latest.values() for entry in mine.values()):
        here = {rank: mine[group] for rank, mine in latest.items() if group in mine}
        inside = [entry for entry in here.values() if not entry.left]
        if not inside:
            continue
        number = min(entry.number for entry in inside)
        call = Counter(entry.call for entry in inside if entry.number == number).most_common(1)[0][0]
        waiting = [rank for rank, entry in here.items() if not entry.left and (entry.number, entry.call) == (number, call)]
        waited = here[waiting[0]]
        for rank in sorted({*waited.members, *here} - {*waiting}):
            mine = here.get(rank)
            if mine is None or mine.number < number or (mine.number == number and mine.call != call):
                last = max(latest.get(rank, {}).values(), key=lambda entry: entry.entered, default=None)
                found.append(Absent(rank, waited, waiting, last))
    return sorted(found, key=lambda one: (not one.to_blame, one.rank))
