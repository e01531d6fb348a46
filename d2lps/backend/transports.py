"""The communicators of one group: for CPUs, for GPUs, and for the program's own messages.

Ranks of one machine share memory, whoever started them: the first one makes a file without a name, and leaves its pid and
descriptor in the job's store; the others open it where Linux shows a process's files to the same user's other processes, under
/proc/<pid>/fd. Whether everyone got there is put to the vote, and one no suffices: then nobody shares, and sockets it is.
"""

import os
import sys
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from d2lps import sharedmemory
from d2lps.backend import choice
from d2lps.comm import RankHung
from d2lps.comm.status import GroupBoard, Status, StatusBoard, readers_line
from d2lps.launch.rank import patience_of, runs_here
from d2lps.processgroup import ProcessGroupCommunicator, connect
from d2lps.sharedmemory.communicator import SharedMemoryCommunicator
from d2lps.sharedmemory.mailbox import Mailbox
from d2lps.signatures import own_connection

CPU = torch.device("cpu")


class Transports:
    """Shared memory if all ranks can have it, else gloo; and NCCL for the tensors of GPUs if each rank has one of its own.

    What the program sends itself does not meet the messages of collectives: it has a communicator of its own. in_run: what a run
    that makes the group calls the members.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[int], name: str, timeout: float, in_run: Sequence[int]
    ) -> None:
        self.rank, self.members, self.in_run, self.name = rank, list(members), in_run, name
        self.timeout, self.patience, self._of_run = bounded(timeout)
        # A store may outlive a group, and another one of this name: what this one leaves there is under a number of its own.
        number = (store.add("arrivals", 1) - 1) // len(members)
        self.store = own_connection(dist.PrefixStore(str(number), store))
        self.store.set_timeout(timedelta(seconds=self.patience))
        self._made: dict[tuple[str, torch.device], Any] = {}
        self._nccl = False
        begin = self.board(range(len(members)))
        begin.write(Status(rank, "group", -1, 0, 0, "", range(len(members)), *readers_line(sys._getframe()), time.monotonic()))
        try:
            self._meet()
        except dist.DistStoreError as error:
            told = f"rank {members[rank]} has waited for more than timeout={self.timeout:g} s"
            raise RankHung(f"{told} for ranks {self.members} to make the process group {name!r}") from error
        begin.write(None)

    def _meet(self) -> None:
        self.memory = share(self.store, self.rank, self.members, self.patience, choice.transport())
        for what in ("messages", "collectives"):
            comm = self.communicator(what, CPU)  # over gloo all ranks are joined to all at once, as long as all are here
        # NCCL wants a GPU for each rank. And the store, which may live in the first rank, stays until all have answered.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", len(self.members)))
        self._nccl = all(comm._tell("agree", dist.is_nccl_available() and torch.cuda.device_count() >= here))

    def board(self, members: Sequence[int]) -> GroupBoard:
        """For notes that call the members so; who watches over the run of which they are a part reads them too."""
        return GroupBoard(self._of_run, dict(zip(members, self.in_run, strict=True)))

    def communicator(self, what: str, device: torch.device) -> Any:
        """For "collectives" or "messages" of tensors on this device; without NCCL, those of GPUs pass through the host.

        It has not been `touched` yet.
        """
        device = device if self._nccl and device.type == "cuda" else CPU
        if (what, device) not in self._made:
            self._made[what, device] = self._make(f"{self.name} {what}", device)
        comm = self._made[what, device]
        comm.touched = False
        return comm

    def _make(self, name: str, device: torch.device) -> Any:
        if self.memory and device == CPU:
            comm: Any = SharedMemoryCommunicator(self.memory, name)
        else:
            kind, store = "gloo" if device == CPU else "nccl", dist.PrefixStore(f"{name} {device.type}", self.store)
            engine = connect(kind, store, self.rank, len(self.members), self.patience)
            comm = ProcessGroupCommunicator(engine, device, self.store, self.patience, self.members, name)
        comm.board = self.board(comm.members)
        # The all-reduce of those who choose none: that of shared memory is the fastest there, and ours.
        comm.default = "native" if self.memory else "auto"
        return comm

    def close(self, failed: bool = False) -> None:
        """Let go of memory and sockets. failed: this rank goes on no more, and who waits for it shall know."""
        for comm in self._made.values():
            if isinstance(comm, SharedMemoryCommunicator):
                comm.leave(failed)
            else:
                comm.group = None  # gloo closes sockets that nobody knows any more, and others notice
        self._made.clear()
        self.memory = None


def bounded(timeout: float) -> tuple[float, float, StatusBoard]:
    """How long a group's waits may last, when its engine gives up, and where else its notes are read.

    Within a run no wait is longer than the run's `timeout`. Where the run's launcher watches, that ends it, and knows more.
    """
    run = runs_here[-1] if runs_here else None
    if run is None or timeout < run.timeout:
        return timeout, timeout, run.board if run else StatusBoard()
    return run.timeout, patience_of(run.timeout) if run.board.watched else run.timeout, run.board


# ---- how ranks that somebody else started come to share memory --------------------------------------------------------


def share(store: dist.Store, rank: int, numbers: Sequence[int], timeout: float, wanted: str) -> Mailbox | None:
    """This rank's part, if every rank can have one. Every rank calls it."""
    if wanted == "gloo":
        return None
    mine, reason = None, ""
    try:
        file = _open(store) if rank else _create(store, len(numbers))
        mine = Mailbox(file.fileno(), len(numbers), rank, timeout, numbers)
        weakref.finalize(mine, file.close)
    except (OSError, ValueError) as error:
        reason = f"rank {rank}: {error}"
    denied = agreed(dist.PrefixStore("memory", store), rank, len(numbers), reason)
    if denied and wanted == "shm":
        raise RuntimeError(f"transport='shm' is not there: {denied}; use 'gloo', or 'auto'")
    return None if denied else mine


def agreed(store: dist.Store, rank: int, ranks: int, reason: str) -> str:
    """ "" if no rank gives a reason against it, else the first one's; the same on all ranks, at two messages each."""
    store.set(str(rank), reason)
    votes = store.multi_get([str(voter) for voter in range(ranks)])
    return next((vote.decode() for vote in votes if vote), "")


def _create(store: dist.Store, ranks: int) -> BinaryIO:
    place = ""
    try:
        if reason := sharedmemory.missing():
            raise OSError(reason)
        file = open(sharedmemory.create(ranks), "r+b", buffering=0)
        place = f"{_machine()} /proc/{os.getpid()}/fd/{file.fileno()}"
        return file
    finally:
        store.set("memory", place)


def _open(store: dist.Store) -> BinaryIO:
    machine, _, path = store.get("memory").decode().rpartition(" ")
    if machine != _machine():
        raise ValueError("it is on another machine than the first rank")  # or the first has none, and says why
    return open(path, "r+b", buffering=0)  # which the first rank keeps open until all have voted


def _machine() -> str:
    """Something that differs where a pid means another process: on another machine, or in another container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
