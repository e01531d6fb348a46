"""Data-parallel training: every rank has the model and a part of the batch, and gradients are averaged as they get ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from d2lps.collectives import all_reduce, broadcast
from d2lps.comm import Communicator, ReduceOp
from d2lps.parallel.buckets import MIB, buckets, flatten
from d2lps.parallel.priority import Scheduler


class DataParallel(nn.Module):
    """A module whose gradients are the means of all ranks' once `backward` has returned; what DDP is in torch.

    >>> model = DataParallel(comm, nn.Linear(3, 1))             # rank 0's weights on every rank       # doctest: +SKIP
    >>> loss(model(my_part_of_the_batch)).backward()            # doctest: +SKIP
    >>> optimizer.step()                    # the same step on every rank                           # doctest: +SKIP

    Gradients are views of flat buckets of `bucket_cap` bytes (see `buckets`). A bucket is sent, beside the backward pass, when
    its last gradient is ready and the buckets before it have been sent: in the same order on all ranks. The first backward pass
    goes by `module.parameters()` backwards; then rank 0 says in which order its gradients got ready, and buckets go by that.
    Buffers, a batch norm's statistics for one, are rank 0's at the start and each rank's own from there.
    bucket_cap: None is DDP's default, 25 MiB and a first bucket of 1 MiB. order, piece, credit: of the buckets, see `Scheduler`.
    reduce(comm', piece): another mean than `all_reduce` by `algorithm`, as by a codec.
    optimizer: a function of parameters that gives their optimizer, such as `partial(torch.optim.SGD, lr=0.1)`. Then `backward`
    does not wait: a parameter takes its step, and loses its gradient, when the next forward pass comes to the module that needs
    it, or at `synchronize`. So communication goes on beside that forward pass, which is where priorities pay.
    Errors: a RuntimeError that names the parameters that a backward pass has left out; ranks would wait for them for ever.
    Cost: an all-reduce of all gradients a step, 2(p - 1)/p n bytes a rank by a ring, in latencies that many times 2(p - 1).
    With k batches of b examples before each step (see `no_sync`), an example costs 2(p - 1)/p n / (k b) bytes: a larger local
    batch and accumulation save the same, and the second needs no memory.
    Source: Li et al. 2020 (PyTorch Distributed).
    """

    def __init__(
        self, comm: Communicator, module: nn.Module, bucket_cap: int | None = None, algorithm: str = "ring",
        order: str = "fifo", piece: int | None = None, credit: int = 1,
        reduce: Callable[[Communicator, Tensor], object] | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.comm, self.module = comm, module
        names, self._all = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
        self._names: list[str] = list(names)
        reduce = reduce or partial(all_reduce, op=ReduceOp.AVG, algorithm=algorithm)
        self._schedule = partial(Scheduler, order=order, piece=piece, credit=credit, reduce=reduce)
        self._caps = (25 * MIB, MIB) if bucket_cap is None else (bucket_cap, bucket_cap)
        for tensor in module.state_dict().values():
            broadcast(comm, tensor)
        self._settled, self._synchronize = False, True
        self._pass: _Pass | None = None  # the backward pass that goes on
        self._sending: _Pass | None = None  # the last one, while some of its gradients wait for their step
        self._settle(list(range(len(self._all))))
        for number, parameter in enumerate(self._all):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, number))
        self._optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
        if optimizer is not None:
            self._optimizers = {parameter: optimizer([parameter]) for parameter in self._all}
            for part in module.modules():
                part.register_forward_pre_hook(lambda part, _: self._step(list(part.parameters(recurse=False))))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block leave each rank's own gradients, which add up; the first one after it averages the sums.

        >>> with model.no_sync():                               # doctest: +SKIP
        ...     loss(model(one_half)).backward()
        >>> loss(model(other_half)).backward()                  # doctest: +SKIP

        Only where `backward` is called counts. In DDP it is where the forward pass was called: a forward pass outside of the
        block is averaged even if its backward pass stands inside, and the other way round it is not.
        """
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def synchronize(self) -> None:
        """With an `optimizer`: return when every parameter has taken its step. At the end of training, or before you look."""
        if self._sending is not None:
            self._step(list(self._all))

    def _step(self, parameters: list[nn.Parameter]) -> None:
        """The steps that these have still to take."""
        if (over := self._sending) is None:
            return
        for parameter in parameters:
            if (number := over.waiting.pop(parameter, None)) is not None:
                over.scheduler.wait(self._bucket_of[number])
                self._optimizers[parameter].step()
                self._optimizers[parameter].zero_grad()
        if not over.waiting:
            self._sending = None
            over.scheduler.finish()

    # ---- buckets --------------------------------------------------------------------------------------------------

    def _settle(self, use: list[int]) -> None:
        """Lay out the buckets; use: the parameters' numbers in the order of their use, which is that of readiness backwards."""
        kinds = buckets([self._all[number] for number in use], *self._caps)
        self.buckets = [[use[index] for index in bucket] for bucket in kinds]
        self._flat: list[Tensor] = []
        self._views: dict[int, Tensor] = {}
        for bucket in self.buckets:
            flat, views = flatten([self._all[number] for number in bucket])
            self._flat.append(flat)
            self._views |= dict(zip(bucket, views, strict=True))
        self._bucket_of = {number: index for index, bucket in enumerate(self.buckets) for number in bucket}

    # ---- a backward pass ------------------------------------------------------------------------------------------

    def _ready(self, number: int, parameter: nn.Parameter) -> None:
        """Called in the midst of the backward pass: this gradient is complete."""
        if not self._synchronize:
            return
        now = self._pass
        if now is None:
            self.synchronize()
            now = self._pass = _Pass([len(bucket) for bucket in self.buckets], self._schedule(self.comm, self._flat))
            engine: Any = Variable._execution_engine
            engine.queue_callback(partial(self._finish, now))
        view, gradient, index = self._views[number], parameter.grad, self._bucket_of[number]
        if gradient is not None and gradient is not view:
            self.comm.copy(view, gradient)
            parameter.grad = view
        now.seen.append(number)
        now.missing[index] -= 1
        while now.full < len(self._flat) and not now.missing[now.full]:
            now.scheduler.ready(now.full)
            now.full += 1

    def _finish(self, over: _Pass) -> None:
        """Called when the backward pass is over."""
        self._pass = None
        if left := sorted(set(range(len(self._all))) - set(over.seen)):
            over.scheduler.close()
            told = f"rank {self.comm.rank}: the backward pass has left out {', '.join(self._names[number] for number in left)}"
            raise RuntimeError(f"{told}; every parameter must have its part in the loss")
        if self._optimizers:
            over.waiting = {parameter: number for number, parameter in enumerate(self._all)}
            self._sending = over
        else:
            over.scheduler.finish()
        if not self._settled:
            self.synchronize()
            self._settled = True
            order = torch.tensor(over.seen)
            broadcast(self.comm, order)
            self._settle(order.tolist()[::-1])


class _Pass:
    """One backward pass: which gradients it has made, how many each bucket waits for, and how many buckets are full."""

    def __init__(self, missing: list[int], scheduler: Scheduler) -> None:
        self.missing, self.scheduler = missing, scheduler
        self.seen: list[int] = []
        self.full = 0
        self.waiting: dict[nn.Parameter, int] = {}  # for its step: a parameter, and its number
