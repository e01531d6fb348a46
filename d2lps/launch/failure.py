"""What went wrong in a rank: packed there and raised in the caller; or guessed, where nobody watches."""

import os
import pickle
import re
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

import cloudpickle

from d2lps.comm import Communicator, RankFailed, RankHung
from d2lps.comm.explain import describe_status
from d2lps.comm.status import NOT_THE_READERS, Status

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
    return Failure(when, pickled, _said(error), readers or frames)


def _said(error: BaseException) -> str:
    """Its kind and its message, also if it fails to tell that itself."""
    return f"{type(error).__name__}: {traceback.TracebackException(type(error), error, None)}"


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


def in_our_words(error: BaseException, comm: Communicator, cause: str = "") -> BaseException:
    """An error of torch's engine, told with the place where this rank stood; any other as it is.

    cause: of the loss of another rank.
    """
    kind, note = meaning(error), comm.board.status  # torch says neither who waited nor for whom
    if note is None and kind and "gloo" in str(error):
        note = at_its_line(error, comm.rank, "calls torch.distributed by itself")
    if note is None or kind is None or isinstance(error, RankFailed | RankHung):  # it did not fail in a wait
        return error
    happened = f"waited for more than timeout={comm.timeout:g} s" if kind is RankHung else f"lost another rank{cause}"
    return kind(f"rank {comm.rank} has {happened}\n{describe_status(note)}")


def in_short(error: BaseException, comm: Communicator) -> str:
    """What a rank leaves for the others: `rank 1 raised RuntimeError: on purpose (in work, line 3: raise RuntimeError(...))`."""
    told = in_our_words(error, comm)
    if told is not error:
        return str(told)
    return describe_status(at_its_line(error, comm.rank, f"raised {_said(error)}")).strip()


def at_its_line(error: BaseException, rank: int, what: str) -> Status:
    """A rank's note of what it did in the reader's line in which an error was raised."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not frame.f_code.co_filename.startswith(NOT_THE_READERS):
            return Status(rank, what, file=frame.f_code.co_filename, line=line, function=frame.f_code.co_name)
    return Status(rank, what)


def release(error: BaseException | None) -> None:
    """Let go of the variables in an exception's tracebacks, the groups among them; the lines stay.

    gloo closes a group's sockets when nobody knows it any more; until then others would wait for this rank.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
