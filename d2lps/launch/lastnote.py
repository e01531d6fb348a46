"""What is known of a wait that failed where nobody watches over the ranks: the rank's own last note, and what torch says."""

from __future__ import annotations

import re
import traceback

from d2lps.comm import RankFailed, RankHung
from d2lps.comm.status import Board, Status

_TIMED_OUT = re.compile("timed out|timeout|no signature", re.IGNORECASE)  # gloo, a store, the debug mode
_LOST = re.compile("connection|broken pipe|socket", re.IGNORECASE)


class LastNote(Board):
    """A board for one: torch says neither who waited nor for whom, so what it says is put beside the last note."""

    status: Status | None = None

    def write(self, status: Status | None, lane: int = 0) -> None:
        self.status = status


def meaning(error: BaseException) -> type[RankHung] | type[RankFailed] | None:
    """`meaning(RuntimeError("Connection closed by peer")) is RankFailed`; None for what no other rank is to blame for."""
    if isinstance(error, RuntimeError | TimeoutError):
        if _TIMED_OUT.search(str(error)):
            return RankHung
        if _LOST.search(str(error)):
            return RankFailed
    return None


def release(error: BaseException | None) -> None:
    """Let go of the variables in an exception's tracebacks, the groups among them; the lines stay.

    gloo closes a group's sockets when nobody knows it any more; until then others would wait for this rank.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
