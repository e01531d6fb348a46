"""Communicators over torch's own engines, gloo and NCCL, which no other program sees and which need no other group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from d2lps.backend.noticing import LastNote, Noticing
from d2lps.comm.work import Transfer
from d2lps.processgroup import ProcessGroupCommunicator, connect

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
        super().__init__(engine, device, members, name, timeout, store, rank, backend)
        self.tags, self.board, self._meeting = tags, LastNote(), store

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
    engine = connect("gloo", store, rank, len(members), timedelta(seconds=timeout))
    return SocketCommunicator(engine, "gloo", device, members, rank, name, timeout, store)


def nccl(
    store: dist.Store, device: torch.device, members: Sequence[int], rank: int, name: str, timeout: float
) -> SocketCommunicator:
    """GPUs, which connect when they have something to say to one another."""
    store = dist.PrefixStore("nccl", store)
    engine = connect("nccl", store, rank, len(members), timedelta(seconds=timeout))
    return SocketCommunicator(engine, "nccl", device, members, rank, name, timeout, store)
