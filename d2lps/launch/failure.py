"""What went wrong in a rank, told in the caller."""

import os
import pickle
import re
import signal
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from d2lps.comm import RankDied, RankFailed, RankHung
from d2lps.comm.explain import describe_status, explain
from d2lps.comm.status import IN_VAIN, Status
from d2lps.launch.rank import Failure, Job
from d2lps.sharedmemory.linux import is_stopped

_LIBRARY = str(Path(__file__).resolve().parent.parent)
_INSTALLED = (_LIBRARY, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<frozen")


class RemoteTraceback(Exception):
    """The traceback of a rank, shown above the exception that it explains."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def raise_in_caller(failure: Failure, rank: int, ranks: int) -> NoReturn:
    """Raise the rank's exception here, with the rank's traceback as its cause."""
    frames = traceback.StackSummary.from_list([(file, line or 0, name, None) for file, line, name in failure.frames])
    where = f"rank {rank} of {ranks}"
    text = f"\n\nTraceback of {where}:\n{''.join(frames.format())}{failure.kind}: {failure.message}"
    if failure.pickled is not None:
        error = pickle.loads(failure.pickled)
        error.add_note(f"raised by {where}")
        raise error from RemoteTraceback(text)
    raise RankFailed(f"{where} raised {failure.kind}: {failure.message}") from RemoteTraceback(text)


def died(rank: int, ranks: int, status: int, errors: str, note: Status | None) -> RankDied:
    """The exception for a process that ended by itself: how, where it stood, and its last words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        how = f"was killed by {name}"
    else:
        how = f"ended with exit status {os.WEXITSTATUS(status)} before its function had returned"
    lines = [f"rank {rank} of {ranks} {how}"]
    if note is not None:
        lines.append(describe_status(note))
    if errors:
        lines.append("  it last wrote: " + errors.splitlines()[-1])
    return RankDied("\n".join(lines))


def hung(
    job: Job,
    overdue: Sequence[int],
    notes: Mapping[int, Status | None],
    stacks: Mapping[int, str],
    pids: Mapping[int, int],
) -> RankHung:
    """The exception for ranks that have waited too long; those without a note run, are stopped, or have returned."""
    ranks = []
    for rank in range(job.ranks):
        if rank not in notes:
            ranks.append(Status(rank, "has returned"))
            continue
        note = notes[rank]
        status = note or Status(rank, "is running", **_innermost(stacks[rank]))
        if is_stopped(pids[rank]):  # wherever it was: nobody waits for anything but this
            status = Status(rank, "is stopped (SIGSTOP)", file=status.file, line=status.line, function=status.function)
        ranks.append(status)
    first = notes[overdue[0]]
    in_vain = first is not None and first.since == IN_VAIN
    why = "waits for one that has returned" if in_vain else f"has waited for more than timeout={job.timeout:g} s"
    return explain(ranks, f"rank {overdue[0]} {why}", overdue)


def _innermost(stack: str) -> dict[str, Any]:
    """The reader's own line in what faulthandler wrote (most recent call first)."""
    frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', stack)
    for file, line, function in frames:
        if not file.startswith(_INSTALLED):
            return {"file": file, "line": int(line), "function": function}
    return {}
