"""What happens when a parameter's gradient is complete, in the midst of a backward pass."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn


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
