"""Where each rank stands: the note that it leaves before a wait, in memory that somebody else can read.

A rank that hangs cannot be asked why: it may be stopped, or stuck in compiled code. So it says beforehand what it is
about to wait for. A note costs a few microseconds; the memory is a file without a name that the launcher maps too.
"""

import json
import math
import mmap
import os
import sys
import sysconfig
import threading
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Protocol

_PATHS = sysconfig.get_paths()
# Where no reader's code is: this library, the standard one (contextlib, threading), and what else is installed.
NOT_THE_READERS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), _PATHS["stdlib"], _PATHS["purelib"], "<frozen")
IN_VAIN = -math.inf


@dataclass
class Standing:
    """What one rank waits for, since when, and which line of the reader's code brought it there."""

    action: str  # "send", "recv", "barrier", "agree", "native", "split", "answer", "join"
    peer: int  # the rank of the world that it waits for; -1 for everyone
    tag: int
    nbytes: int
    collective: str  # the collective that the wait is part of, "" for a message of one's own
    group: list[int]  # the ranks of the world that the communicator joins
    file: str
    line: int
    function: str
    since: float  # seconds, on the clock of the rank's machine; IN_VAIN: what it waits for will never come


class Board(Protocol):
    """Where notes are left, one for each lane of the rank. `write(None)` takes the note down: that lane runs again.

    watched: somebody reads them meanwhile.
    """

    watched: bool

    def write(self, standing: Standing | None, lane: int = 0) -> None: ...


class NoBoard:
    """For ranks that nobody watches."""

    watched = False

    def write(self, standing: Standing | None, lane: int = 0) -> None:
        pass


class SharedBoard:
    """One slot for each rank in a mapped file: the rank writes its own, the launcher reads them all."""

    watched = True
    SLOT = 16384  # the group of the most ranks that one machine may have fits into a note

    def __init__(self, descriptor: int, rank: int) -> None:
        self.memory = mmap.mmap(descriptor, 0)
        self.start = rank * self.SLOT
        self._lanes: dict[int, Standing] = {}

    @classmethod
    def bytes_for(cls, ranks: int) -> int:
        return ranks * cls.SLOT

    def write(self, standing: Standing | None, lane: int = 0) -> None:
        """Of several lanes that wait, the board shows the one that has waited longest for another rank."""
        if standing is None:
            self._lanes.pop(lane, None)
        else:
            self._lanes[lane] = standing
        waiting = sorted(self._lanes.values(), key=lambda note: (note.action == "join", note.since))
        self._show(waiting[0] if waiting else None)

    def _show(self, standing: Standing | None) -> None:
        # The length is cleared first and set last, so a reader sees a whole note or none.
        self.memory[self.start : self.start + 4] = b"\0\0\0\0"
        if standing is not None:
            note = json.dumps(asdict(standing)).encode()[: self.SLOT - 4]
            self.memory[self.start + 4 : self.start + 4 + len(note)] = note
            self.memory[self.start : self.start + 4] = len(note).to_bytes(4, "little")

    def read(self, rank: int) -> Standing | None:
        """The note of `rank`, or None if it runs (or moves just now, which is the same)."""
        start = rank * self.SLOT
        length = int.from_bytes(self.memory[start : start + 4], "little")
        try:
            return Standing(**json.loads(self.memory[start + 4 : start + 4 + length])) if length else None
        except ValueError:
            return None


here = threading.local()  # of a thread that goes on beside its rank: `lane`, and `began`, the line that started it


def callers_line() -> tuple[str, int, str]:
    """File, line and function of the innermost frame outside this library: the line that a reader wrote."""
    file, line, function = readers_line(sys._getframe(1))
    return (file, line, function) if line else getattr(here, "began", ("", 0, ""))


def readers_line(frame: FrameType | None) -> tuple[str, int, str]:
    """The same for a frame that is not running: `("lesson.py", 3, "work")`; `("", 0, "")` where all is the library's."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_READERS):
        frame = frame.f_back
    if frame is None:
        return "", 0, ""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
