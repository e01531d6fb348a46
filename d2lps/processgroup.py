"""The world of torch.distributed: ranks are processes, on one machine or on many, joined by gloo or NCCL.

gloo carries bytes between CPUs over sockets, NCCL between GPUs over NVLink, PCIe or the network. This file only lends
them the book's vocabulary; every byte is moved by torch's own engine.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from d2lps.comm import Communicator, ReduceOp, Work
from d2lps.comm.ops import op_name
from d2lps.signatures import Signatures, own_connection

# What gloo adds up itself, and complex numbers as pairs; of another dtype it would spoil the group.
_GLOO = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_GLOO |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}


class ProcessGroupCommunicator(Communicator):
    """A communicator over one of torch's engines, which knows its rank and size.

    `members[r]` is the number of rank r in the whole job. store: where ranks make other engines, and compare what has waited
    for long. patience: seconds after which an engine gives a wait up.
    """

    def __init__(
        self, group: Any, device: torch.device, store: Any, patience: float, members: Sequence[int] = (), name: str = "world"
    ) -> None:
        super().__init__(members or range(group.size()), group.rank(), name)
        self.group, self.device, self.patience = group, device, patience
        self._store = store
        self.node, self.generator = socket.gethostname(), torch.Generator().manual_seed(self.rank)
        self.backend = group.name()
        self.signatures = Signatures(store, patience if self.backend == "nccl" else None)
        self._posting: Any = None  # on NCCL, the messages that are being posted together
        # All engines made from this one: an engine's sockets close with its last reference, and who still talks to others over it
        # would take that for this rank's death. For that of a function that has ended, the barrier behind which all are done.
        self._engines: dict[Any, Any] = {}
        self._family: WeakSet[ProcessGroupCommunicator] = WeakSet()  # this one, and all that were made from it
        self._family.add(self)
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
            return _on_stream(self._posting or work) if nccl else work

        if nccl and not self.debug:
            return posted(staged, 0)
        stream = (action, self.name, self.members[self.rank], self.members[peer], tag)
        return self.signatures.message(stream, staged, posted)

    @contextmanager
    def together(self) -> Iterator[None]:
        # NCCL runs what is posted singly one after another, so two ranks that both send first would wait for ever.
        nccl = self.backend == "nccl"
        with dist._coalescing_manager(self.group, self.device, async_ops=True) if nccl else nullcontext() as self._posting:
            yield
        self._posting = None

    # ---- together -------------------------------------------------------------------------------------------------

    def _exchange_statements(self, call: str, mine: bytes) -> list[bytes]:
        said = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._wire())
        rows = [torch.empty_like(said) for _ in range(self.size)]
        self.group.allgather([rows], [said]).wait()
        return [row.cpu().numpy().tobytes() for row in rows]

    def _barrier(self) -> None:
        self._post_barrier().wait()

    def _post_barrier(self) -> Any:
        options = dist.BarrierOptions()
        options.device = self._wire()
        if options.device.type == "cuda":  # else NCCL guesses one, and warns
            options.device_ids = [options.device.index]
        return self.group.barrier(options)

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if self.backend == "gloo" and tensor.dtype not in _GLOO and not (tensor.is_complex() and op == ReduceOp.SUM):
            raise ValueError(f"gloo's own all-reduce has no {op_name(op)} of {tensor.dtype} tensors: choose another algorithm")
        host = tensor.detach().to(self._wire())
        extreme = op in (ReduceOp.MIN, ReduceOp.MAX) and tensor.is_floating_point()
        with self.waiting("native", nbytes=tensor.numel() * tensor.element_size()):
            nan = host.isnan().byte() if extreme else None
            self._engines_all_reduce(host, op)
            if nan is not None:  # of NaN and a number the engines take the number
                self._engines_all_reduce(nan, ReduceOp.MAX)
                host.masked_fill_(nan.bool(), torch.nan)
        tensor.detach().copy_(host)  # which costs nothing where the two are the same

    def _engines_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        work = self.group.allreduce([tensor], options)
        (_on_stream(work) if self.backend == "nccl" else work).wait()

    # ---- groups ---------------------------------------------------------------------------------------------------

    def connect(self, beside: bool = False) -> None:
        """Make the engine, as every rank of the group does."""
        if beside:  # a connection of its own: while this start waits there for the other ranks, another one may
            try:
                self._store = self._stores.pop()
            except IndexError:
                self._store = own_connection(self.signatures.store)
        store = dist.PrefixStore(f"engine of {self.name}", self._store)
        self.group = connect(self.backend, store, self.rank, self.size, self.patience)
        self._engines[self.group] = None
        self._family.add(self)

    def disconnect(self) -> None:
        """Let go of the engine as soon as all ranks do."""
        self._stores.append(self._store)
        self._engines[self.group], self.group = self._post_barrier(), None
        for engine, left in list(self._engines.items()):
            if left is not None and left.is_completed():
                self._engines.pop(engine, None)  # unless another thread has let go of it

    def leave(self) -> None:
        """Let go of every engine, whoever still has a communicator: ranks that wait for this one learn that it is gone."""
        for comm in list(self._family):
            comm.group = None
        self._engines.clear()


def connect(backend: str, store: dist.Store, rank: int, size: int, patience: float) -> Any:
    """An engine among `size` ranks that have a store in common, of which torch's own list of groups does not know."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=patience))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=patience)
    group: Any = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, size, options))
    group._set_group_name("d2lps")
    return group


def _on_stream(work: Any) -> Work:
    """An NCCL transfer is complete when the GPU's stream has run it, not when `wait` has returned."""

    def finish() -> None:
        work.wait()
        torch.cuda.current_stream().synchronize()

    return Work(finish, work.is_completed)
