"""Unchanged DDP with the book's codecs: a communication hook, which gets a bucket of gradients and gives their average.

DDP calls it in the backward pass, as soon as a bucket is full, and goes on: a thread takes the buckets in their order.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from d2lps import collectives, compress
from d2lps.backend.processgroup import BookProcessGroup
from d2lps.backend.tasks import callers_context
from d2lps.comm import Communicator
from d2lps.cost.numbers import whole
from d2lps.processgroup import ProcessGroupCommunicator, connect

_made: Counter[str] = Counter()  # hooks, by group: on each rank in the same order


def ddp_hook(
    codec: compress.Codec | compress.ErrorFeedback, group: Any = None, start: int = 1, **options: Any
) -> tuple["Averager", Callable[["Averager", dist.GradBucket], Future[Tensor]]]:
    """The state and the hook that DDP's `register_comm_hook` wants, to average gradients with a codec and error feedback.

    >>> model = DistributedDataParallel(net)                                            # doctest: +SKIP
    >>> model.register_comm_hook(*d2lps.backend.ddp_hook(compress.power_sgd(rank=2)))   # doctest: +SKIP

    What is left unsent of bucket 0 is `state.feedback.left["0"]`. group: DDP's process group, of gloo, NCCL or "d2lps"; by
    default the world. Messages have connections of their own. start: how many backward passes are averaged uncompressed, at
    least 1: DDP cuts its buckets anew after the first. options: as of `compress.all_reduce`. A linear codec gets a bucket's
    gradients in their shapes, others all of it as one tensor. Cost: that of `compress.all_reduce`, for each bucket.
    """
    return Averager(codec, group or dist.group.WORLD, whole("start", start), options), average


def average(state: "Averager", bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook: begin to average a bucket."""
    return state.begin(bucket)


class Averager:
    """The hook's state: residuals by bucket, a communicator, and the thread that uses it."""

    def __init__(self, codec: compress.Codec | compress.ErrorFeedback, group: Any, start: int, options: dict[str, Any]) -> None:
        self.feedback = codec if isinstance(codec, compress.ErrorFeedback) else compress.ErrorFeedback(codec)
        self.group, self.start, self.options, self.passed = group, start, options, 0
        self.name = f"{group.group_name} hook {_made[group.group_name]}"
        _made[group.group_name] += 1
        self.comm: Any = None
        self.thread = ThreadPoolExecutor(1, "d2lps hook")

    def begin(self, bucket: dist.GradBucket) -> Future[Tensor]:
        data, plain, name = bucket.buffer(), self.passed < self.start, str(bucket.index())
        self.comm = self.comm or communicator(self.group, data.device, self.name)
        tensors = bucket.gradients() if self.feedback.codec.linear else data
        future, context = Future[Tensor](devices=[data.device] if data.is_cuda else None), callers_context(data.device)

        def average() -> None:
            try:
                with context():
                    if plain:
                        collectives.all_reduce(self.comm, data, algorithm="native")
                    else:
                        compress.all_reduce(self.comm, tensors, self.feedback, name, **self.options)
                    future.set_result(data.div_(self.comm.size))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self.passed += bucket.is_last()
        self.thread.submit(average)
        return future


def communicator(group: Any, device: torch.device, name: str) -> Communicator:
    """Of the ranks of a process group, for messages that meet none of its own; each rank calls this."""
    if isinstance(group, BookProcessGroup):
        comm: Communicator = group.transports.communicator("messages", device)._child(range(group.size()), name)
        comm.connect()
        return comm
    engine = group._get_backend(device)
    timeout = engine.options._timeout.total_seconds()
    store = dist.PrefixStore(name, dist.distributed_c10d._world.pg_map[group][1])
    mine = connect(engine.name(), store, group.rank(), group.size(), timeout)
    return ProcessGroupCommunicator(mine, device, store, timeout, dist.get_process_group_ranks(group), name)
