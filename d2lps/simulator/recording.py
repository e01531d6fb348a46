"""What a simulation writes down: one row a message, made when it arrives, which both of its ends share.

Both ends are known by then, so nothing has to be matched afterwards; and waits need no rows of their own, for whoever waits
goes on when what it waits for is there. Columns are made of the rows when somebody first looks.
"""

from __future__ import annotations

from array import array

import numpy as np

# What a rank notes of its end of a message when it posts it: its place in the program, what memory, in which step. The last
# two may become known later: at which place of its program it has waited for the message, and since when (nan: since it
# was posted).
_NOTE = ("seq", "buffer", "offset", "length", "step", "posted", "done_seq", "waited")
SEQ, STEP, POSTED, DONE, WAITED = 0, 4, 5, 6, 7
Note = list[float]
_COLUMNS = ("stream", "nbytes", "end", *(f"{side}_{name}" for side in ("src", "dst") for name in _NOTE))
_TIMES = {"end", *(f"{side}_{name}" for side in ("src", "dst") for name in ("posted", "waited"))}



class Recording:
    """The rows of all messages that have arrived."""

    def __init__(self) -> None:
        self.cells = array("d")

    def arrived(self, stream: int, nbytes: int, now: float, send_note: Note, recv_note: Note) -> int:
        """A message; where it is written."""
        first = len(self.cells)
        self.cells.extend((stream, nbytes, now, *send_note, *recv_note))
        return first

    def waited(self, first: int, note: Note, sends: bool) -> None:
        """Somebody who posted an end of a message that has arrived, and did not wait for it then, has now, as its note says."""
        first += 3 + (0 if sends else len(_NOTE))
        self.cells[first + DONE], self.cells[first + WAITED] = note[DONE:]

    def column(self, name: str) -> np.ndarray:
        """One column, in the order of arrival."""
        rows = np.frombuffer(self.cells, dtype=np.float64).reshape(-1, len(_COLUMNS))
        return rows[:, _COLUMNS.index(name)].astype(np.float64 if name in _TIMES else np.int64)
