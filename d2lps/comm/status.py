"""What each rank is doing: the note that it leaves before a wait, in memory that somebody else can read.

A rank that hangs cannot be asked why: it may be stopped, or stuck in compiled code. So it says beforehand what it is
about to wait for. A note costs a few microseconds; the memory is a file without a name that the launcher maps too.
"""

import json
import math
import mmap
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType

_PATHS = sysconfig.get_paths()
# Where no reader's code is: this library, the standard one (contextlib, threading), and what else is installed.
NOT_THE_READERS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), _PATHS["stdlib"], _PATHS["purelib"], "<frozen")
IN_VAIN = -math.inf


@dataclass
class Status:
    """What one rank waits for, since when, and which line of the reader's code brought it there; or what else it does."""

    rank: int
    action: str  # "send", "recv", "barrier", "native", ...; for a rank that waits for nothing, words: "is running"
    peer: int = -1  # the rank of the world that it waits for; -1 for everyone
    tag: int = 0
    nbytes: int = 0
    collective: str = ""  # the collective that the wait is part of, "" for a message of one's own
    group: Sequence[int] = ()  # the ranks of the world that the communicator joins
    file: str = ""
    line: int = 0
    function: str = ""
    since: float = 0.0  # seconds, on the clock of the rank's machine; IN_VAIN: what it waits for will never come


class StatusBoard:
    """Where a rank's lanes leave their notes. `write(None)` takes a note down: that lane runs again.

    On this one they are for the rank itself: where it stood when something failed.
    """

    watched = False  # whether somebody else reads the notes meanwhile

    def __init__(self) -> None:
        self._lanes: dict[int, Status] = {}

    def write(self, status: Status | None, lane: int = 0) -> None:
        if status is not None:
            self._lanes[lane] = status
        else:
            self._lanes.pop(lane, None)

    @property
    def status(self) -> Status | None:
        """Of several lanes that wait, the one that has waited longest for another rank."""
        waiting = list(self._lanes.values())  # lanes are threads
        return min(waiting, key=lambda note: (note.action == "join", note.since), default=None)


class SharedBoard(StatusBoard):
    """One slot for each rank in a mapped file: the rank writes its own, the launcher reads them all."""

    watched = True
    SLOT = 16384  # bytes: the group of the most ranks that one machine may have fits into a note

    def __init__(self, descriptor: int, rank: int) -> None:
        super().__init__()
        self.memory = mmap.mmap(descriptor, 0)
        self.start = rank * self.SLOT

    def write(self, status: Status | None, lane: int = 0) -> None:
        if status is None and lane not in self._lanes:
            return  # it has left none
        super().write(status, lane)
        shown = self.status
        note = json.dumps(vars(shown)).encode()[: self.SLOT - 1] + b"\0" if shown else b"\0"
        self.memory[self.start : self.start + len(note)] = note

    def read(self, rank: int) -> Status | None:
        """The note of `rank`, or None if it runs (or writes just now, which is the same)."""
        start = rank * self.SLOT
        note = self.memory[start : self.memory.find(b"\0", start)]
        try:
            return Status(**json.loads(note)) if note else None
        except ValueError:
            return None


class GroupBoard(StatusBoard):
    """Where a group notes its waits that a run's function has made: for itself, and on the run's board, with the run's numbers.

    numbers: of the group's ranks, by what the group's own notes call them. What waits in vain the group tells by itself.
    """

    def __init__(self, run: StatusBoard, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self.run, self.numbers = run, numbers

    def write(self, status: Status | None, lane: int = 0) -> None:
        super().write(status, lane)
        if status is None:
            self.run.write(None, id(self) + lane)
        elif status.since != IN_VAIN:
            rank, *group = (self.numbers[each] for each in (status.rank, *status.group))
            self.run.write(replace(status, rank=rank, peer=self.numbers.get(status.peer, -1), group=group), id(self) + lane)


Where = Callable[[FrameType | None], tuple[str, int, str]]


def noted(trace: bool | str) -> Where | None:
    """How a trace notes the line at which a message was posted: with trace="lines". ValueError for another word."""
    if isinstance(trace, str) and trace != "lines":
        raise ValueError(f"trace={trace!r} is unknown: choose True, False or 'lines'")
    return readers_line if trace == "lines" else None


def readers_line(frame: FrameType | None) -> tuple[str, int, str]:
    """File, line and function of the innermost frame, from this one outwards, that is not the library's.

    `("lesson.py", 3, "work")`: the line that a reader wrote; `("", 0, "")` if there is none.
    """
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_READERS):
        frame = frame.f_back
    if frame is None:
        return "", 0, ""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
