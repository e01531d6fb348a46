"""What a failure is told by: whether this rank had begun to talk to others, and where it stood."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from d2lps.comm import Communicator, RankDied, RankFailed, RankHung
from d2lps.comm.explain import describe_status
from d2lps.comm.work import Work
from d2lps.launch.lastnote import meaning


class Noticing(Communicator):
    """Mixed into a communicator: has this rank begun to talk to others since `touched` was set to False?"""

    touched = False

    def waiting(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> AbstractContextManager[None]:  # type: ignore[override]
        self.touched = True
        return super().waiting(action, peer, tag, nbytes)

    def _posted(self, action: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self.touched = True
        return super()._posted(action, tensor, peer, tag)


def explained(error: BaseException, comm: Any, name: str, numbers: Sequence[int]) -> BaseException:
    """An error of the transport, told in our words and with the place where this rank stood; `numbers`: the ranks' in the job."""
    note = comm.board.status
    told = f"{name} of ranks {list(numbers)}: {str(error).partition(' This is typically')[0]}"  # gloo guesses why
    if note is not None:
        peer = numbers[comm.members.index(note.peer)] if note.peer >= 0 else -1
        # Without the line: the thread's own says nothing, and the program's is in the traceback of its wait.
        told += "\n" + describe_status(replace(note, rank=numbers[comm.rank], peer=peer, line=0))
    if isinstance(error, RankDied | RankFailed | RankHung):
        return type(error)(told)
    kind = meaning(error)
    if kind is RankFailed:
        told = f"another rank was lost in {told}"
    return kind(told) if kind else error
