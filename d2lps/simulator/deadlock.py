"""When nothing can happen any more, where did every rank stop?"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType

from d2lps.comm import RankHung
from d2lps.comm.explain import State, explain
from d2lps.comm.standing import Standing
from d2lps.simulator.mailbox import Message
from d2lps.simulator.scheduler import Task

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def explain_standstill(tasks: list[Task], now: float) -> RankHung:
    """The exception that says what each rank waits for, at which line, and in what circle."""
    return explain([_state(task) for task in tasks], f"at {now:.6g} s of virtual time nothing can happen any more")


def _state(task: Task) -> State:
    if task.ended is not None:
        return State(task.rank, None, "has returned")
    what = next(iter(task.waiting_for))
    file, line, function = _readers_line(task)
    comm = task.comm
    if isinstance(what, Message):
        waiting = next(message for message in task.waiting_for if not message.done)
        _, src, dst, tag = waiting.stream.key
        # At a standstill nothing is on its way: only one end of the message has been posted, this one.
        sends = waiting.outgoing is not None
        tensor = waiting.outgoing if sends else waiting.incoming
        action, peer, nbytes = ("send", dst, tensor.nbytes) if sends else ("recv", src, tensor.nbytes)
        note = Standing(action, peer, tag, nbytes, comm._collective, comm.members, file, line, function, 0.0)
    else:
        note = Standing(what, -1, 0, 0, comm._collective, comm.members, file, line, function, 0.0)
    return State(task.rank, note)


def _readers_line(task: Task) -> tuple[str, int, str]:
    """The innermost frame of a suspended rank that is not the library's."""
    frame: FrameType | None = task.greenlet.gr_frame
    if task.backward is not None:
        frame = sys._current_frames()[task.backward.ident or 0]
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else ("", 0, "")
