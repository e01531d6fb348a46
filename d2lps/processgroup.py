"""The world of torch.distributed: ranks are processes, on one machine or on many, joined by gloo or NCCL.

gloo carries bytes between CPUs over sockets, NCCL between GPUs over NVLink, PCIe or the network. This file only lends
them the book's vocabulary; every byte is moved by torch's own engine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from d2lps.comm import Communicator, ReduceOp
from d2lps.signatures import Signatures, own_connection


class ProcessGroupCommunicator(Communicator):
    """A communicator over one of torch's engines (`group=None`: that of the default process group).

    `members[r]` is the number of rank r in the whole job. store: where ranks make other engines, and compare what has waited
    for long; the default group's, if none is given.
    """

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str = "cpu",
        members: Sequence[int] | None = None,
        name: str = "world",
        timeout: float = 1800.0,
        store: dist.Store | None = None,
        rank: int = -1,
        backend: str = "",
        signatures: Signatures | None = None,
    ) -> None:
        if group is None and not backend:  # with a backend, and without a group, it is connected later
            group = dist.group.WORLD
        super().__init__(members or range(group.size()), rank if rank >= 0 else group.rank(), name)
        self.group: Any = group
        self.device, self.node, self.timeout = torch.device(device), socket.gethostname(), timeout
        self.backend = backend or dist.get_backend(group)
        self.generator = torch.Generator().manual_seed(self.rank)
        self.store: Any = store or dist.distributed_c10d._get_default_store()
        self.signatures = signatures or Signatures(self.store)
        self._posting: Any = None  # on NCCL, the messages that are being posted together
        # All engines made from this one: an engine's sockets close with its last reference, and who still talks to others over it
        # would take that for this rank's death. Beside that of a started function, the barrier behind which all are done with it.
        self._engines: list[list[Any]] = []
        self._stores: list[Any] = []  # connections to the store that no started function uses just now

    # ---- messages -------------------------------------------------------------------------------------------------

    def _wire(self) -> torch.device:
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def _post(self, action: str, staged: torch.Tensor, peer: int, tag: int) -> Any:
        nccl, post = self.backend == "nccl", self.group.send if action == "send" else self.group.recv
        if nccl and tag:
            raise ValueError(f"tag={tag}: NCCL matches messages by their order alone and has no tags; use tag=0")

        def posted(tensor: torch.Tensor, coded: int) -> Any:
            work = post([tensor], peer, 0 if nccl else coded)
            return _OnStream(self._posting or work) if nccl else work

        if nccl and not self.debug:
            return posted(staged, 0)
        src, dst = (self.rank, peer) if action == "send" else (peer, self.rank)
        stream = (action, self.name, self.members[src], self.members[dst], tag)
        return self.signatures.message(stream, staged, posted, self.timeout if nccl else None)

    @contextmanager
    def together(self) -> Iterator[None]:
        # NCCL runs what is posted singly one after another, so two ranks that both send first would wait for ever.
        if self.backend != "nccl":
            yield
            return
        with dist._coalescing_manager(group=self.group, device=self.device, async_ops=True) as self._posting:
            yield
        self._posting = None

    # ---- together -------------------------------------------------------------------------------------------------

    def _exchange_statements(self, call: str, mine: bytes) -> list[bytes]:
        said = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._wire())
        rows = [torch.empty_like(said) for _ in range(self.size)]
        self.group.allgather([rows], [said]).wait()
        return [bytes(row.tolist()) for row in rows]

    def _barrier(self) -> None:
        self.group.barrier(self._barrier_options()).wait()

    def _barrier_options(self) -> Any:
        options = dist.BarrierOptions()
        options.device = self._wire()
        return options

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        host = tensor.to(self._wire())
        with self.waiting("native", nbytes=tensor.numel() * tensor.element_size()):
            self.group.allreduce([host], options).wait()
            if self.backend == "nccl":
                torch.cuda.current_stream().synchronize()
        if host is not tensor:
            tensor.copy_(host)

    # ---- groups ---------------------------------------------------------------------------------------------------

    def _child(self, ranks: Sequence[int], name: str, beside: bool = False) -> ProcessGroupCommunicator:
        members, rank = [self.members[each] for each in ranks], ranks.index(self.rank)
        made = ProcessGroupCommunicator(
            None, self.device, members, name, self.timeout, self.store, rank, self.backend, self.signatures
        )
        made._engines, made._stores = self._engines, self._stores
        if beside:
            made.store = None  # one of its own: while this start waits there for the other ranks, another one may
        return made

    def connect(self) -> None:
        """Make the engine, as every rank of the group does."""
        if self.store is None:
            try:
                self.store = self._stores.pop()
            except IndexError:
                self.store = own_connection(self.signatures.store)
        store = dist.PrefixStore(f"engine of {self.name}", self.store)
        self.group = connect(self.backend, store, self.rank, self.size, timedelta(seconds=self.timeout))
        self._engines.append([self.group])

    def disconnect(self) -> None:
        """Let go of the engine as soon as all ranks do."""
        self._stores.append(self.store)
        self._engines.remove([self.group])
        self._engines.append([self.group, self.group.barrier(self._barrier_options())])
        self.group = None
        for ended in [each for each in self._engines if each[1:] and each[1].is_completed()]:
            with suppress(ValueError):  # another thread has let go of it
                self._engines.remove(ended)


def connect(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """An engine among `size` ranks that have a store in common, of which torch's own list of groups does not know."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group: Any = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, size, options))
    group._set_group_name("d2lps")
    return group


class _OnStream:
    """An NCCL transfer is complete when the GPU's stream has run it, not when `wait` has returned."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def is_done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()
        torch.cuda.current_stream().synchronize()
