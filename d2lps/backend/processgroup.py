"""A process group of torch.distributed: each of its calls becomes a task for the group's thread, or a message posted at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from d2lps.backend.failures import explained
from d2lps.backend.operations import Operations
from d2lps.backend.tasks import Task, TaskQueue, callers_context
from d2lps.backend.transports import CPU, Transports
from d2lps.backend.work import CollectiveWork, MessageWork, Together
from d2lps.comm import Communicator, RankFailed, RankHung
from d2lps.launch.failure import release

_Base: Any = dist.ProcessGroup


class BookProcessGroup(Operations, _Base):
    """`operations` says what each call does; here is how it is done, and what happens when it fails.

    An error before anything was sent (an average of integers, a list that is too short) leaves the group as it was. After any
    other this rank does not know any more what the others wait for: it lets go of its sockets and memory, they notice, and all
    raise within a moment, as every later call does.
    """

    def __init__(self, store: dist.Store, rank: int, members: Sequence[int], name: str, timeout: float) -> None:
        _Base.__init__(self, rank, len(members))
        self.store = store
        self.transports: Transports = Transports(store, rank, members, name, timeout)
        self.tasks, self.group_name, self.group_desc = TaskQueue(name), name, ""
        self.broken: BaseException | None = None
        self._begun: list[Any] | None = None  # the works since _start_coalescing

    # ---- collectives ----------------------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        collective: Callable[[Communicator], None],
        options: Any = None,
    ) -> CollectiveWork:
        """Have a collective done, and return its work."""
        self._check(name, [*results, *inputs])
        work = CollectiveWork(self, name, results, _seconds(options))
        device = next((tensor.device for tensor in (*results, *inputs)), CPU)
        context = callers_context(device)

        def task() -> None:
            if self.broken is not None:  # since this was asked for
                work.finish(self._unusable(name))
                return
            comm = self.transports.communicator("collectives", device)
            comm.touched = False
            try:
                with context():
                    collective(comm)
                work.finish(None)
            except BaseException as error:
                work.finish(self._failed(error, comm, name))

        self.tasks.submit(task, at_once=getattr(options, "asyncOp", True) is False)
        return self._noted(work)

    def _check(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if self.broken is not None:
            raise self._unusable(name) from self.broken
        for tensor in tensors:
            if tensor.layout is not torch.strided and name != "all_reduce":
                raise NotImplementedError(f"d2lps: {name} of a tensor of layout {tensor.layout}; make it dense first")
            if tensor.device.type not in ("cpu", "cuda"):
                raise NotImplementedError(f"d2lps: {name} of a tensor on {tensor.device}; there are cpu and cuda")

    def _unusable(self, name: str) -> RankFailed:
        return RankFailed(f"{name}: this process group is of no more use since {self.broken}")

    def _failed(self, error: BaseException, comm: Any, name: str) -> BaseException:
        """What to raise for an error on this communicator; the group goes no further if others may be waiting."""
        if comm.touched and self.broken is None:
            release(error)
            error = self.broken = explained(error, comm, name, self.transports.members)
            self.transports.close(failed=True)
        return error

    def call_back(self, name: str, callbacks: Task) -> None:
        """Run what follows a collective; if it never ends, what waits for its turn fails, and with it all that hangs."""
        timeout = self.transports.timeout
        if not self.tasks.call_back(callbacks, timeout) and self.broken is None:
            self.broken = RankHung(f"a callback that follows {name} has done nothing for more than timeout={timeout:g} s")
            self.transports.close(failed=True)

    # ---- messages -------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        """Posted at once: a program may post its sends and receives in any order, and wait for them in any other."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, src, tag)

    def _message(self, action: str, tensors: list[torch.Tensor], peer: int, tag: int) -> MessageWork:
        self._check(action, tensors)
        (tensor,) = tensors
        comm = self.transports.communicator("messages", tensor.device)
        comm.touched = False
        try:
            message = (comm.isend if action == "send" else comm.irecv)(tensor, peer, tag)
        except RuntimeError as error:
            raise self._failed(error, comm, action) from error
        work = MessageWork(message, tensor, peer, lambda error: self._failed(error, comm, action))
        return self._noted(work)

    # ---- several calls as one -------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._begun = []

    def _end_coalescing(self, device: torch.device) -> Together:
        works, self._begun = self._begun or [], None
        return Together(works)

    def _noted(self, work: Any) -> Any:
        if self._begun is not None:
            self._begun.append(work)
        return work

    # ---- what torch asks a group ----------------------------------------------------------------------------------

    group_name = group_desc = ""  # in place of torch's, which look for an engine of torch's

    def getBackendName(self) -> str:
        return "d2lps"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self.group_desc = desc

    def getGroupName(self) -> str:
        return self.group_name

    def get_group_store(self) -> dist.Store:
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group_name!r}: rank {self.rank()} of {self.size()}>"

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """What was called is still done; then thread, memory and sockets go."""
        self.tasks.stop()
        self._end(RuntimeError("destroy_process_group"))

    def abort(self) -> None:
        """The same without waiting: the others will notice."""
        self._end(RuntimeError("abort"))
        self.tasks.stop(patience=0.0)

    def _end(self, why: BaseException) -> None:
        if self.broken is None:
            self.broken = why
            self.transports.close()


def _seconds(options: Any) -> float | None:
    """How long a call may take, where it says so itself; torch has -1 ms for as long as the group allows."""
    timeout = getattr(options, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
