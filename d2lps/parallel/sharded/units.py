"""Parameters that travel together: one flat tensor in equal shards, of which each rank owns one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from d2lps.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from d2lps.comm import Communicator, Event, ReduceOp, Work
from d2lps.parallel.saving.pieces import Piece, whole_of
from d2lps.parallel.shard import Shard, add_up_partial


class Unit:
    """Some parameters of a module as views of one flat tensor, padded so that the ranks of `comm` own equal shards of it.

    named: the parameters by name. They become views of the flat tensor, in `param_dtype`, that in which weights compute and
    travel. keeps: whether all weights stay (ZeRO 1 and 2), or are there from `gather` to `free` only (ZeRO 3).
    shard: what an optimizer steps on, a parameter of the dtype that the weights had; where that is `param_dtype`, nothing is held
    twice. main_grads: several passes' gradients are added up in the shard's dtype. beside: whether collectives go on beside what
    the rank does next (`comm.start`).
    What is held is written into `comm.memory`, as "weights", "gathered", "gradients" and "optimizer".
    ValueError for parameters that differ in dtype or device, with their names.
    """

    def __init__(
        self, comm: Communicator, named: Mapping[str, nn.Parameter], keeps: bool, param_dtype: torch.dtype | None, beside: bool,
        main_grads: bool,
    ) -> None:  # fmt: skip
        self.comm, self.keeps, self.beside = comm, keeps, beside
        self.names, self.parameters = list(named), list(named.values())
        self.shapes, self.sizes = [p.shape for p in self.parameters], [p.numel() for p in self.parameters]
        first = self.parameters[0]
        for name, p in named.items():
            if (p.dtype, p.device) != (first.dtype, first.device):
                told = f"{self.names[0]} is {first.dtype} on {first.device}, {name} {p.dtype} on {p.device}"
                raise ValueError(f"parameters that share a flat tensor must be alike: {told}")
        self.length = -(-sum(self.sizes) // comm.size)  # of a shard; the last ones may end in padding
        padding = first.new_zeros(self.length * comm.size - sum(self.sizes))
        whole = torch.cat([*(p.detach().flatten() for p in self.parameters), padding])
        self.weights = whole.to(param_dtype or first.dtype)
        own = self.weights.view(comm.size, -1)[comm.rank]
        self.mine = own if keeps else own.clone()  # of the weights: what the other ranks gather
        same = self.mine.dtype == first.dtype
        self.shard = nn.Parameter(self.mine if same else whole.view(comm.size, -1)[comm.rank].clone())
        self.shard.shard, self.shard.parts, self.shard.unreduced = Shard(comm, 0), self.parts, self.unreduced  # type: ignore
        comm.hold((self.weights if keeps else self.mine).nbytes, "weights")
        comm.hold(0 if same else self.shard.nbytes, "optimizer")  # the master weights
        self.passes = [0] * len(self.sizes)  # in how many backward passes since the last step each had a gradient
        self.before = self.passes  # and in how many when this sum began:
        self.sum_dtype = self.shard.dtype if main_grads else self.mine.dtype
        self.gradient: Tensor | None = None  # this rank's, of all parameters,
        self.views: list[Tensor] = []  # and of each
        self.mean: Tensor | None = None  # all ranks', of the shard: under way as long as there is `_reducing`,
        self.reduced: Tensor | None = None  # and then added to this one
        self._gathering: Work | None = None
        self._reducing: list[Work] = []
        self._rooms: dict[str, Callable[[], None]] = {}
        self._views = self.cut(self.weights)
        for p in self.parameters:
            p.lent = self.weights  # type: ignore[attr-defined]
        self._versions = [p._version for p in self.parameters]
        self._show()
        if not keeps:
            self.free()

    def cut(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor of all parameters as views of their shapes."""
        parts = flat[: sum(self.sizes)].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def parts(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Of a tensor like the shard, what belongs to each parameter: a flat run of it, mostly empty; no padding."""
        return [(p, flat[at : at + stop - start]) for p, (start, stop, at) in zip(self.parameters, self.held(), strict=True)]

    def held(self) -> list[tuple[int, int, int]]:
        """What the shard holds of each parameter: its elements from, to, and where in the shard they begin.

        >>> unit.held()         # on rank 1 of 2: of 3 and 4 elements the last 3, then padding      # doctest: +SKIP
        [(3, 3, 0), (1, 4, 0)]
        """
        runs, begin, at = [], self.comm.rank * self.length, 0
        for size in self.sizes:
            start, stop = (min(max(edge - at, 0), size) for edge in (begin, begin + self.length))
            runs.append((start, stop, max(at - begin, 0)))
            at += size
        return runs

    def pieces(self) -> dict[str, Piece]:
        """What the shard holds of each parameter, as views of it, by name: what a checkpoint saves, or loads."""
        rows = zip(self.names, self.parameters, self.shapes, self.held(), strict=True)
        flat = self.shard.detach()
        return {
            getattr(parameter, "known_as", name): Piece(flat[at : at + stop - start], *whole_of(parameter, shape), start, stop)
            for name, parameter, shape, (start, stop, at) in rows
            if start < stop
        }

    # ---- weights --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Begin to fetch the weights of all ranks, unless they are there or on their way: an all-gather."""
        if not self.keeps and self._gathering is None:
            nbytes = self.weights.numel() * self.weights.element_size()
            self._hold("gathered", nbytes, "gathered")
            self.weights.untyped_storage().resize_(nbytes)
            self._gathering = self._begin(self.comm, ("weights", "P_*", "P"), all_gather_into_tensor, self.weights, self.mine)

    def wait(self) -> None:
        """Return when they are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._show()

    def _show(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data, parameter.away = view, False  # type: ignore[attr-defined]

    def free(self) -> None:
        """Keep the shard alone. What autograd has saved are views of the same storage: after a `gather` they are whole again."""
        if self.keeps:
            return
        if self._gathering is not None:
            self._gathering.wait()
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = self.mine.new_full((), torch.nan).expand(shape)  # whoever looks sees that, rather than freed memory,
            parameter.away = True  # type: ignore[attr-defined]  # and whoever asks `here` is told
        self.weights.untyped_storage().resize_(0)
        self._gathering = None
        self._release("gathered")

    def check_written(self, rank: int) -> None:
        """RuntimeError for parameters that somebody has written into, if they are copies of shards which know nothing of it."""
        rows = zip(self.names, self.parameters, self._versions, strict=True)
        names = ", ".join(name for name, p, version in rows if p._version != version)
        if names and not (self.keeps and self.mine.dtype == self.shard.dtype):
            told = f"somebody has written into {names}, which the step would undo: they are copies of the weights in the shards"
            raise RuntimeError(f"rank {rank}: {told}; load weights before Zero is made, or into its pieces()")

    def stepped(self) -> None:
        """The shard has changed: so do the weights, on all ranks. Its gradient has been used, and goes."""
        self.drop()
        self._versions = [p._version for p in self.parameters]
        if self.mine.data_ptr() != self.shard.data_ptr() or self.mine.dtype != self.shard.dtype:
            self.mine.copy_(self.shard.detach())  # rounded to the nearest
        self.free()
        if self.keeps:
            with self.comm.about("weights", "P_*", "P"):
                all_gather_into_tensor(self.comm, self.weights, self.mine)

    # ---- gradients ------------------------------------------------------------------------------------------------

    def add(self, number: int, gradient: Tensor, more: bool) -> bool:
        """Take a parameter's gradient; True if none is missing now in this backward pass. more: it is not the last pass."""
        if self.gradient is None:
            dtype = self.sum_dtype if more else self.mine.dtype  # a sum of one is not rounded
            self._sum_up_in(self.mine.new_zeros(self.length * self.comm.size, dtype=dtype))
            self.before = self.passes.copy()
        elif self.passes[number] > self.before[number] and self.gradient.dtype != self.sum_dtype:
            self._sum_up_in(self.gradient.to(self.sum_dtype))
        self.views[number].add_(gradient)
        self.passes[number] += 1
        return min(self.passes) == max(self.passes)

    def _sum_up_in(self, flat: Tensor) -> None:
        self.gradient, self.views = flat, self.cut(flat)
        self._hold("whole", flat.nbytes, "gradients")

    def left_out(self, ever: bool) -> list[str]:
        """Names of parameters without a gradient: in a backward pass that others have got one in, or `ever` since the last step.

        Passes of a pipeline's stages come in turns: where a unit spans several stages, none of its passes is over in between.
        """
        enough = 1 if ever else max(1, *self.passes)
        rows = zip(self.names, self.parameters, self.passes, strict=True)
        return [name for name, p, passes in rows if passes < enough and p.requires_grad]

    def frozen(self) -> list[str]:
        """Names of parameters that have been frozen, while others in the same flat tensor go on: a step would move all of it."""
        names = [name for name, p in zip(self.names, self.parameters, strict=True) if not p.requires_grad]
        return names if len(names) < len(self.names) else []

    def unreduced(self) -> bool:
        """Whether there are gradients that the shard does not have yet."""
        return not (self.gradient is self.mean is self.reduced is None)

    def reduce(self, replicas: Communicator, before: Event | None = None) -> Event | None:
        """Start to average: every rank gets the mean of its shard, by a reduce-scatter; `settle` waits for it.

        replicas: the ranks of other groups that own the same shard; their means are averaged too, by an all-reduce. before: when
        what travels before has ended; lanes wait for it, and not the caller. Returns when this one will have.
        """
        self.settle()
        assert self.gradient is not None
        whole, self.gradient, self.views = self.gradient.to(self.mine.dtype), None, []
        self._hold("whole", whole.nbytes, "gradients")
        self._rooms["under way"] = self._rooms.pop("whole")
        add_up_partial(zip(self.parameters, self.cut(whole), strict=True))
        alone = self.comm.size == 1  # with all of the state: the reduction is the replicas'
        self.mean = mean = whole if alone else whole.new_empty(self.length)
        if not alone:
            shares = ("grads", "P", "P_*", True), reduce_scatter_tensor, mean, whole
            before = self._start_behind(before, self.comm, *shares)
        if alone or replicas.size > 1:
            before = self._start_behind(before, replicas, ("grads", "P", "P", True), all_reduce, mean)
        if not self.beside:
            self.settle()
        return before

    def settle(self) -> None:
        """Wait for a reduction that has been started, and add its mean to what there is."""
        if self.mean is not None:
            works, self._reducing = self._reducing, []
            for work in works:
                work.wait()
            self._release("under way")
            mean, self.mean = self.mean, None
            self.reduced = mean if self.reduced is None else self.reduced.to(self.sum_dtype).add_(mean)
            self._hold("mean", self.reduced.nbytes, "gradients")

    def hand_over(self) -> None:
        """The mean becomes, or is added to, the shard's gradient."""
        if self.reduced is not None:
            mean, self.reduced = self.reduced.to(self.shard.dtype), None
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)
            self._release("mean")
            self._hold("grad", mean.nbytes, "gradients")

    def drop(self) -> None:
        """Let go of all gradients since the last step."""
        self.settle()
        self.gradient = self.mean = self.reduced = self.shard.grad = None
        self.passes, self.views = [0] * len(self.sizes), []
        for what in ("whole", "mean", "grad"):
            self._release(what)

    # ---- glue -----------------------------------------------------------------------------------------------------

    def _begin(self, comm: Communicator, about: Any, function: Callable[..., Any], *args: Any) -> Work:
        parts = {name.partition(".")[0] for name in self.names}  # one, where a unit is a child: "block2"
        name, *pieces = about
        with comm.about(" ".join([*(parts if len(parts) == 1 else []), name]), *pieces):
            if self.beside:
                return comm.start(function, *args)
            function(comm, *args)
        return Work(lambda: None, lambda: True)

    def _start_behind(
        self, before: Event | None, comm: Communicator, about: Any, function: Callable[..., Any], *args: Any
    ) -> Event:
        """Start to average a gradient as soon as what is `before` it has ended: one travels at a time."""
        over = Event()

        @wraps(function)
        def in_turn(comm: Communicator, *args: Any) -> None:
            if before is not None:
                comm.wait(before)
            try:
                function(comm, *args)
            finally:  # whoever comes behind would wait for ever
                comm.signal(over)

        self._reducing.append(self._begin(comm, about, in_turn, *args, ReduceOp.AVG))
        return over

    def _hold(self, what: str, nbytes: int, label: str) -> None:
        self._release(what)
        self._rooms[what] = self.comm.hold(nbytes, label)

    def _release(self, what: str) -> None:
        if what in self._rooms:
            self._rooms.pop(what)()
