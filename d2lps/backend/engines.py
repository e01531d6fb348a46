"""Communicators over torch's own engines, gloo and NCCL, which no other program sees and which need no other group."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from d2lps.backend.failures import LastNote, Noticing
from d2lps.comm import Communicator, ReduceOp
from d2lps.comm.work import Transfer
from d2lps.processgroup import ProcessGroupCommunicator

OWN_TAGS = 1 << 30  # the program's own messages have tags from here on, those of the collectives are below


class SocketCommunicator(Noticing, ProcessGroupCommunicator):
    """`engine`: gloo, or a process group of NCCL; `members[r]`: rank r's number in the job; `tags`: where tags begin."""

    def __init__(
        self,
        engine: Any,
        backend: str,
        device: torch.device,
        members: Sequence[int],
        rank: int,
        name: str,
        timeout: float,
        store: dist.Store,
        tags: int = 0,
    ) -> None:
        Communicator.__init__(self, members, rank, name)
        self.group, self.backend, self.device, self.timeout, self.tags = engine, dist.Backend(backend), device, timeout, tags
        self.store = self._meeting = store
        self.node, self.board = socket.gethostname(), LastNote()
        self.generator = torch.Generator().manual_seed(rank)
        self._place, self._signatures, self._posting, self._splits = list(range(len(members))), None, None, 0

    def with_tags(self, tags: int) -> SocketCommunicator:
        """Another one on the same sockets, whose messages do not meet this one's."""
        return SocketCommunicator(
            self.group, self.backend, self.device, self.members, self.rank, self.name, self.timeout, self._meeting, tags
        )

    def _post_send(self, staged: torch.Tensor, dst: int, tag: int) -> Transfer:
        return super()._post_send(staged, dst, self.tags + self._checked(tag))

    def _post_recv(self, staged: torch.Tensor, src: int, tag: int) -> Transfer:
        return super()._post_recv(staged, src, self.tags + self._checked(tag))

    def _checked(self, tag: int) -> int:
        if tag >= OWN_TAGS:
            raise ValueError(f"tag={tag}: over this backend a tag is below {OWN_TAGS:,}")
        return tag

    # ---- together -------------------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        options = dist.BarrierOptions()
        options.device = self.device
        self.group.barrier(options).wait()

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        host = tensor.to(self._wire())
        with self.standing("native", nbytes=tensor.nbytes):
            self.group.allreduce([host], options).wait()
        if host is not tensor:
            tensor.copy_(host)

    def _gather_rows(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(self._wire())
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather([rows], [mine]).wait()
        return [row.cpu() for row in rows]

    def _split(self, color: int | None, key: int) -> SocketCommunicator | None:
        rows = self._gather_rows(torch.tensor([color is not None, color or 0, key]))
        self._splits += 1
        mine = sorted((int(row[2]), rank) for rank, row in enumerate(rows) if row[0] and row[1] == color)
        if color is None:
            return None
        members, name = [rank for _, rank in mine], f"{self.name}/{self._splits}.{color}"
        numbers, store = [self.members[rank] for rank in members], dist.PrefixStore(f"{self._splits}.{color}", self._meeting)
        rank, make = members.index(self.rank), gloo if self.backend == "gloo" else nccl
        return make(store, self.device, numbers, rank, name, self.timeout)


def gloo(
    store: dist.Store, device: torch.device, members: Sequence[int], rank: int, name: str, timeout: float
) -> SocketCommunicator:
    """All ranks connected with all, at once; tensors of GPUs are staged through the host."""
    store = dist.PrefixStore("gloo", store)
    engine = dist.ProcessGroupGloo(store, rank, len(members), timeout=timedelta(seconds=timeout))
    return SocketCommunicator(engine, "gloo", device, members, rank, name, timeout, store)


def nccl(
    store: dist.Store, device: torch.device, members: Sequence[int], rank: int, name: str, timeout: float
) -> SocketCommunicator:
    """GPUs, which connect when they have something to say to one another."""
    store = dist.PrefixStore("nccl", store)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    engine: Any = dist.ProcessGroup(store, rank, len(members))
    kind = dist.ProcessGroup.BackendType.NCCL
    engine._set_default_backend(kind)
    engine._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, len(members), options))
    engine._set_group_name(f"d2lps {name}")
    return SocketCommunicator(engine, "nccl", device, members, rank, name, timeout, store)
