"""The communicators of one group: for CPUs, for GPUs, and for the program's own messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from d2lps.backend import choice, engines, shm
from d2lps.comm import Communicator

CPU = torch.device("cpu")


class Transports:
    """Shared memory if all ranks can have it, else gloo; and NCCL for the tensors of GPUs if each rank has one of its own."""

    def __init__(self, store: dist.Store, rank: int, members: Sequence[int], name: str, timeout: float) -> None:
        # A store may outlive a group, and another one of this name: what this one leaves there is under a number of its own.
        store = dist.PrefixStore(str((store.add("arrivals", 1) - 1) // len(members)), store)
        self.store, self.rank, self.members, self.name, self.timeout = store, rank, list(members), name, timeout
        self.descriptor = -1
        self._cpu, self._messages = self._share() or self._connect()
        against = "" if _own_gpu(len(members)) else "not every rank has a GPU of its own"
        self._nccl = not shm.agreed(dist.PrefixStore("gpus", store), len(members), against)
        self._gpu: dict[tuple[str, torch.device], Any] = {}
        self._settle()

    def _settle(self) -> None:
        """The store may live in the first rank: it stays until all have read there what they need."""
        if self.store.add("settled", 1) == len(self.members):
            self.store.set("all settled", "")
        if self.rank == 0:
            self.store.get("all settled")

    def _share(self) -> tuple[Any, Any] | None:
        wanted = choice.transport()
        if wanted == "gloo":
            return None
        shared = shm.share(dist.PrefixStore("memory", self.store), self.rank, self.members, self.timeout)
        if isinstance(shared, str):
            if wanted == "shm":
                raise RuntimeError(f"transport='shm' is not there: {shared}; use 'gloo', or 'auto'")
            return None
        self.descriptor, mine = shared
        return shm.MemoryCommunicator(mine, self.name), shm.MemoryCommunicator(mine, self.name + "'s own")

    def _connect(self) -> tuple[Any, Any]:
        comm = engines.gloo(self.store, CPU, self.members, self.rank, self.name, self.timeout)
        return comm, comm.with_tags(engines.OWN_TAGS)

    @property
    def default(self) -> str:
        """The all-reduce of those who choose none: that of shared memory is the fastest there, and ours."""
        return "native" if self.descriptor >= 0 else "auto"

    def collectives(self, device: torch.device) -> Any:
        return self._nccl_on("collectives", device) if self._nccl and device.type == "cuda" else self._cpu

    def messages(self, device: torch.device) -> Any:
        return self._nccl_on("messages", device) if self._nccl and device.type == "cuda" else self._messages

    def _nccl_on(self, what: str, device: torch.device) -> Communicator:
        """NCCL has no tags to tell the two kinds apart by: each has connections of its own."""
        if (what, device) not in self._gpu:
            store = dist.PrefixStore(what, self.store)
            self._gpu[what, device] = engines.nccl(store, device, self.members, self.rank, self.name, self.timeout)
        return self._gpu[what, device]

    def give_up(self) -> None:
        """This rank goes on no more: who waits for it shall know."""
        if self.descriptor >= 0 and self._cpu is not None:
            self._cpu.mine.waiting.give_up()
        self.close()

    def close(self) -> None:
        """Let go of memory and sockets: gloo's are closed when nobody knows them any more, and others notice."""
        if self.descriptor >= 0:
            for comm in (self._cpu, self._messages):
                comm.leave()
            os.close(self.descriptor)
            self.descriptor = -1
        for comm in (self._cpu, self._messages, *self._gpu.values()):
            if isinstance(comm, engines.SocketCommunicator):
                comm.group = None
        self._cpu = self._messages = None
        self._gpu.clear()


def _own_gpu(ranks: int) -> bool:
    """Whether NCCL, which wants a GPU for each rank, can have them on this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return dist.is_nccl_available() and torch.cuda.device_count() >= here
