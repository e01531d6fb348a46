"""Memory shared by ranks that anybody started: one makes the file without a name, the others open it where Linux shows it.

A process's open files can be seen under /proc/<pid>/fd, by the same user's other processes on the same machine, and opened
from there. So the first rank leaves its pid and descriptor in the job's store. Whether everyone got there is put to the vote,
and one no suffices: then nobody shares, and sockets it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from d2lps import sharedmemory
from d2lps.backend.failures import Noticing
from d2lps.launch.lastnote import LastNote
from d2lps.sharedmemory.communicator import SharedMemoryCommunicator
from d2lps.sharedmemory.mailbox import Mailbox


class MemoryCommunicator(Noticing, SharedMemoryCommunicator):
    """Ranks are numbered as in the group, for the memory is the group's own."""

    def __init__(self, mailbox: Mailbox, name: str) -> None:
        super().__init__(mailbox, range(mailbox.ranks), mailbox.arena.layout.meeting, name)
        self.board = LastNote()

    def leave(self, failed: bool = False) -> None:
        """Tell the others, and undo the circles of references, so that the memory goes when the last one who knows this goes."""
        super().leave(failed)
        self.mailbox.waiting.note.write = None


# ---- how ranks that somebody else started come to share it ------------------------------------------------------------


def share(store: dist.Store, rank: int, numbers: Sequence[int], timeout: float) -> tuple[int, Mailbox] | str:
    """This rank's part, and a descriptor to be closed at the end; or why it cannot be. Every rank calls it, and gets the same."""
    descriptor, mine, reason = -1, None, sharedmemory.missing()
    try:
        if rank == 0:
            descriptor = -1 if reason else sharedmemory.create(len(numbers))
            store.set("memory", json.dumps(_address(descriptor) if descriptor >= 0 else []))
        else:
            descriptor = _opened(json.loads(store.get("memory")))
        mine = Mailbox(descriptor, len(numbers), rank, timeout, numbers)
    except (OSError, ValueError) as error:
        reason = reason or f"rank {rank}: {error}"
    denied = agreed(store, len(numbers), reason)
    if mine is not None and not denied:
        return descriptor, mine
    if descriptor >= 0:
        os.close(descriptor)
    return denied


def agreed(store: dist.Store, ranks: int, reason: str) -> str:
    """ "" if no rank gives a reason against it, else one of the reasons; the same on all ranks, at a few messages each."""
    if reason:
        store.set("reason", reason)
        store.add("against", 1)
    if store.add("votes", 1) == ranks:
        store.set("result", store.get("reason").decode() if store.add("against", 0) else "")
    return store.get("result").decode()


def _address(descriptor: int) -> list[str | int]:
    return [_machine(), os.getpid(), descriptor, os.fstat(descriptor).st_ino]


def _machine() -> str:
    """Something that differs where a pid means another process: on another machine, or in another container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")


def _opened(address: list[str | int]) -> int:
    if not address:
        raise ValueError("the first rank has none")
    machine, pid, number, inode = address
    if machine != _machine():
        raise ValueError("it is on another machine than the first rank")
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise ValueError("the first rank's file is another one")
    return descriptor
