"""The communicators of one group: for CPUs, for GPUs, and for the program's own messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from d2lps.backend import choice, shm
from d2lps.backend.failures import Noticing
from d2lps.launch.lastnote import LastNote
from d2lps.processgroup import ProcessGroupCommunicator, connect

CPU = torch.device("cpu")


class EngineCommunicator(Noticing, ProcessGroupCommunicator):
    """Over an engine of torch's, gloo or NCCL, which no other program sees and which needs no other group."""


class Transports:
    """Shared memory if all ranks can have it, else gloo; and NCCL for the tensors of GPUs if each rank has one of its own.

    What the program sends itself does not meet the messages of collectives: it has a communicator of its own.
    """

    def __init__(self, store: dist.Store, rank: int, members: Sequence[int], name: str, timeout: float) -> None:
        # A store may outlive a group, and another one of this name: what this one leaves there is under a number of its own.
        store = dist.PrefixStore(str((store.add("arrivals", 1) - 1) // len(members)), store)
        self.store, self.rank, self.members, self.name, self.timeout = store, rank, list(members), name, timeout
        self.descriptor = -1
        self._signatures: Any = None
        self._made: dict[tuple[str, torch.device], Any] = self._share() or {
            (what, CPU): self._connect("gloo", what, CPU) for what in ("collectives", "messages")
        }
        against = "" if _own_gpu(len(members)) else "not every rank has a GPU of its own"
        self._nccl = not shm.agreed(dist.PrefixStore("gpus", store), len(members), against)
        self._settle()

    def _settle(self) -> None:
        """The store may live in the first rank: it stays until all have read there what they need."""
        if self.store.add("settled", 1) == len(self.members):
            self.store.set("all settled", "")
        if self.rank == 0:
            self.store.get("all settled")

    def _share(self) -> dict[tuple[str, torch.device], Any] | None:
        wanted = choice.transport()
        if wanted == "gloo":
            return None
        shared = shm.share(dist.PrefixStore("memory", self.store), self.rank, self.members, self.timeout)
        if isinstance(shared, str):
            if wanted == "shm":
                raise RuntimeError(f"transport='shm' is not there: {shared}; use 'gloo', or 'auto'")
            return None
        self.descriptor, mine = shared
        return {(what, CPU): shm.MemoryCommunicator(mine, f"{self.name} {what}") for what in ("collectives", "messages")}

    def _connect(self, kind: str, what: str, device: torch.device) -> EngineCommunicator:
        """All ranks with all, at once over gloo; over NCCL when they have something to say to one another."""
        store = dist.PrefixStore(f"{kind} {what}", self.store)
        engine = connect(kind, store, self.rank, len(self.members), timedelta(seconds=self.timeout))
        name, place = f"{self.name} {what}", (device, self.store, self.timeout)
        comm = EngineCommunicator(engine, *place, self.members, name, kind, self._signatures)
        comm.board, self._signatures = LastNote(), comm.signatures
        return comm

    @property
    def default(self) -> str:
        """The all-reduce of those who choose none: that of shared memory is the fastest there, and ours."""
        return "native" if self.descriptor >= 0 else "auto"

    def communicator(self, what: str, device: torch.device) -> Any:
        """For "collectives" or "messages" of tensors on this device; without NCCL, those of GPUs pass through the host."""
        device = device if self._nccl and device.type == "cuda" else CPU
        if (what, device) not in self._made:
            self._made[what, device] = self._connect("nccl", what, device)
        return self._made[what, device]

    def close(self, failed: bool = False) -> None:
        """Let go of memory and sockets: gloo's are closed when nobody knows them any more, and others notice.

        failed: this rank goes on no more, and who waits for it shall know.
        """
        for comm in self._made.values():
            if isinstance(comm, EngineCommunicator):
                comm.group = None
            else:
                comm.leave(failed)
        self._made.clear()
        self._signatures = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _own_gpu(ranks: int) -> bool:
    """Whether NCCL, which wants a GPU for each rank, can have them on this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return dist.is_nccl_available() and torch.cuda.device_count() >= here
