"""Optimizers that run where the values are: a worker pushes gradients and pulls parameters.

The state (momentum, moments) never travels: for Adam that is twice the parameters. They are torch.optim's own: its names,
its arguments, its results, its words for an argument that is wrong. Of the workers' gradients they get what `reductions` makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch

from d2lps.arguments import whole
from d2lps.kvstore.core.reductions import Rule, make_rule

Moments = dict[str, torch.Tensor]


class Optimizer(Protocol):
    """What a server needs: state as named tensors, of the value's shape (then it has rows) or of none."""

    def state(self, value: torch.Tensor) -> Moments:
        """The state to begin with; what `step` adds to it later begins with zeros, in rows that it has not been given."""

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        """Change `value` and `state` in place, `gradient` never."""


class _OneTensor:
    """Of torch's optimizers, all but what many tensors in groups need: that would load torch's compiler, for a second."""

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.param_groups.append(self.defaults | group)


class TorchOptimizer:
    """A class of torch.optim, given one tensor at a time, whose state lies elsewhere.

    >>> value, state, optimizer = torch.ones(1), {}, TorchOptimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> optimizer.step(value, torch.ones(1), state)
    >>> value, state
    (tensor([0.5000]), {'momentum_buffer': tensor([1.])})
    """

    def __init__(self, cls: type[torch.optim.Optimizer], **hyper: Any) -> None:
        self.make: Any = partial(type(cls.__name__, (_OneTensor, cls), {}), foreach=False, **hyper)
        self.torch, self.advance = self.make([torch.zeros(1)]), inspect.unwrap(cls.step)
        self.like: Moments = {}  # what the state has after a step
        self.step(torch.zeros(1), torch.ones(1), probe := self.state(torch.zeros(1)))
        self.like = probe

    def state(self, value: torch.Tensor) -> Moments:
        """Most of torch's make theirs in the first step."""
        return dict(self.make([value]).state.get(value, {}))

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        if state:  # of other hyperparameters, it may be: amsgrad was switched on, say
            for name in self.like.keys() - state.keys():
                state[name] = torch.zeros_like(value if self.like[name].dim() else self.like[name])
        self.torch.param_groups[0]["params"] = [value]
        self.torch.state[value] = state
        value.grad = gradient
        try:
            self.advance(self.torch)
        finally:
            value.grad = None
            self.torch.state.clear()


class DelayedNesterov:
    """For deltas that arrive one by one: each moves the value at once, but the momentum only after `period` of them, by all.

    >>> value, optimizer = torch.zeros(1), DelayedNesterov(lr=1.0, momentum=0.5, period=2)
    >>> state = optimizer.state(value)
    >>> for delta in (1.0, 3.0):                    # the second also brings momentum, 0.5 x (1 + 3)
    ...     optimizer.step(value, torch.tensor([delta]), state)
    >>> value
    tensor([-6.])

    So that a worker's late delta is not carried on by itself. activation: what a step between takes of the momentum, from 0 to
    1 / period. A delta is taken for its share: under asp a push has been divided by the number of workers, a good period.
    With a period of 1 it is torch's SGD with nesterov=True. Source: Liu et al., "Asynchronous local-SGD training", 2024.
    """

    def __init__(self, lr: float, momentum: float = 0.9, period: int = 1, activation: float = 0.0) -> None:
        if not 0 <= activation * whole("period", period) <= 1:
            raise ValueError(f"activation={activation!r} is not from 0 to 1 / period, {1 / period:g}")
        self.lr, self.momentum, self.period, self.activation = lr, momentum, period, activation

    def state(self, value: torch.Tensor) -> Moments:
        return {"momentum": torch.zeros_like(value), "waiting": torch.zeros_like(value), "pushes": torch.zeros(())}

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        momentum, waiting, share = state["momentum"], state["waiting"].add_(gradient), self.activation
        if (state["pushes"] + 1) % self.period == 0:
            momentum.mul_(self.momentum).add_(waiting)
            waiting.zero_()
            share = 1 - (self.period - 1) * self.activation
        state["pushes"].add_(1).remainder_(self.period)
        value.sub_(gradient, alpha=self.lr).sub_(momentum, alpha=self.lr * share * self.momentum)


OPTIMIZERS: dict[str, Any] = {
    name.lower(): partial(TorchOptimizer, getattr(torch.optim, name))
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop")
} | {"delayed_nesterov": DelayedNesterov}


def register_optimizer(name: str, cls: Any) -> None:
    """Let `kv.set_optimizer(name, ...)` find a class of your own, in every process that has called this.

    >>> class Sign:
    ...     def __init__(self, lr):
    ...         self.lr = lr
    ...     def state(self, value):
    ...         return {}
    ...     def step(self, value, gradient, state):
    ...         value.sub_(gradient.sign(), alpha=self.lr)
    >>> register_optimizer("sign", Sign)
    """
    for method in ("state", "step"):
        if not callable(getattr(cls, method, None)):
            raise TypeError(f"an optimizer needs a method {method!r}, which {cls!r} has not")
    OPTIMIZERS[name] = cls


def make_optimizer(name: str, **hyper: Any) -> Optimizer:
    """`make_optimizer("sgd", lr=0.1)`; ValueError for an unknown name or hyperparameter."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown: choose {', '.join(map(repr, sorted(OPTIMIZERS)))}")
    try:
        optimizer: Optimizer = OPTIMIZERS[name](**hyper)
        optimizer.step(probe := torch.zeros(1), torch.ones(1), optimizer.state(probe))  # a learning rate of "fast" shows here
    except Exception as error:
        raise ValueError(f"optimizer {name!r} cannot be made of {hyper}: {error}") from error
    return optimizer


def made_of(options: Mapping[str, Any]) -> tuple[Optimizer | None, Rule]:
    """The optimizer that `set_optimizer` has named, if it has, and the rule of what it gets; ValueError."""
    hyper = dict(options)
    name = hyper.pop("name", None)
    rule = make_rule(hyper.pop("reduction", "mean" if options else "sum"), hyper.pop("trim", None))
    if name is None and hyper:
        raise ValueError(f"{hyper} without an optimizer: name one")
    return None if name is None else make_optimizer(str(name), **hyper), rule


def optimize(
    optimizer: Optimizer, value: torch.Tensor, state: Moments, rows: torch.Tensor | None, gradient: torch.Tensor
) -> None:
    """One step; with rows, on these rows of the value and of its state alone: the others don't even decay.

    That is what torch.optim.SparseAdam does too, of a table on one server. Of a table in parts each one counts the steps that
    touched its own rows, for no server hears of the others': so adam, and whatever else counts steps, comes to other values on
    another number of servers. Rows must be distinct. Cost: the bytes of the rows, not of the tensor.
    """
    if rows is None:
        return optimizer.step(value, gradient, state)
    part, its = value[rows], {name: moment[rows] if moment.dim() else moment for name, moment in state.items()}
    optimizer.step(part, gradient, its)
    value[rows] = part
    for name, moment in its.items():
        if moment.dim():
            state.setdefault(name, torch.zeros_like(value))[rows] = moment
        else:
            state[name] = moment
    return None
