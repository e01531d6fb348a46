"""When nothing can happen any more, where did every rank stop?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from d2lps.comm import RankHung
from d2lps.comm.explain import explain
from d2lps.comm.status import Status, readers_line
from d2lps.simulator.scheduler import Task


def explain_standstill(tasks: Sequence[Task], reason: str) -> RankHung:
    """The exception that says what each rank waits for, at which line, and in what circle."""
    standing = [task for task in tasks if task.ended is None]
    left = {task.rank: task for task in tasks if task.ended is not None and task.rank not in {task.rank for task in standing}}
    return explain([_status(task) for task in sorted([*standing, *left.values()], key=lambda task: task.rank)], reason)


def _status(task: Task) -> Status:
    if task.ended is not None:
        return Status(task.rank, "was killed" if task.killed else "has returned")
    call, group, peer, tag, nbytes = _waits_for(task)
    comm = task.groups.get(group) or next(iter(task.groups.values()))
    return Status(task.rank, call, peer, tag, nbytes, comm._collective, comm.members, *_line(task))


def _waits_for(task: Task) -> tuple[str, str, int, int, int]:
    """Of the ends of an exchange, the first that no message has come for: it still stands in its stream."""
    what = task.waiting_for
    if isinstance(what, str):
        return what, "", -1, 0, 0
    if isinstance(what[0], str):  # a meeting, and of whom
        return what[0], what[1], -1, 0, 0
    for end in what:
        stream, _, nbytes, _, sends, *_ = end
        if any(message.first is end for message in stream.queue):
            group, src, dst, tag = stream.key
            return "send" if sends else "recv", group, dst if sends else src, tag, nbytes
    return "flow", "", -1, 0, 0  # on a link that is cut


def _line(task: Task) -> tuple[str, int, str]:
    """The innermost line of a suspended task that is not the library's."""
    frame: FrameType | None = task.greenlet.gr_frame
    if task.backward is not None:
        frame = sys._current_frames()[task.backward.ident or 0]
    return readers_line(frame)
