"""Checks of the exercises of *Overlap and priority*."""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from d2lps.collectives import all_reduce
from d2lps.simulator import simulate
from d2lps.topology import star
from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import parts, refuse

__all__ = ["accumulate", "batch", "best_count", "overlapped", "shares", "timetable"]

_LAYERS, _WIDTH, _SECONDS = 4, 32, 40e-6  # of the model of `overlapped`, and what a layer's backward pass takes


@judged
def best_count(function: Function) -> str:
    """Check `function(computing, sending, price)`: the number of equal buckets that makes the step shortest."""
    cases = [(10, 10, 0.02), (10, 10, 0.2), (50, 10, 1), (10, 50, 1), (12, 10, 0.5), (1, 1, 1000), (90, 3, 0.7), (2, 77, 0.003)]
    for c, a, price in cases:
        times = {k: max(c + price + a / k, c / k + k * price + a) for k in range(1, 1200)}
        got, best = function(c / 1e3, a / 1e3, price / 1e3), min(times, key=times.__getitem__)
        said = f"computing {c} ms, sending {a} ms, price {price} ms: {got!r} "
        refuse((got not in times, f"{said}is no whole number of buckets between 1 and 1199"))
        more, late = "more" if best > got else "fewer", times[got] - times[best]
        refuse((late > times[best] * 1e-9, f"{said}take {times[got]:.3f} ms; with {more} it could be {late:.3g} ms less"))
    return f"in {len(cases)} cases no other number is better"


@judged
def shares(function: Function) -> str:
    """Check `function(computing, sending, count)`: the buckets' fractions that make the step shortest, without latencies."""
    for computing, sending, count in ((10, 10, 4), (10, 20, 4), (20, 10, 4), (10, 20, 1), (3, 7, 2), (30, 7, 8), (5, 9, 12)):
        got, said = list(function(computing, sending, count)), f"computing {computing}, sending {sending}, {count} buckets: "
        refuse((len(got) != count or min(got) <= 0 or abs(sum(got) - 1) > 1e-9,
                f"{said}{got} are not {count} fractions above 0 that add up to 1"))  # fmt: skip
        best = computing / sum((sending / computing) ** i for i in range(count)) + sending
        ready, end, why = 0.0, 0.0, "the link could have begun earlier"
        for number, share in enumerate(got, 1):
            ready += share * computing
            why = f"the link has nothing to do before bucket {number}" if number > 1 and ready > end * (1 + 1e-9) else why
            end = max(ready, end) + share * sending
        refuse((end > best * (1 + 1e-9), f"{said}the step ends at {end:.4g}, {end - best:.2g} later than it could; {why}"))
    return "in 7 cases neither the link nor the device ever waits for the other"


@judged
def overlapped(function: Function) -> str:
    """Check `function(comm, loss, buckets)`: means of gradients, each bucket sent beside the backward pass once it is full."""
    wide, narrow = 1e9, 3e8  # bytes/s; over the narrow link a bucket gets full while the one before it is still on its way
    for p, cut, link in ((1, [2, 2], wide), (2, [4], wide), (2, [1, 2, 1], wide), (2, [2, 1, 1], narrow), (3, [2, 2], wide),
                         (5, [1, 1, 1, 1], wide)):  # fmt: skip
        case, cluster = f"{plural(p, 'rank')}, buckets of {cut} layers, two calls: ", star(p, link, 1e-6)
        run, few, ready, end = simulate(_called, cluster, function, cut), 0, 0.0, 0.0
        for layers in cut:
            alone = simulate(lambda comm, n=layers * _WIDTH**2: all_reduce(comm, torch.zeros(n).double()), cluster)
            few, ready = few + 2 * len(alone.trace), ready + layers * _SECONDS
            end = max(ready, end) + alone.time
        means, hooks = torch.stack([own for own, *_ in run]).mean(0), max(left for *_, left in run)
        bad = next((rank for rank, (_, got, _) in enumerate(run) if not torch.allclose(got, means)), None)
        many, slow = len(run.trace), f"{case}{1e6 * run.time:.0f} µs, and {2e6 * end:.0f} would do; does a bucket leave once"
        refuse((bad is not None, f"{case}on rank {bad} gradients are not the means when you return; is each divided, and have"
                " you waited for the last?"),
               (hooks > 0, f"{case}is a hook left behind? {hooks} of {_LAYERS} parameters have some when you return"),
               (many != few, f"{case}{many} messages, and one all-reduce for each bucket has {few}; is a bucket one tensor?"),
               (_at_once(run.trace.messages), f"{case}two buckets are on their way at once; does each wait for the one before?"),
               (run.time > 2 * end * 1.01, f"{slow} it is full, and does the backward pass go on meanwhile?"))  # fmt: skip
    return "each bucket left when it was full, beside the backward pass, in one all-reduce"


def _at_once(messages: dict[str, Any]) -> bool:
    """Whether rank 0 has messages of two lanes on their way at the same time."""
    start, end, lane = (messages[name][messages["src"] == 0] for name in ("start", "end", "src_thread"))
    early = start[:, None] < end - 1e-9
    return bool((early & early.T & (lane[:, None] != lane)).any())


def _called(comm: Any, function: Function, cut: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Gradients of this rank alone in two calls; what they have become, in order of readiness; how many hooks are left."""
    weights = [nn.Parameter(torch.eye(_WIDTH).double() / 2) for _ in range(_LAYERS)]
    alone, become = list[torch.Tensor](), list[Any]()
    for call in range(2):
        plain = slow = torch.full((_LAYERS, _WIDTH), comm.rank + call + 1.0).double()
        for weight in weights:
            plain, slow, weight.grad = plain @ weight, slow @ weight, torch.zeros_like(weight)
            slow.register_hook(lambda gradient: comm.sleep(_SECONDS))
        alone += torch.autograd.grad(plain.square().sum(), weights)[::-1]
        in_order = iter(weights[::-1])
        function(comm, slow.square().sum(), [[next(in_order) for _ in range(size)] for size in cut])
        become += [weight.grad for weight in weights[::-1]]
    return torch.stack(alone), torch.stack(become), sum(bool(weight._post_accumulate_grad_hooks) for weight in weights)


@judged
def accumulate(function: Function) -> str:
    """Check `function(model, loss_of, batches)`: gradients of the mean loss over batches and ranks, added up once."""
    for p, count in ((1, 3), (2, 4), (3, 1), (5, 2)):
        case = f"{plural(p, 'rank')}, {count} batch{'es' * (count > 1)}: "
        batches, weight = torch.arange(1.0, 1 + p * count * 6).double().reshape(p, count, 2, 3), torch.ones(3, 1).double()
        wanted = 2 * batches.reshape(-1, 3).T @ (batches.reshape(-1, 3) @ weight) / (p * count * 2)
        models = among(p, _accumulated, function, batches)
        refuse((any(sums == 0 for sums, *_ in models), f"{case}the ranks never add up, so replicas drift apart: who averages?"))
        for rank, (sums, passes, got) in enumerate(models):
            refuse((passes != count, f"{case}{passes} backward pass{'es' * (passes != 1)}; room is for one batch at a time"),
                   (sums > 1, f"{case}the ranks add up {sums} times, and once would do; when does DDP decide?"),
                   (not torch.allclose(got, wanted), f"{case}rank {rank} has {(got / wanted).mean():.2f} times the gradient of "
                    "the mean loss over all batches and ranks: is each loss divided, and who averages?"))  # fmt: skip
    return "one sum over the ranks, of the mean over all batches"


def _accumulated(comm: Any, function: Function, batches: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    model = _Replica(comm)
    function(model, lambda model, batch: model(batch).square().mean(), list(batches[comm.rank]))
    return model.sums, model.passes, torch.zeros(3, 1) if model.weight.grad is None else model.weight.grad


class _Replica(nn.Module):
    """Like DDP: the forward pass decides whether the backward pass averages."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1).double())
        self.comm, self.sums, self.passes, self.require_backward_grad_sync, self.armed = comm, 0, 0, True, False
        self.weight.register_post_accumulate_grad_hook(self._ready)

    def no_sync(self) -> Any:
        return patch.object(self, "require_backward_grad_sync", False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.armed = self.require_backward_grad_sync
        return x @ self.weight

    def _ready(self, weight: torch.Tensor) -> None:
        self.sums, self.passes = self.sums + self.armed, self.passes + 1
        if self.armed and weight.grad is not None:
            all_reduce(self.comm, weight.grad.div_(self.comm.size))


@answered
def timetable(answer: Any) -> str:
    """Check four numbers: when the forward pass ends in order of readiness, and urgent first in pieces of 5, 2 and 1 ms."""
    wait = "Who has the link when an urgent gradient gets ready, and until when? A layer needs all of its gradient."
    parts("the end", answer, ("first in, first out", 18, "The link serves layers 4, 3, 2 and 1 without a pause; then come 7 ms."),
          ("whole", 14, wait), ("pieces of 2 ms", 13, wait), ("pieces of 1 ms", 12, wait), within=1e-9)  # fmt: skip
    return "18 ms in order, 14 urgent first, and 13 or 12 if what is large can be overtaken"


@answered
def batch(answer: Any) -> str:
    """Check the three whole numbers: images, images on slower links, micro-batches."""
    ring = "Of a ring each machine sends 2(p - 1)/p of the gradient, a byte has 8 bits, and only the backward pass hides it."
    last = "Only the last one's backward pass hides anything; all forward and backward passes are computing."
    parts("the answer", answer, ("100 Gb/s", 13, ring), ("10 Gb/s", 126, ring), ("micro-batches", 46, last), within=1e-9)
    return "13 images hide 77.5 ms, 126 hide ten times that, and 46 micro-batches spread what 16 images can't hide"
