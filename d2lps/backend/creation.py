"""How torch gets at the backend: `dist.init_process_group("d2lps")`, `dist.new_group(backend="d2lps")`, and in a run."""

from __future__ import annotations

import inspect
import socket
from typing import Any

import torch
import torch.distributed as dist

from d2lps.backend import work
from d2lps.backend.operations import Operations
from d2lps.backend.processgroup import BookProcessGroup
from d2lps.collectives import broadcast
from d2lps.comm import Communicator
from d2lps.signatures import store_at


def create(options: Any, _: Any = None) -> BookProcessGroup:
    """What torch calls on each rank of a new group."""
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    timeout = options.timeout.total_seconds()
    return BookProcessGroup(options.store, options.group_rank, members, options.group_id, timeout)


def register() -> None:
    dist.Backend.register_backend("d2lps", create, extended_api=True, devices=["cpu", "cuda"])
    for kind in (Operations, BookProcessGroup, *vars(work).values()):
        if isinstance(kind, type):
            _leave_uncompiled(kind)


def _leave_uncompiled(kind: type) -> None:
    """torch.compile shall step over these calls, and all that they call: a process group is closed to its eyes."""
    frames: Any = torch._C._dynamo.eval_frame  # without the rest of torch._dynamo, whose import takes a second
    if hasattr(frames, "_FrameExecStrategy"):  # torch 2.6 steps over by itself
        step_over = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for call in filter(inspect.isfunction, vars(kind).values()):
            frames.set_code_exec_strategy(call.__code__, step_over)


def group(comm: Communicator) -> Any:
    """A process group of all ranks of a `d2lps.run`, torch's default one if there is none yet; every rank calls this.

    >>> def train(comm):                                                    # doctest: +SKIP
    ...     model = DistributedDataParallel(Net(), process_group=d2lps.backend.group(comm))
    >>> d2lps.run(train, 4)                                                 # doctest: +SKIP
    """
    if dist.is_initialized():
        return dist.new_group(comm.members, backend="d2lps")
    dist.init_process_group("d2lps", store=_store(comm), rank=comm.rank, world_size=comm.size)
    return dist.group.WORLD


def _store(comm: Communicator) -> dist.Store:
    """A place to meet on the loopback interface: the first rank listens, and tells the others where."""
    port = torch.zeros(1, dtype=torch.int64)
    listener = socket.create_server(("127.0.0.1", 0), backlog=comm.size) if comm.rank == 0 else None
    if listener is not None:
        port += listener.getsockname()[1]
    broadcast(comm, port)
    descriptor = listener.detach() if listener is not None else None
    return store_at(int(port), comm.size, comm.rank, descriptor)


register()
