"""Where a strategy meets torch: gradients get ready, optimizers step, `zero_grad` clears; a tensor goes both ways."""

from collections.abc import Callable, Sequence
from inspect import signature
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp


def when_ready(parameter: nn.Parameter, method: Callable[..., None], *given: Any) -> None:
    """Have `method(*given, parameter)` called whenever the parameter's gradient is complete.

    >>> for number, parameter in enumerate(module.parameters()):        # doctest: +SKIP
    ...     when_ready(parameter, self._ready, number)

    The hook does not keep the method's object alive, which as a rule has the parameter: Python's collector of garbage sees no
    circle that goes through such a hook of torch's, so neither would ever be freed. RuntimeError, in the backward pass, once the
    object is gone: others may wait for what it would have sent.
    """
    alive, owner = WeakMethod(method), type(getattr(method, "__self__", None)).__name__

    def hook(ready: nn.Parameter) -> None:
        if (called := alive()) is None:
            told = f"the {owner} of this module is gone, and would have had its gradients"
            raise RuntimeError(f"{told}: keep it in a variable, or train a copy.deepcopy of the module, which is free of it")
        called(*given, ready)

    parameter.register_post_accumulate_grad_hook(hook)


class Weakly:
    """A method as a hook of a module, which keeps no object alive: once that is gone, and in copies, it does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self.method = WeakMethod(method) if method else None

    def __call__(self, *given: Any) -> None:
        if self.method is not None and (called := self.method()) is not None:
            called(*given)

    def __reduce__(self) -> Any:
        return Weakly, ()


def dense(name: str, gradient: Tensor) -> Tensor:
    """The same, if it lies in memory as sums do: ValueError for a sparse one."""
    if gradient.layout is not torch.strided:
        told = f"{name} has a sparse gradient, and what is summed is dense"
        raise ValueError(f"{told}: make its layer with sparse=False, or keep its rows in d2lps.kvstore, by push_rows")
    return gradient


BY_TENSOR = {"ADAFACTOR", "LAMB", "LARS", "MUON"}  # optimizers whose step on a number depends on others of its tensor


def for_shards(optimizer: torch.optim.Optimizer, shards: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same, if it can be one of flat shards."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer gave {name}, and not a torch.optim.Optimizer")
    if name.upper() in BY_TENSOR:
        raise ValueError(f"{name} looks at each weight as a whole, and is given flat shards, pieces of many weights: use another")
    if any(p.default is p.empty for p in signature(optimizer.step).parameters.values() if p.name == "closure"):
        raise ValueError(f"{name} computes the loss several times a step (step(closure)), which is not carried out")
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != {id(shard) for shard in shards}:
        raise ValueError(f"the {name} steps on other parameters than the {len(shards)} shards that it was given")
    return optimizer


def join(optimizer: torch.optim.Optimizer, newcomers: torch.optim.Optimizer) -> None:
    """Let an optimizer step on what another one steps on, too, under the options that it has now."""
    if len(optimizer.param_groups) > 1:
        told = f"the {type(optimizer).__name__} has {len(optimizer.param_groups)} groups of parameters"
        raise ValueError(f"{told}, and does not say to which one comes that trains from now on")
    optimizer.param_groups[0]["params"] += newcomers.param_groups[0]["params"]
    optimizer.state.update(newcomers.state)


_also: WeakKeyDictionary[Any, list[WeakMethod[Any]]] = WeakKeyDictionary()  # what else is to be cleared with it


def clears(drop: Callable[[], None], *owners: nn.Module | torch.optim.Optimizer | None) -> None:
    """Have the owners' `zero_grad` call `drop`, too, as long as that one's object lives; copies of the owners are free of it."""
    for owner in (each for each in owners if each is not None):
        _also.setdefault(owner, []).append(WeakMethod(drop))
        owner.zero_grad = MethodType(zero_grad, owner)  # type: ignore[method-assign]


def zero_grad(owner: Any, set_to_none: bool = True) -> None:
    """What is bound to the owner; copies of it are in no table, and what is unpickled has its class's own again."""
    type(owner).zero_grad(owner, set_to_none)
    for method in _also.get(owner, ()):
        if (drop := method()) is not None:
            drop()


def spread_overflow(comm: Communicator, gradients: Sequence[Tensor]) -> None:
    """What is inf or NaN on some rank, of gradients that are cut, is inf on all: as one, they skip a step or take it."""
    finite = torch.tensor(all(bool(gradient.isfinite().all()) for gradient in gradients)).int().to(comm.device)
    all_reduce(comm, finite, ReduceOp.MIN)
    for gradient in gradients if not finite else ():
        gradient.fill_(torch.inf)


class Pair(torch.autograd.Function):
    """One function forward, another one backward.

    >>> x = torch.ones(2, requires_grad=True)
    >>> Pair.apply(x, torch.exp, torch.neg).sum().backward(); x.grad
    tensor([-1., -1.])
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return forth(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def same(x: Tensor) -> Tensor:
    """For what a `Pair` leaves as it is, on one of the ways."""
    return x.view_as(x)
