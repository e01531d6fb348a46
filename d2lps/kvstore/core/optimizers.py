"""Optimizers that run where the values are: a worker pushes gradients and pulls parameters.

The state (momentum, moments) never travels: for Adam that is twice the parameters. Each agrees with torch.optim's of the
same name. Whether a server hands on the sum or the mean of the workers' gradients is not the optimizer's affair: see
`Server`, and `reduction` there.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

Moments = dict[str, torch.Tensor]


class Optimizer(Protocol):
    """What a server needs: state as named tensors, of the value's shape (then it has rows) or of none."""

    def state(self, value: torch.Tensor) -> Moments:
        """The state to begin with."""

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        """Change `value` and `state` in place, `gradient` never."""


class SGD:
    """value -= lr * (momentum * last + gradient); weight_decay * value is added to the gradient.

    >>> value, optimizer = torch.ones(1), SGD(lr=0.5)
    >>> optimizer.step(value, torch.ones(1), optimizer.state(value))
    >>> value
    tensor([0.5000])

    State: n bytes with momentum, none without. As torch.optim.SGD.
    """

    def __init__(self, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def state(self, value: torch.Tensor) -> Moments:
        return {"momentum": torch.zeros_like(value)} if self.momentum else {}

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        if self.weight_decay:
            gradient = gradient.add(value, alpha=self.weight_decay)
        if self.momentum:
            gradient = state["momentum"].mul_(self.momentum).add_(gradient)
        value.add_(gradient, alpha=-self.lr)


class Adam:
    """Steps of about lr, whatever the gradient's scale: its running mean over the root of its running square.

    State: 2 n bytes, and a count of steps. Source: Kingma and Ba, ICLR 2015; as torch.optim.Adam.
    """

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay = lr, betas, eps, weight_decay

    def state(self, value: torch.Tensor) -> Moments:
        return {"mean": torch.zeros_like(value), "square": torch.zeros_like(value), "steps": torch.zeros((), dtype=torch.float64)}

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        if self.weight_decay:
            gradient = gradient.add(value, alpha=self.weight_decay)
        steps = float(state["steps"].add_(1))
        mean = state["mean"].lerp_(gradient, 1 - self.beta1)
        square = state["square"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = (square / (1 - self.beta2**steps)).sqrt_().add_(self.eps)
        value.addcdiv_(mean, root, value=-self.lr / (1 - self.beta1**steps))


class Adagrad:
    """Elements that have moved much move less: made for embeddings, whose rows are touched at very different rates.

    State: n bytes. Source: Duchi et al., JMLR 2011; as torch.optim.Adagrad.
    """

    def __init__(self, lr: float = 1e-2, weight_decay: float = 0.0, eps: float = 1e-10) -> None:
        self.lr, self.weight_decay, self.eps = lr, weight_decay, eps

    def state(self, value: torch.Tensor) -> Moments:
        return {"sum": torch.zeros_like(value)}

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Moments) -> None:
        if self.weight_decay:
            gradient = gradient.add(value, alpha=self.weight_decay)
        total = state["sum"].addcmul_(gradient, gradient)
        value.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-self.lr)


OPTIMIZERS: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adagrad": Adagrad}


def register_optimizer(name: str, cls: Any) -> None:
    """Let `kv.set_optimizer(name, ...)` find a class of your own, in every process that has called this.

    >>> class Sign(SGD):
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
