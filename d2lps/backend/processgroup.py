"""A process group of torch.distributed: each of its calls becomes a task for the group's thread, or a message posted at once."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from d2lps.backend import work
from d2lps.backend.operations import CALLS, leaves
from d2lps.backend.tasks import Task, TaskQueue, callers_context
from d2lps.backend.transports import CPU, Transports
from d2lps.backend.work import BookWork, CollectiveWork
from d2lps.collectives import broadcast
from d2lps.comm import Communicator, RankDied, RankFailed, RankHung
from d2lps.comm.explain import describe_status
from d2lps.comm.rank import running
from d2lps.comm.status import readers_line
from d2lps.launch.failure import meaning, release
from d2lps.signatures import place_to_meet, store_at
from d2lps.simulator.local import SimulatedRank

Tensors = Sequence[torch.Tensor]
_Base: Any = dist.ProcessGroup


class BookProcessGroup(_Base):
    """`operations` says what each call does; here is how it is done, and what happens when it fails.

    An error before anything was sent (an average of integers, a list that is too short) leaves the group as it was. After any
    other this rank does not know any more what the others wait for: it lets go of its sockets and memory, they notice, and all
    raise within a moment, as every later call does.
    """

    in_run: Sequence[int] = ()  # what the run calls the ranks of torch's default group, where it calls them otherwise than torch
    group_name = ""  # in place of torch's, which looks for an engine of torch's

    def __init__(self, options: Any, _: Any = None) -> None:
        """As torch makes it, on each rank of a new group."""
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        _Base.__init__(self, options.group_rank, len(members))
        self.store, self.group_name = options.store, options.group_id
        in_run = [self.in_run[member] for member in members] if self.in_run else members
        timeout = options.timeout.total_seconds()
        self.transports = Transports(options.store, options.group_rank, members, options.group_id, timeout, in_run)
        self.tasks = TaskQueue(options.group_id)
        self.broken: BaseException | None = None

    # ---- collectives ----------------------------------------------------------------------------------------------

    def _run(self, operation: Callable[..., None], *given: Any, **named: Any) -> CollectiveWork:
        """Have one of the `operations` done, and return its work; what it writes to is its first argument."""
        every, line = [*given, *named.values()], readers_line(sys._getframe())
        name, tensors = operation.__name__, leaves(every)
        self._check(name, tensors)
        work, device = CollectiveWork(self, name, leaves(every[:1])), tensors[0].device if tensors else CPU
        context = callers_context(device)

        def task() -> None:
            comm, running.began = None, line  # which the group's thread does not know
            try:
                self._check(name, tensors)  # once more: the group may have broken since
                comm = self.transports.communicator("collectives", device)
                with context():
                    operation(comm, *given, **named)
            except BaseException as error:
                work.error = self._failed(error, comm, name)
            work.done.set()

        waits = any(getattr(each, "asyncOp", True) is False for each in every)  # torch's options are among them
        self.tasks.submit(task, at_once=waits)
        return work

    def _check(self, name: str, tensors: Tensors) -> None:
        if self.broken is not None:
            raise RankFailed(f"{name}: this process group is of no more use since {self.broken}") from self.broken
        for tensor in tensors:
            if tensor.layout is not torch.strided and name != "all_reduce":
                raise NotImplementedError(f"d2lps: {name} of a tensor of layout {tensor.layout}; make it dense first")
            if tensor.device.type not in ("cpu", "cuda"):
                raise NotImplementedError(f"d2lps: {name} of a tensor on {tensor.device}; there are cpu and cuda")

    def _failed(self, error: BaseException, comm: Any, name: str) -> BaseException:
        """What to raise for an error on this communicator; the group goes no further if others may be waiting."""
        if comm and comm.touched and self.broken is None:
            release(error)
            error = explained(error, comm, name, self.transports.members)
            comm.board.write(None)  # the program may catch this, and go on with something else
            self._break(error)
        return error

    def _break(self, why: BaseException, failed: bool = True) -> None:
        """From here on this group is of no more use."""
        if self.broken is None:
            self.broken = why
            self.transports.close(failed)

    def call_back(self, name: str, callbacks: Task) -> None:
        """Run what follows a collective; if it never ends, what waits for its turn fails, and with it all that hangs."""
        timeout = self.transports.timeout
        if not self.tasks.call_back(callbacks, timeout):
            self._break(RankHung(f"a callback that follows {name} has done nothing for more than timeout={timeout:g} s"))

    # ---- messages -------------------------------------------------------------------------------------------------

    def _message(self, action: str, tensors: Tensors, peer: int, tag: int = 0) -> BookWork:
        """Posted at once: a program may post its sends and receives in any order, and wait for them in any other."""
        self._check(action, tensors)
        (tensor,) = tensors
        comm = self.transports.communicator("messages", tensor.device)
        with self._telling(action, comm, RuntimeError):  # a ValueError comes before anything was posted
            message = (comm.isend if action == "send" else comm.irecv)(tensor, peer, tag)

        error: Exception | None = None

        def is_done() -> bool:
            """Then what came is in the tensor, too, also where it came by way of a copy; an error is for `finish` to tell."""
            nonlocal error
            try:
                return message.test()
            except Exception as failed:
                error = failed
            return True

        def finish() -> None:
            with self._telling(action, comm, Exception):
                if error is not None:
                    raise error
                message.wait()

        return BookWork("the message", tensors, finish, is_done)

    @contextmanager
    def _telling(self, action: str, comm: Any, kind: type[Exception]) -> Iterator[None]:
        """Raise an error of this block as all of the group's are."""
        try:
            yield
        except kind as error:
            told = self._failed(error, comm, action)
            raise told from (error if told is not error else error.__cause__)

    send, recv = partialmethod(_message, "send"), partialmethod(_message, "recv")

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> NoReturn:
        raise NotImplementedError("d2lps: recv from any source; say from which rank, messages match by their sender")

    # ---- what torch asks a group ----------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "d2lps"

    def getGroupName(self) -> str:
        return self.group_name

    def get_group_store(self) -> dist.Store:
        return self.store

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("d2lps: split_group; new_group makes smaller groups")

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """What was called is still done; then thread, memory and sockets go."""
        self.tasks.stop()
        self._break(RuntimeError("destroy_process_group"), failed=False)

    def abort(self) -> None:
        """The same without waiting: the others will notice."""
        self._break(RuntimeError("abort"), failed=False)
        self.tasks.stop(patience=0.0)


for _name, _operation in CALLS.items():
    setattr(BookProcessGroup, _name, partialmethod(BookProcessGroup._run, _operation))


def explained(error: BaseException, comm: Any, name: str, numbers: Sequence[int]) -> BaseException:
    """An error of the transport, told in our words and with the place where this rank stood; `numbers`: the ranks' in the job."""
    note = comm.board.status
    told = f"{name} of ranks {list(numbers)}: {str(error).partition(' This is typically')[0]}"  # gloo guesses why
    if note is not None:
        peer = numbers[comm.members.index(note.peer)] if note.peer >= 0 else -1
        # Without the line: the thread's own says nothing, and the program's is in the traceback of its wait.
        told += "\n" + describe_status(replace(note, rank=numbers[comm.rank], peer=peer, line=0))
    if isinstance(error, RankDied | RankFailed | RankHung):
        return type(error)(told)
    kind = meaning(error)
    if kind is RankFailed:
        told = f"another rank was lost in {told}"
    return kind(told) if kind else error


# ---- how torch gets at it: dist.init_process_group("d2lps"), dist.new_group(backend="d2lps"), and in a run -------------


def register() -> None:
    dist.Backend.register_backend("d2lps", BookProcessGroup, extended_api=True, devices=["cpu", "cuda"])
    frames: Any = torch._C._dynamo.eval_frame  # without the rest of torch._dynamo, whose import takes a second
    if not hasattr(frames, "_FrameExecStrategy"):  # torch 2.6 steps over by itself
        return
    # torch.compile shall step over these calls, and all that they call: a process group is closed to its eyes.
    step_over = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for kind in (BookProcessGroup, *filter(inspect.isclass, vars(work).values())):
        for call in filter(inspect.isfunction, vars(kind).values()):
            frames.set_code_exec_strategy(call.__code__, step_over)


def group(comm: Communicator) -> Any:
    """A process group of all ranks of a `d2lps.run`, torch's default one if there is none yet; every rank calls this.

    A wait in it, or in any other group of backend "d2lps" that the function makes, lasts no longer than the run's `timeout`.

    TypeError in a simulation.

    >>> def train(comm):                                                    # doctest: +SKIP
    ...     model = DistributedDataParallel(Net(), process_group=d2lps.backend.group(comm))
    >>> d2lps.run(train, 4)                                                 # doctest: +SKIP
    """
    if isinstance(comm, SimulatedRank):
        raise TypeError("torch.distributed's calls wait in real time, and no simulated rank can: take a run of processes")
    if dist.is_initialized():
        return dist.new_group(comm.members, backend="d2lps")
    BookProcessGroup.in_run = comm.members
    dist.init_process_group("d2lps", store=store_of(comm), rank=comm.rank, world_size=comm.size)
    return dist.group.WORLD


def store_of(comm: Communicator) -> dist.Store:
    """A place to meet that the first rank makes, and tells the others of."""
    file, port = place_to_meet(comm.size)
    broadcast(comm, place := torch.tensor([file, port, os.getpid()], device="cpu"))
    if comm.rank:
        os.close(file)  # the first rank's stays open: it is the store's, whose end nobody sees
    return store_at(int(place[0]), int(place[1]), comm.size, comm.rank, int(place[2]))


register()
