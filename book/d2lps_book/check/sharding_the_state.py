"""Checks of the exercises of *Sharding the state*."""

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import parts, refuse


@answered
def memory(answer: Any) -> str:
    """Check four numbers of GB, by stage from none to three, and a number of GPUs."""
    whole = "Nothing is shared out: 2 + 2 + 12 bytes for each parameter."
    shares = "Of 2, 2 and 12 bytes, which are divided by 32 at this stage?"
    least = "Bytes for a parameter: 2 + 14/N. What is left of 40 GB for 14/N, once the weights are there?"
    parts("memory", answer, ("data parallel", 208, whole), ("stage 1", 56.875, shares), ("stage 2", 31.6875, shares),
          ("stage 3", 6.5, shares), ("GPUs", 13, least))  # fmt: skip
    return "208, 56.9, 31.7 and 6.5 GB; stage 2 fits into 40 GB from 13 GPUs on"


@judged
def sharded_step(function: Function) -> str:
    """Check `function(comm, weights, gradient, velocity, rate, momentum)`: two steps of ZeRO 1, against one process."""
    for p, n in ((1, 5), (2, 8), (3, 8), (4, 6), (5, 3), (8, 40)):
        case, length = f"{plural(p, 'rank')}, {n} weights: ", -(-n // p)
        start, gradients = torch.arange(1.0, n + 1).double(), torch.arange(2.0 * p * n).double().view(2, p, n).sin()
        rate, momentum = 1 / (p + 1), 0.9 - p / 20
        run = among(p, _stepped, function, start, gradients, length, rate, momentum)
        velocity, weights = torch.zeros(length * p).double(), start.clone()
        for gradient in gradients.mean(1):
            velocity[:n] = momentum * velocity[:n] + gradient
            weights = weights - rate * velocity[:n]
        for rank, (got, held) in enumerate(run):
            mine = velocity[rank * length : (rank + 1) * length]
            refuse(
                (torch.equal(got, start), f"{case}rank {rank}'s weights have not moved: are they changed where they are?"),
                (
                    held.shape != mine.shape or not torch.allclose(held, mine),
                    f"{case}rank {rank}'s velocity after two steps is {_unlike(held, mine, p)}",
                ),
                (not torch.allclose(got, weights), f"{case}rank {rank}'s weights are not those of one process: have all ranks "
                 "got every shard?"),
            )
        sent, least = run.trace.bytes_sent(), 4 * (p - 1) * length * 8
        refuse(*((nbytes > least, f"{case}rank {rank} sends {nbytes} bytes in two steps; two reduce-scatters and all-gathers "
                                  f"send {least}") for rank, nbytes in enumerate(sent)))  # fmt: skip
    return "the weights of one process, a p-th of its velocity a rank, and the bytes of an all-reduce"


def _unlike(held: torch.Tensor, mine: torch.Tensor, p: int) -> str:
    if held.shape == mine.shape and not held.any():
        return "still zero: is it changed where it is?"
    if held.shape == mine.shape and torch.allclose(held, p * mine):
        return f"{p} times too large: a sum over ranks is no mean"
    return "not that of its shard of the mean gradient"


def _stepped(comm: Any, function: Function, start: torch.Tensor, gradients: torch.Tensor, length: int, *how: float) -> Any:
    weights, velocity = start.clone(), torch.zeros(length).double()
    for gradient in gradients:
        function(comm, weights, gradient[comm.rank].clone(), velocity, *how)
    return weights, velocity


@judged
def clip(function: Function) -> str:
    """Check `function(comm, shard, max_norm)`: scale a shard so that the norm of all shards is at most max_norm; return it."""
    for p, most in ((1, 1.0), (2, 1.0), (3, 2.0), (5, 100.0), (8, 0.5)):
        whole = torch.arange(1.0, 4 * p + 1).double().sin() * torch.arange(1.0, 4 * p + 1).double() / 2
        norm, case = whole.norm().item(), f"{plural(p, 'rank')}, shards of 4, max_norm {most}: "
        run = among(p, _clipped, function, whole, most)
        after = torch.cat([shard for _, shard in run])
        local = torch.cat([s * min(1, most / s.norm().item()) for s in whole.chunk(p)])
        alike = p > 1 and most < norm and torch.allclose(after, local, rtol=1e-4)
        refuse((alike, f"{case}each rank has clipped by the norm of its own shard"))
        for rank, (told, _) in enumerate(run):
            number = isinstance(told, float | torch.Tensor)
            refuse((not number, f"{case}rank {rank} says the norm was {told!r}, which is no number"))
            refuse((abs(float(told) - norm) > 1e-6 * norm, f"{case}rank {rank} says the norm was {float(told):.4f}, not "
                    f"{norm:.4f}; which adds up, norm or square?"))  # fmt: skip
        sent, close = run.trace.bytes_sent().max(), torch.allclose(after, whole * min(1, most / norm), rtol=1e-4)
        same = not close and torch.equal(after, whole)
        refuse((same, f"{case}the norm is right, and the shards are as they were: scale them where they are"),
               (norm <= most and not close, f"{case}the norm was {norm:.3f}, and shards have been scaled"),
               (not close, f"{case}afterwards the norm is {after.norm():.4f}, and not all is scaled by {most / norm:.4f}"),
               (sent > 16 * p, f"{case}a rank sends {sent} bytes; one number from each rank is enough"))  # fmt: skip
    return "one number was added up, and all shards are scaled alike"


def _clipped(comm: Any, function: Function, whole: torch.Tensor, most: float) -> Any:
    shard = whole.chunk(comm.size)[comm.rank].clone()
    return function(comm, shard, most), shard


@judged
def lend(function: Function) -> str:
    """Check `function(comm, layer)`: the layer's weight is whole while it is needed, and takes no memory else."""
    for p in (1, 2, 3, 4):
        case = f"{plural(p, 'rank')}: "
        run = among(p, _lent, function)
        for rank, (held, right) in enumerate(run):
            for moment, layers in held.items():
                most = int(moment.startswith("in"))
                refuse((layers > most, f"{case}{moment} rank {rank} holds the weights of {layers} layers, autograd's included"))
            refuse((not right, f"{case}rank {rank}'s gradient of the input is not that of whole weights"))
        sent, least = run.trace.messages["nbytes"].sum() if p > 1 else 0, 6 * (p - 1) * 12 * 12 * 8
        refuse((sent < least, f"{case}{sent} bytes are sent; six gathers are {least}: does a rank keep more than its shard?"))
    return "at most one layer's weight is there at a time, and none in between"


def _lent(comm: Any, function: Function) -> tuple[dict[str, int], bool]:
    layers, saved, held = [nn.Linear(12, 12, bias=False).double() for _ in range(3)], list[torch.Tensor](), dict[str, int]()

    def look(moment: str) -> None:
        storages = [tensor.untyped_storage() for tensor in (*saved, *(layer.weight for layer in layers))]
        large = {storage.data_ptr() for storage in storages if storage.nbytes() >= 12 * 12 * 8}
        held[moment] = max(held.get(moment, 0), len(large))

    for number, layer in enumerate(layers):
        layer.weight.data = torch.eye(12).double() * (number + 2)
        function(comm, layer)
        layer.register_forward_pre_hook(lambda *_: look("in the forward pass"))
    x = y = torch.ones(2, 12).double().requires_grad_()
    with saved_tensors_hooks(lambda tensor: [saved.append(tensor), tensor][1], lambda tensor: tensor):  # type: ignore[func-returns-value]
        for layer in layers:
            y = layer(y)
            y.register_hook(lambda _: look("in the backward pass"))
    look("between the passes")
    y.sum().backward()
    look("after the backward pass")
    return held, x.grad is not None and torch.allclose(x.grad, torch.full_like(x, 24.0))


@answered
def accumulation(answer: Any) -> str:
    """Check five numbers: traffic of a step of eight micro-batches, in units of all weights."""
    keep = "Gradients stay whole until the last micro-batch: one reduce-scatter. And the weights?"
    each = "Every micro-batch has its reduce-scatter, and the step one all-gather."
    parts("traffic", answer, ("stage 1", 2, keep), ("stage 2", 9, each),
          ("stage 3", 24, "Two all-gathers and a reduce-scatter, each time."), ("stage 3, no_sync", 17, keep),
          ("stage 3, weights kept", 2, "One all-gather, one reduce-scatter."))  # fmt: skip
    return "2, 9, 24, 17 and 2: memory and traffic are exchanged for each other"
