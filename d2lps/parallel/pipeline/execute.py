"""Carries out any schedule of a pipeline on real ranks: each has some stages of the model, and micro-batches go through them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from d2lps.comm import Communicator
from d2lps.comm.rank import describe
from d2lps.parallel.activations import Kept, weights_of
from d2lps.parallel.pipeline.p2p import DTYPES, NOTE, Mail, awaited
from d2lps.parallel.pipeline.schedules import Action, Schedule, after, placed, traffic
from d2lps.parallel.torch_hooks import Pair, same


def execute(
    comm: Communicator, stages: Mapping[int, nn.Module], schedule: Schedule, inputs: Sequence[Tensor] | None = None,
    targets: Sequence[Any] | None = None, loss: Callable[[Tensor, Any], Tensor] | None = None, busy: Counter[int] | None = None,
) -> Tensor | None:  # fmt: skip
    """Forward and backward of one batch; gradients are added to those of the stages' parameters.

    >>> model = sizes.module(seed=0)                                            # doctest: +SKIP
    >>> mine = {comm.rank: model[[slice(0, 3), slice(3, 6)][comm.rank]]}        # 2 ranks, 3 layers each   # doctest: +SKIP
    >>> execute(comm, mine, one_f_one_b(2, 4), tokens, answers, mean_loss)      # on rank 1     # doctest: +SKIP
    tensor(18.27)

    stages: the modules that the schedule gives to this rank, by stage. inputs: the micro-batches, one for each of the schedule's,
    on the rank with stage 0; targets, and loss(output, target), on the one with the last stage. Elsewhere they may be None.
    Returns there the sum of the losses, elsewhere None. The gradients are that sum's: who wants a mean lets `loss` divide.
    A stage makes one tensor out of one; what two stages exchange has the same shape for all micro-batches.
    busy: to which the seconds are added that each stage has computed.

    Where the schedule splits a backward pass, a stage that is an nn.Sequential is split child by child: `W` goes through each
    child once more for its weights, and so for linear layers repeats nothing, for a block of several its inner gradients.
    What autograd saves for the backward pass is told to `comm.hold`.

    No schedule that ends in `replay` deadlocks: sends are started, and waited for at the end; a receive is posted an action ahead
    of the one that needs it; and both ends of two ranks' messages post them in the same order (see `traffic`).
    ValueError before anything is sent, if the schedule does not end or does not fit the stages, inputs or targets; with stage,
    micro-batch and value, for what can't go on: what is no tensor of floats, or does not depend on what the stage was given, and
    a loss that is not one number. What a stage raises itself has a note of where it was.
    Cost: a message for each micro-batch between two stages and each way, and a first one that tells the shape.
    Source: Huang et al. 2019 (GPipe).
    """
    rows = tuple(map(tuple, schedule))
    home, _ = placed(rows)
    _check(comm, rows, stages, {"inputs": inputs, "targets": targets}, loss)
    work, mine = _Execution(comm, stages, rows, home, busy), rows[comm.rank]
    try:
        for action, then in zip_longest(mine, mine[1:]):
            k = action.micro_batch
            work.act(action, then, None if inputs is None else inputs[k], partial(_loss_of, loss, targets, k))
        work.mail.finish()
    finally:  # a caller may catch an OutOfMemory, and go on with less
        work.let_all_go()
    return work.total


def _check(
    comm: Communicator, rows: Schedule, stages: Mapping[int, nn.Module], given: dict[str, Sequence[Any] | None], loss: Any
) -> None:
    home, micro_batches = placed(rows)
    if len(rows) != comm.size:
        raise ValueError(f"a schedule for {len(rows)} ranks, and there are {comm.size}")
    mine = sorted(stage for stage, rank in home.items() if rank == comm.rank)
    if sorted(stages) != mine:
        raise ValueError(f"rank {comm.rank} has the stages {sorted(stages)}, and the schedule gives it {mine}")
    for (name, batch), stage in zip(given.items(), (0, len(home) - 1), strict=True):
        if home[stage] == comm.rank and (batch is None or len(batch) != micro_batches):
            count = "no" if batch is None else len(batch)
            raise ValueError(f"rank {comm.rank} has stage {stage}, and {count} {name} for {micro_batches} micro-batches")
    if home[len(home) - 1] == comm.rank and loss is None:
        raise ValueError(f"rank {comm.rank} has the last stage, {len(home) - 1}, and no loss")
    traffic(rows)  # which a schedule that never ends has none of


def _loss_of(loss: Any, targets: Any, k: int, output: Tensor) -> Tensor:
    """What stands behind the last stage."""
    return loss(output, targets[k])


@dataclass
class _Passed:
    """What one part of a stage has made of a micro-batch: y of x; and, later, the gradient of y."""

    part: Any
    x: Tensor
    y: Tensor
    gradient: Tensor | None = None


class _Execution:
    def __init__(self, comm: Communicator, stages: Mapping[int, nn.Module], rows: Any, home: dict[int, int], busy: Any) -> None:
        self.comm, self.home, self.last = comm, home, len(home) - 1
        self.split = any(action.kind == "W" for action in rows[comm.rank])
        self.parts = {stage: self._parts(module) for stage, module in stages.items()}
        self.weights = weights_of(*stages.values())
        self.mail = Mail(comm, traffic(rows))
        self.busy: Counter[int] = Counter() if busy is None else busy
        self.passed: dict[tuple[int, int], list[_Passed]] = {}  # by stage and micro-batch
        self.held: dict[tuple[int, int], Callable[[], None]] = {}
        self.total: Tensor | None = None

    def _parts(self, module: nn.Module) -> list[Any]:
        return list(module) if self.split and type(module) is nn.Sequential else [module]

    def act(self, action: Action, then: Action | None, given: Any, end: Any) -> None:
        """given: on the first stage, what goes into it. end: on the last, the loss. then: what this rank does next."""
        kind, stage, k = action
        got = None
        if (need := awaited(action, len(self.home))) is not None:
            got = self.mail.get(need, self.home[need.stage])
        if then is not None and (soon := awaited(then, len(self.home))) is not None:
            self.mail.expect(soon, self.home[soon.stage])
        with self._shown(action):
            made: Any = None
            if kind == "F":
                parts = self.parts[stage] + ([end] if stage == self.last else [])
                made = self._forward((stage, k), given if got is None else got.requires_grad_(), parts)
            elif kind == "B":
                made = self._backward((stage, k), got)
            else:
                self._weights((stage, k))
        to = after(action)
        if to in self.home:
            self.mail.send(action, made, self.home[to])
        elif kind == "F":
            self.total = made if self.total is None else self.total + made

    @contextmanager
    def _shown(self, action: Action) -> Iterator[None]:
        comm, label = self.comm, str(action) if len(self.parts) > 1 else str(action).lstrip("0123456789")
        comm.step(label)
        priced = comm.topology is None or comm.topology.device(comm.node) is not None
        start = comm.now()
        with comm.compute(label) if priced else comm._span("compute", label):
            yield
        self.busy[action.stage] += comm.now() - start  # type: ignore[assignment]

    def _forward(self, key: tuple[int, int], x: Tensor, parts: list[Any]) -> Tensor:
        passed, kept = self.passed.setdefault(key, []), Kept(self.weights)
        kept.count(x)
        with torch.enable_grad(), kept:
            for part in parts:
                try:
                    y = part(x)
                except Exception as error:
                    error.add_note(f"in the forward pass of {self._where(key)}")
                    raise
                if flaw := _flaw(part, x, y):
                    raise ValueError(f"{self._where(key)}: {flaw}")
                passed.append(_Passed(part, x, y))
                x = y.detach().requires_grad_()
        self.held[key] = self.comm.hold(kept.nbytes, "activations")
        return y.detach()

    def _backward(self, key: tuple[int, int], gradient: Tensor | None) -> Tensor | None:
        for one in reversed(self.passed[key]):
            one.gradient = gradient
            if not self.split:
                if one.x.requires_grad or one.y.requires_grad:  # else it is a first stage that is frozen
                    torch.autograd.backward(one.y, gradient)
                gradient = one.x.grad
            elif one.x.requires_grad:
                (gradient,) = torch.autograd.grad(one.y, one.x, gradient, retain_graph=True, allow_unused=True)
            if gradient is None and one.x.requires_grad:
                raise ValueError(f"{self._where(key)}: {_made(one.part, one.y)}, {_APART}")
        if not self.split:
            self._let_go(key)
        return gradient

    def _weights(self, key: tuple[int, int]) -> None:
        for one in self.passed[key]:
            weights = [p for p in one.part.parameters() if p.requires_grad] if isinstance(one.part, nn.Module) else []
            if weights:
                torch.autograd.backward(one.y, one.gradient, inputs=weights)
        self._let_go(key)

    def _let_go(self, key: tuple[int, int]) -> None:
        del self.passed[key]
        self.held.pop(key)()

    def _where(self, key: tuple[int, int]) -> str:
        return f"rank {self.comm.rank}, stage {key[0]}, micro-batch {key[1]}"

    def let_all_go(self) -> None:
        for key in list(self.held):
            self._let_go(key)


_APART = "which does not depend on what it was given: no gradient can go back"


def _made(part: Any, y: Any) -> str:
    who = type(part).__name__ if isinstance(part, nn.Module) else "the loss"
    return f"{who} makes {describe(y) if isinstance(y, Tensor) else 'None' if y is None else f'a {type(y).__name__}, {y!r:.60}'}"


def _flaw(part: Any, x: Tensor, y: Any) -> str:
    """Why what a part has made of x can't go on, or be a loss; nothing if it can."""
    made = _made(part, y)
    if not isinstance(y, Tensor):
        return f"{made}, and a stage makes one tensor out of one"
    if y.dtype not in DTYPES:
        return f"{made}, and what goes on has gradients: {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
    if y.dim() > NOTE - 2:
        return f"{made}, and what goes on has at most {NOTE - 2} dimensions"
    if not isinstance(part, nn.Module) and y.numel() != 1:
        return f"{made}, and it is to be one number: a sum, or a mean, over the micro-batch"
    return f"{made}, {_APART}" if x.requires_grad and not y.requires_grad else ""


class StandIn(nn.Module):
    """A stage that computes nothing and takes its time: to see what a schedule does, where no device is to be had.

    It gives on what it gets, after so many seconds; backward too, half of them for its input and half for its weight.

    >>> mine = {comm.rank: StandIn(comm, forward=0.010, backward=0.020)}                        # doctest: +SKIP
    >>> execute(comm, mine, schedule, [start] * m, [None] * m, lambda output, _: output.sum())  # doctest: +SKIP

    Seconds pass by `comm.sleep`. What goes into the first stage must require gradients, as what others get does.
    """

    def __init__(self, comm: Communicator, forward: float, backward: float) -> None:
        super().__init__()
        self.comm, self.seconds, self.each = comm, forward, backward / 2
        self.weight = nn.Parameter(torch.zeros((), device=comm.device))

    def forward(self, x: Tensor) -> Tensor:
        self.comm.sleep(self.seconds)
        return Pair.apply(x, same, self._later) + Pair.apply(self.weight, same, self._later)

    def _later(self, gradient: Tensor) -> Tensor:
        self.comm.sleep(self.each)
        return gradient
