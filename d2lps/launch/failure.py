"""What went wrong in a rank: packed there and raised in the caller; or guessed, where nobody watches."""

import os
import pickle
import re
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

import cloudpickle

from d2lps.comm import RankFailed, RankHung

_TIMED_OUT = re.compile("timed out|timeout|no signature", re.IGNORECASE)  # gloo, a store, the debug mode
_LOST = re.compile("connection|broken pipe|socket", re.IGNORECASE)


class RemoteTraceback(Exception):
    """The traceback of a rank, shown above the exception that it explains."""


@dataclass
class Failure:
    """An exception on its way to the caller; the frames' source lines are looked up there, where the cell is known."""

    when: float
    pickled: bytes  # b"" if it can't be
    told: str  # its kind and its message
    frames: list[tuple[str, int, str, None]]


def pack(error: BaseException) -> Failure:
    """An exception itself if it can be pickled, its text and frames in any case."""
    when, pickled = time.monotonic(), b""  # pickling may take its time, and the earliest failure is the one that counts
    if isinstance(error, Exception):  # sys.exit() shall not end the caller
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = b""
    frames = [(f.filename, f.lineno or 0, f.name, None) for f in traceback.extract_tb(error.__traceback__)]
    readers = [frame for frame in frames if not frame[0].startswith(os.path.dirname(__file__))]  # the launcher's say nothing
    said = traceback.TracebackException(type(error), error, None)  # whose text is there even if the error's own fails
    return Failure(when, pickled, f"{type(error).__name__}: {said}", readers or frames)


def raise_in_caller(failure: Failure, where: str) -> NoReturn:
    """Raise an exception here that was raised in "rank 3 of 4", with the traceback that it had there as its cause."""
    lines = "".join(traceback.StackSummary.from_list(failure.frames).format())
    cause = RemoteTraceback(f"\n\nTraceback of {where}:\n{lines}{failure.told}")
    if not failure.pickled:
        raise RankFailed(f"{where} raised {failure.told}") from cause
    error = pickle.loads(failure.pickled)
    error.add_note(f"raised by {where}")
    raise error from cause


# ---- where nobody watches over the ranks --------------------------------------------------------------------------------


def meaning(error: BaseException) -> type[RankHung] | type[RankFailed] | None:
    """`meaning(RuntimeError("Connection closed by peer")) is RankFailed`; None for what no other rank is to blame for."""
    if not isinstance(error, RuntimeError | TimeoutError):
        return None
    return RankHung if _TIMED_OUT.search(str(error)) else RankFailed if _LOST.search(str(error)) else None


def release(error: BaseException | None) -> None:
    """Let go of the variables in an exception's tracebacks, the groups among them; the lines stay.

    gloo closes a group's sockets when nobody knows it any more; until then others would wait for this rank.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
