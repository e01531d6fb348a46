"""What both kinds of communicators of the backend have in common: they notice what a failure has to be told by."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from d2lps.comm import Communicator, RankDied, RankFailed, RankHung
from d2lps.comm.explain import State, describe_state, place
from d2lps.comm.standing import Standing
from d2lps.comm.work import Transfer

_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)  # as gloo says it
_LOST = re.compile("connection|broken pipe|socket", re.IGNORECASE)


class Noticing(Communicator):
    """Mixed into a communicator: has this rank begun to talk to others since `touched` was set to False?"""

    touched = False

    def standing(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> AbstractContextManager[None]:  # type: ignore[override]
        self.touched = True
        return super().standing(action, peer, tag, nbytes)

    def _posted(self, action: str, tensor: torch.Tensor, staged: torch.Tensor, peer: int, tag: int) -> Transfer:
        self.touched = True
        return super()._posted(action, tensor, staged, peer, tag)


class LastNote:
    """A board for one rank: the note stays where a wait has failed."""

    standing: Standing | None = None
    watched = False

    def write(self, standing: Standing | None) -> None:
        # Without the line: the thread's own says nothing, and the program's is in the traceback of its wait.
        self.standing = replace(standing, file="", line=0, function="") if standing else None


def explained(error: BaseException, comm: Any, name: str, numbers: Sequence[int]) -> BaseException:
    """An error of the transport, told in our words and with the place where this rank stood; `numbers`: the ranks' in the job."""
    note = comm.board.standing
    told = f"{name} of ranks {list(numbers)}: {str(error).partition(' This is typically')[0]}"  # gloo guesses why
    if note is not None:
        peer = numbers[comm.members.index(note.peer)] if note.peer >= 0 else -1
        state = State(numbers[comm.rank], replace(note, peer=peer))
        told += "\n" + describe_state(state).removesuffix(place("", 0, ""))
    if isinstance(error, RankDied | RankFailed | RankHung):
        return type(error)(told)
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
        return RankHung(told)
    if isinstance(error, RuntimeError) and _LOST.search(str(error)):
        return RankFailed(f"another rank was lost in {told}")
    return error


def release(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: gloo's sockets are open for as long as anybody knows them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
