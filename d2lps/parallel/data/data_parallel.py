"""Data-parallel training: every rank has the model and a part of the batch, and gradients are averaged as they get ready."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from d2lps.collectives import broadcast
from d2lps.comm import Communicator
from d2lps.parallel.data.buckets import MIB, Scheduler, buckets, flatten
from d2lps.parallel.data.replicas import begin_alike, share_buffers
from d2lps.parallel.torch_hooks import Weakly, dense, when_ready


class DataParallel(nn.Module):
    """A module whose gradients are the means of all ranks' once `backward` has returned; what DDP is in torch.

    >>> model = DataParallel(comm, nn.Linear(3, 1))             # rank 0's weights on every rank       # doctest: +SKIP
    >>> loss(model(my_part_of_the_batch)).backward()            # doctest: +SKIP
    >>> optimizer.step()                    # the same step on every rank                           # doctest: +SKIP

    Gradients are views of flat buckets of `bucket_cap` bytes (see `buckets`; None is DDP's default, 25 MiB and a first one of 1).
    A bucket is sent, beside the backward pass, when its last gradient is ready and, with order="fifo", all buckets before it
    have been sent. The first backward pass goes by `module.parameters()` backwards; then rank 0 tells in which order its
    gradients got ready, and buckets go by that. `zero_grad(set_to_none=False)` keeps the views, and spares a copy a step.
    Who trains is asked anew in each averaging pass: parameters may be frozen, unfrozen and added, on all ranks alike; those that
    begin to train must be equal on all ranks. broadcast_buffers: whether buffers, such as a batch norm's statistics, become
    rank 0's at the end of each averaging pass; else they are so at the start, and each rank's own from there.

    order, piece: see `Scheduler`.
    optimizer: a function that makes one of parameters, such as `partial(torch.optim.SGD, lr=0.1)`. Then `backward` does not
    wait, and leaves no gradients: a parameter takes its step when the next forward pass comes to the module that has it, or at
    `synchronize`. So communication goes on beside the forward pass too; that is where priorities pay.

    Errors: RuntimeError with the names of parameters that a backward pass has left out: other ranks would wait for them, and in
    a backward pass of the bare module once its DataParallel is gone (see `when_ready`); ValueError for a sparse gradient;
    Mismatch for models or options that are not alike on all ranks. A pass that fails on all ranks may be followed by another.
    Cost: an all-reduce of all gradients a step, by a ring 2(p - 1)/p n bytes a rank, and 2(p - 1) latencies a bucket. With k
    backward passes of b examples for a step (see `no_sync`), an example costs 2(p - 1)/p n/(k b) bytes: a larger local batch
    saves as much as accumulation, and takes memory for its activations. Source: Li et al. 2020 (PyTorch Distributed).
    """

    def __init__(
        self, comm: Communicator, module: nn.Module, bucket_cap: int | None = None, order: str = "fifo", piece: int | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None, broadcast_buffers: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.comm, self.module, self._broadcasts, self._optimizer = comm, module, broadcast_buffers, optimizer
        if not (trained := self._trained()):
            raise ValueError(f"{type(module).__name__} has no parameters that need gradients: there is nothing to average")
        self._caps = (25 * MIB, MIB) if bucket_cap is None else (bucket_cap, bucket_cap)
        self._optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
        self._schedule = partial(Scheduler, order=order, piece=piece)
        self._scheduler: Any = None  # of the backward pass that goes on, or of the last one
        self._pass: Any = None  # the one that goes on, while it is alive,
        self._missing: list[set[int]] = []  # and of each bucket, which gradients are not ready
        self._synchronize = True
        shapes = [list(parameter.shape) for parameter in trained]
        comm.agree(f"DataParallel({bucket_cap=}, {order=}, {piece=}, {broadcast_buffers=}) of {len(shapes)} parameters, {shapes}")
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(comm, tensor)
        self._due: dict[nn.Parameter, int] = {}  # which have still to take their step, and their numbers
        self._heard = set[nn.Module | nn.Parameter]()  # which have our hooks
        self._begin_to_train(trained)
        module.register_forward_pre_hook(Weakly(self._listen))

    def forward(self, *inputs: Any, **options: Any) -> Any:
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

    def drop(self) -> None:
        """Let go of all gradients since the last step, on all ranks: those of a batch that is not to count, or has failed."""
        if self._scheduler is not None:
            self._scheduler.finish()
        self._due.clear()
        for parameter in self._all:
            parameter.grad = None

    # ---- who trains -----------------------------------------------------------------------------------------------

    def _trained(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self.module.named_parameters() if p.requires_grad}

    def _listen(self, *_: Any) -> None:
        """To all that train now, and to the modules whose forward passes their steps wait for."""
        for parameter in self._trained().keys() - self._heard:
            when_ready(parameter, self._ready)
            self._heard.add(parameter)
        for part in set(self.module.modules() if self._optimizer else ()) - self._heard:
            part.register_forward_pre_hook(Weakly(self._come_to))
            self._heard.add(part)

    def _begin_to_train(self, trained: dict[nn.Parameter, str]) -> None:
        self._names, self._all = trained, list(trained)
        self._numbers = {parameter: number for number, parameter in enumerate(self._all)}
        self._listen()
        self._settle(list(range(len(self._all))))
        self._seen: list[int] | None = []  # who is ready, in turn, until the order is settled
        if self._optimizer:
            self._optimizers |= {p: self._optimizer([p]) for p in self._all if p not in self._optimizers}

    # ---- buckets --------------------------------------------------------------------------------------------------

    def _settle(self, use: list[int]) -> None:
        """Lay out the buckets; use: the parameters' numbers in the order of their use, which is that of readiness backwards."""
        self.buckets = [[use[k] for k in bucket] for bucket in buckets([self._all[number] for number in use], *self._caps)]
        self._flat, views = zip(*(flatten([self._all[number] for number in bucket]) for bucket in self.buckets), strict=True)
        self._views: list[list[Tensor]] = list(views)
        places = ((number, (index, k)) for index, bucket in enumerate(self.buckets) for k, number in enumerate(bucket))
        self._place = dict(places)  # of a parameter: its bucket, and where in that

    # ---- a backward pass ------------------------------------------------------------------------------------------

    def _ready(self, parameter: nn.Parameter) -> None:
        """In the midst of the backward pass: this gradient is complete."""
        if not self._synchronize:
            return
        if self._pass is None or not self._pass.alive:
            self._begin()
        if (number := self._numbers.get(parameter)) is None:  # it is no longer of this module
            return
        index, k = self._place[number]
        view = self._views[index][k]
        if parameter.grad is not view:
            self.comm.copy(view, dense(self._names[parameter], parameter.grad))  # type: ignore[arg-type]
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
        if self._pass is not None:  # it has failed: what was ready then has to come to its end, or buckets would be used twice
            self._scheduler.finish()
        if (trained := self._trained()).keys() != self._names.keys():
            begin_alike(self.comm, {name: parameter for parameter, name in trained.items()})
            self._begin_to_train(trained)
        self._missing = [set(bucket) for bucket in self.buckets]
        self._scheduler = self._schedule(self.comm, self._flat)
        if self._seen:  # by a pass that has failed
            self._seen = []

        def over() -> None:
            self._finish()

        self._pass = finalize(over, self._scheduler.close)  # the engine lets go of `over` if an error ends the backward pass
        self._pass.atexit = False
        engine: Any = Variable._execution_engine
        engine.queue_callback(over)

    def _finish(self) -> None:
        """The backward pass is over."""
        self._pass.detach()
        scheduler, left = self._scheduler, set().union(*self._missing)
        if left:
            scheduler.close()
            told = ", ".join(self._names[self._all[number]] for number in sorted(left))
            raise RuntimeError(f"rank {self.comm.rank}: a backward pass has left out {told}: the loss must depend on them")
        self._pass = None
        if self._optimizer:
            self._due = dict(self._numbers)
            for parameter in self._all:
                parameter.grad = None  # it is under way: nobody else shall clear it, or use it
        else:
            scheduler.finish()
        if self._seen is not None:
            self.synchronize()
            broadcast(self.comm, order := torch.tensor(self._seen))
            self._settle(order.tolist()[::-1])
            self._seen = None
        if self._broadcasts:
            share_buffers(self.comm, self.module)

    def _come_to(self, part: nn.Module, *_: Any) -> None:
        self._step(part.parameters(recurse=False))

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
