"""Data-parallel training: every rank has the model and a part of the batch, and gradients are averaged as they get ready."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from d2lps.collectives import broadcast
from d2lps.comm import Communicator
from d2lps.parallel.data.buckets import MIB, buckets, flatten
from d2lps.parallel.data.priority import Scheduler
from d2lps.parallel.data.replicas import Replicas
from d2lps.parallel.ready import when_ready


class DataParallel(nn.Module):
    """A module whose gradients are the means of all ranks' once `backward` has returned; what DDP is in torch.

    >>> model = DataParallel(comm, nn.Linear(3, 1))             # rank 0's weights on every rank       # doctest: +SKIP
    >>> loss(model(my_part_of_the_batch)).backward()            # doctest: +SKIP
    >>> optimizer.step()                    # the same step on every rank                           # doctest: +SKIP

    Gradients are views of flat buckets of `bucket_cap` bytes (see `buckets`; None is DDP's default, 25 MiB and a first one of 1).
    A bucket is sent, beside the backward pass, when its last gradient is ready and, with order="fifo", all buckets before it
    have been sent. The first backward pass goes by `module.parameters()` backwards; then rank 0 tells in which order its
    gradients got ready, and buckets go by that. `zero_grad(set_to_none=False)` keeps the views, and spares a copy a step.
    Buffers, a batch norm's statistics for one, are rank 0's at the start and each rank's own from there.

    order, piece: see `Scheduler`.
    optimizer: a function that makes one of parameters, such as `partial(torch.optim.SGD, lr=0.1)`. Then `backward` does not
    wait, and leaves no gradients: a parameter takes its step when the next forward pass comes to the module that has it, or at
    `synchronize`. So communication goes on beside the forward pass too; that is where priorities pay.
    check: in so many averaging backward passes, from the first on, ranks compare their weights and gradients, which must be
    the same to the bit, and the tensors that `forward` got, which must not: Mismatch says what differs, where, and since when.

    Errors: RuntimeError with the names of parameters that a backward pass has left out: other ranks would wait for them, and in
    a backward pass of the bare module once its DataParallel is gone (see `when_ready`);
    Mismatch for models or options that are not alike on all ranks.
    Cost: an all-reduce of all gradients a step, by a ring 2(p - 1)/p n bytes a rank, and 2(p - 1) latencies a bucket. With k
    backward passes of b examples for a step (see `no_sync`), an example costs 2(p - 1)/p n/(k b) bytes: a larger local batch
    saves as much as accumulation, and takes memory for its activations. Source: Li et al. 2020 (PyTorch Distributed).
    """

    def __init__(
        self, comm: Communicator, module: nn.Module, bucket_cap: int | None = None, order: str = "fifo", piece: int | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None, check: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.comm, self.module = comm, module
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self._all = list(self._names)
        if not self._all:
            raise ValueError(f"{type(module).__name__} has no parameters that need gradients: there is nothing to average")
        self._caps = (25 * MIB, MIB) if bucket_cap is None else (bucket_cap, bucket_cap)
        self._settle(list(range(len(self._all))))
        self._schedule = partial(Scheduler, order=order, piece=piece)
        self._scheduler: Any = None  # of the backward pass that goes on, or of the last one
        self._missing: list[set[int]] = []  # while one goes on: of each bucket, which gradients are not ready
        self._seen: list[int] | None = []  # those that are, in turn, until the order is settled
        self._synchronize = True
        self._replicas, self._checks = Replicas(comm, module, buffers=False), check
        self._inputs: dict[str, Tensor] = {}
        shapes = [list(parameter.shape) for parameter in self._all]
        comm.agree(f"DataParallel({bucket_cap=}, {order=}, {piece=}) of {len(shapes)} parameters, {shapes}")
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(comm, tensor)
        for number, parameter in enumerate(self._all):
            when_ready(parameter, self._ready, number)
        self._optimizers = {parameter: optimizer([parameter]) for parameter in self._all} if optimizer else {}
        self._due: dict[nn.Parameter, int] = {}  # which have still to take their step, and their numbers
        for part in module.modules() if optimizer else ():
            part.register_forward_pre_hook(lambda part, _: self._step(part.parameters(recurse=False)))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self._missing:  # the last backward pass has raised an error
            self._finish()
        if self._replicas.steps < self._checks:
            self._inputs = {f"input {number}": x for number, x in enumerate(inputs) if isinstance(x, Tensor)}
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block leave each rank its own gradients, which add up; the next one averages the sums.

        >>> with model.no_sync():                               # doctest: +SKIP
        ...     loss(model(one_half)).backward()
        >>> loss(model(other_half)).backward()                  # doctest: +SKIP

        It only matters where `backward` is called. In DDP the forward pass decides: one outside of the block is averaged though
        its backward pass stands inside, and one inside is not, though its backward pass stands outside.
        """
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def synchronize(self) -> None:
        """With an `optimizer`: return when all parameters have taken their steps. At the end of training, or before you look."""
        self._step(self._all)

    # ---- buckets --------------------------------------------------------------------------------------------------

    def _settle(self, use: list[int]) -> None:
        """Lay out the buckets; use: the parameters' numbers in the order of their use, which is that of readiness backwards."""
        self.buckets = [[use[k] for k in bucket] for bucket in buckets([self._all[number] for number in use], *self._caps)]
        self._flat, views = zip(*(flatten([self._all[number] for number in bucket]) for bucket in self.buckets), strict=True)
        self._views: list[list[Tensor]] = list(views)
        places = ((number, (index, k)) for index, bucket in enumerate(self.buckets) for k, number in enumerate(bucket))
        self._place = dict(places)  # of a parameter: its bucket, and where in that

    # ---- a backward pass ------------------------------------------------------------------------------------------

    def _ready(self, number: int, parameter: nn.Parameter) -> None:
        """In the midst of the backward pass: this gradient is complete."""
        if not self._synchronize:
            return
        if not self._missing:
            self._begin()
        index, k = self._place[number]
        view = self._views[index][k]
        if parameter.grad is not view:
            self.comm.copy(view, parameter.grad)  # type: ignore[arg-type]
            parameter.grad = view
        if self._seen is not None:
            self._seen.append(number)
        if number not in self._missing[index]:
            raise RuntimeError(f"{self._names[parameter]} gets its gradient twice in a backward pass: it may be sent already")
        self._missing[index].remove(number)
        if not self._missing[index]:
            self._scheduler.ready(index)

    def _begin(self) -> None:
        if self._due:
            told = ", ".join(self._names[parameter] for parameter in self._due)
            raise RuntimeError(f"no forward pass has come to the modules of {told}, which so have not taken their last steps")
        self._missing = [set(bucket) for bucket in self.buckets]
        self._scheduler = self._schedule(self.comm, self._flat)
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """The backward pass is over."""
        scheduler, left, self._missing = self._scheduler, set().union(*self._missing), []
        if left:
            scheduler.close()
            told = ", ".join(self._names[self._all[number]] for number in sorted(left))
            raise RuntimeError(f"rank {self.comm.rank}: a backward pass has left out {told}: the loss must depend on them")
        if self._optimizers:
            self._due = {parameter: number for number, parameter in enumerate(self._all)}
            for parameter in self._all:
                parameter.grad = None  # it is under way: nobody else shall clear it, or use it
        else:
            scheduler.finish()
        if self._seen is not None:
            self.synchronize()
            broadcast(self.comm, order := torch.tensor(self._seen))
            self._settle(order.tolist()[::-1])
            self._seen = None
        if self._replicas.steps < self._checks:
            self._replicas.check(unlike=self._inputs)

    def _step(self, parameters: Iterable[nn.Parameter]) -> None:
        """The steps that these have still to take."""
        for parameter in parameters:
            if (number := self._due.pop(parameter, None)) is not None:
                index, k = self._place[number]
                self._scheduler.wait(index)
                parameter.grad = self._views[index][k]
                self._optimizers[parameter].step()
                parameter.grad = None
                if not self._due:
                    self._scheduler.finish()
