"""Unchanged DDP with the book's codecs: a communication hook, which gets a bucket of gradients and gives their average.

DDP calls it in the backward pass, as soon as a bucket is full, and goes on: a thread takes the buckets in their order.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future

from d2lps import compress
from d2lps.arguments import whole
from d2lps.backend.processgroup import BookProcessGroup
from d2lps.backend.tasks import callers_context
from d2lps.backend.transports import bounded
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp
from d2lps.comm.status import GroupBoard
from d2lps.processgroup import ProcessGroupCommunicator, connect

_made: Counter[str] = Counter()  # hooks, by group: on each rank in the same order


def ddp_hook(
    codec: compress.Codec | compress.ErrorFeedback, group: Any = None, start: int = 1, scaler: Any = None, **options: Any
) -> tuple["Averager", Callable[["Averager", dist.GradBucket], Future[Tensor]]]:
    """The state and the hook that DDP's `register_comm_hook` wants, to average gradients with a codec and error feedback.

    >>> model = DistributedDataParallel(net)                                            # doctest: +SKIP
    >>> model.register_comm_hook(*d2lps.backend.ddp_hook(compress.power_sgd(rank=2)))   # doctest: +SKIP

    What is left unsent of a parameter is `state.feedback.left[state.names[parameter]]`, whatever bucket it is in: DDP cuts its
    buckets anew after the first backward pass or, of a static graph, the second. group: DDP's process group, of gloo, NCCL or
    "d2lps"; by default the world. Messages have connections of their own. start: how many backward passes are averaged
    uncompressed, at least 1. options: as of `compress.all_reduce`. A linear codec gets a bucket's gradients in their shapes,
    others all of it as one tensor.

    Where a gradient on some rank is inf or NaN, its bucket is averaged uncompressed, and so is inf or NaN on all ranks: what a
    torch.amp.GradScaler looks for. scaler: that one. Residuals are then kept without its scale, and a backward pass whose step
    it will skip leaves them as they were; without it a warning says that they don't know of the scale.
    Errors: what goes wrong comes out of `backward`, as it is. Cost: for each bucket that of `compress.all_reduce`, and an
    all-reduce of one number; with a scaler, as much memory again as residuals, within a backward pass.
    """
    return Averager(codec, group or dist.group.WORLD, whole("start", start), scaler, options), average


def average(state: "Averager", bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook: begin to average a bucket."""
    return state.begin(bucket)


class Averager:
    """The hook's state: residuals by parameter, a communicator, and the thread that uses it."""

    def __init__(
        self, codec: compress.Codec | compress.ErrorFeedback, group: Any, start: int, scaler: Any, options: dict[str, Any]
    ) -> None:
        self.feedback = codec if isinstance(codec, compress.ErrorFeedback) else compress.ErrorFeedback(codec)
        self.group, self.start, self.scaler, self.options, self.passed = group, start, scaler, options, 0
        self.name = f"{group.group_name} hook {_made[group.group_name]}"
        _made[group.group_name] += 1
        self.names: dict[Tensor, str] = {}  #: of parameters: their numbers, in the order in which they have first come
        self.comm: Any = None
        self.thread = ThreadPoolExecutor(1, "d2lps hook")
        self.error: Exception | None = None  # of this backward pass,
        self.overflow = False  # and whether a gradient of it is inf or NaN on some rank

    def begin(self, bucket: dist.GradBucket) -> Future[Tensor]:
        data = bucket.buffer()
        self.comm = self.comm or communicator(self.group, data.device, self.name)
        if bucket.index() == 0:
            self._begin_pass()
        names = [self.names.setdefault(parameter, str(len(self.names))) for parameter in bucket.parameters()]
        job = partial(self._average, data, bucket.gradients(), names, self.passed < self.start, bucket.is_last())
        future, context = Future[Tensor](devices=[data.device] if data.is_cuda else None), callers_context(data.device)

        def run() -> None:
            try:
                if self.error is None:  # else this rank's place in the order of messages is lost
                    with context():
                        job()
            except Exception as error:
                self.error = error
            future.set_result(data)  # in any case: DDP's C++ does not know what a Python error is

        self.passed += bucket.is_last()
        self.thread.submit(run)
        return future

    def _begin_pass(self) -> None:
        feedback, engine = self.feedback, cast(Any, Variable._execution_engine)
        self.error, self.overflow = None, False
        feedback.unit = self.scaler.get_scale() if self.scaler else 1.0
        self.before = (dict(feedback.left), dict(feedback.second), dict(feedback.starts)) if self.scaler else None
        engine.queue_callback(lambda: engine.queue_callback(self._end_pass))  # behind DDP's own, which waits for the buckets

    def _end_pass(self) -> None:
        if self.error is not None:
            raise self.error

    def _average(self, data: Tensor, gradients: list[Tensor], names: list[str], plain: bool, last: bool) -> None:
        """In the thread. DDP has a bucket's gradients lie in one tensor, `data`."""
        if not plain:
            all_reduce(self.comm, finite := data.isfinite().all().int(), ReduceOp.MIN)
            plain = not finite
        if plain:
            all_reduce(self.comm, data, algorithm="native")
        else:
            compress.all_reduce(self.comm, gradients, self.feedback, names, **self.options)
        data.div_(self.comm.size)
        self.overflow |= not data.isfinite().all()
        if last and self.overflow:
            self._forget()

    def _forget(self) -> None:
        """No step will be taken by this pass, if there is a scaler: nothing of it is owed, nothing has been sent."""
        if self.before is not None:
            self.feedback.left, self.feedback.second, self.feedback.starts = self.before
        elif self.feedback.left:
            told = "a gradient is inf or NaN, and what codecs have left unsent does not know of a loss scale"
            warn(f"rank {self.comm.rank}: {told}: if a GradScaler scales the loss, tell ddp_hook(..., scaler=)", stacklevel=2)


def communicator(group: Any, device: torch.device, name: str) -> Communicator:
    """Of the ranks of a process group, for messages that meet none of its own; each rank calls this."""
    if isinstance(group, BookProcessGroup):
        comm: Communicator = group.transports.communicator("messages", device)._child(range(group.size()), name)
        comm.board = group.transports.board(comm.members)
        comm.connect()
        return comm
    engine = group._get_backend(device)
    _, patience, of_run = bounded(engine.options._timeout.total_seconds())
    store = dist.PrefixStore(name, dist.distributed_c10d._world.pg_map[group][1])
    mine, ranks = connect(engine.name(), store, group.rank(), group.size(), patience), dist.get_process_group_ranks(group)
    joined = ProcessGroupCommunicator(mine, device, store, patience, ranks, name)
    joined.board = GroupBoard(of_run, dict(zip(ranks, ranks, strict=True)))
    return joined
