"""The world of torch.distributed: ranks are processes, on one machine or on many, joined by gloo or NCCL.

gloo carries bytes between CPUs over sockets, NCCL between GPUs over NVLink, PCIe or the network. This file only lends
them the book's vocabulary; every byte is moved by torch's own engine.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from d2lps.comm import Communicator, Mismatch, ReduceOp
from d2lps.comm.rank import describe
from d2lps.comm.work import Transfer
from d2lps.signatures import Signatures, by_statement, fixed


class ProcessGroupCommunicator(Communicator):
    """A communicator over a torch.distributed process group (`group=None`: the default one).

    `members[r]` is the number of rank r in the whole job. torch sorts the ranks of a group, a split may ask for another
    order: `_place[r]` is rank r's number for torch.
    """

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str = "cpu",
        members: Sequence[int] | None = None,
        name: str = "world",
        timeout: float = 1800.0,
        store: dist.Store | None = None,
    ) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        members = list(members or range(dist.get_world_size(self.group)))
        super().__init__(members, members.index(dist.get_rank()), name)
        self._place = [sorted(members).index(member) for member in members]
        self.device, self.node, self.timeout = torch.device(device), socket.gethostname(), timeout
        self.backend = dist.get_backend(self.group)
        self.generator = torch.Generator().manual_seed(self.rank)
        self.store = store  # for the debug mode: where ranks leave the signatures of their messages
        self._signatures: Signatures | None = None
        self._posting: Any = None  # on NCCL, the messages that are being posted together
        self._splits = 0

    # ---- messages -------------------------------------------------------------------------------------------------

    def _wire(self) -> torch.device:
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def _post_send(self, staged: torch.Tensor, dst: int, tag: int) -> Transfer:
        self._check_tag(tag)
        return self._transfer(self.group.send([staged], self._place[dst], tag))

    def _post_recv(self, staged: torch.Tensor, src: int, tag: int) -> Transfer:
        self._check_tag(tag)
        return self._transfer(self.group.recv([staged], self._place[src], tag))

    @contextmanager
    def together(self) -> Iterator[None]:
        # NCCL runs what is posted singly one after another, so two ranks that both send first would wait for ever.
        if self.backend != "nccl":
            yield
            return
        with dist._coalescing_manager(group=self.group, device=self.device, async_ops=True) as self._posting:
            yield
        self._posting = None

    def _transfer(self, work: Any) -> Transfer:
        return _OnStream(self._posting or work) if self.backend == "nccl" else _OverSockets(work)

    def _check_tag(self, tag: int) -> None:
        if self.backend == "nccl" and tag:
            raise ValueError(f"tag={tag}: NCCL matches messages by their order alone and has no tags; use tag=0")

    # ---- the debug mode: ranks compare what they mean ---------------------------------------------------------------

    def _post(self, action: str, tensor: torch.Tensor, staged: torch.Tensor, peer: int, tag: int) -> Transfer:
        if not self.debug or self.store is None:
            return super()._post(action, tensor, staged, peer, tag)
        if self._signatures is None:
            self._signatures = Signatures(self.store, self.name, self.rank, self.members, self.timeout)
        post = functools.partial(super()._post, action, tensor, staged, peer, tag)
        sign = self._signatures.send if action == "send" else self._signatures.recv
        return sign(post, describe(tensor.flatten()), peer, tag)

    def agree(self, statement: str) -> None:
        with self.standing("agree"):
            rows = self._gather_rows(torch.frombuffer(bytearray(fixed(statement.encode())), dtype=torch.uint8))
        said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        if len(set(said)) > 1:
            raise Mismatch("the ranks disagree: " + by_statement(said, self.members))

    def _gather_rows(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The small tensor of every rank, by rank; moved by torch, outside the trace."""
        mine = mine.to(self._wire())
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [rows[place].cpu() for place in self._place]

    # ---- together -------------------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        dist.barrier(group=self.group)

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        with self.standing("native", nbytes=tensor.numel() * tensor.element_size()):
            dist.all_reduce(tensor, op, group=self.group)
            if self.backend == "nccl":
                torch.cuda.current_stream().synchronize()

    def _split(self, color: int | None, key: int) -> ProcessGroupCommunicator | None:
        rows = self._gather_rows(torch.tensor([color is not None, color or 0, key]))
        wishes = [tuple(row.tolist()) for row in rows]
        self._splits += 1
        mine = None
        for wanted in sorted({chosen for joins, chosen, _ in wishes if joins}):
            ordered = sorted((wish[2], rank) for rank, wish in enumerate(wishes) if wish[0] and wish[1] == wanted)
            members = [self.members[rank] for _, rank in ordered]
            group = self._new_group(members)
            if color == wanted:
                name = f"{self.name}/{self._splits}.{wanted}"
                mine = ProcessGroupCommunicator(group, self.device, members, name, self.timeout, self.store)
        return mine

    def _beside(self, name: str) -> ProcessGroupCommunicator:
        raise NotImplementedError

    def _new_group(self, members: list[int]) -> Any:
        """torch wants every rank of the job to make every group, unless told that some are not here."""
        absent = self.size < dist.get_world_size()
        if absent and dist.get_rank() not in members:
            return None
        timeout = timedelta(seconds=self.timeout)
        return dist.new_group(sorted(members), timeout=timeout, backend=self.backend, use_local_synchronization=absent)


class _OnStream:
    """An NCCL transfer is complete when the GPU's stream has run it, not when `wait` has returned."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def is_done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()
        torch.cuda.current_stream().synchronize()


class _OverSockets:
    """A transfer of gloo's."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def is_done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()
