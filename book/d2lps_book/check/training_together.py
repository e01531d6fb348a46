"""Checks of the exercises of *Training together*."""

import random
from threading import Event, Lock
from typing import Any

import torch
from torch import nn

from d2lps.collectives import all_reduce
from d2lps.result import Run
from d2lps_book.check.exercise import Function, among, judged
from d2lps_book.check.tools import refuse

__all__ = ["accuracy", "backward", "shares", "weighted_mean"]

_PATIENCE = 1.0  # seconds for what takes microseconds where it happens at all
_WHILE = 0.01  # seconds that an aggregation takes: who doesn't wait for it returns without it
_LENGTH = 60  # of a gradient


@judged
def weighted_mean(function: Function) -> str:
    """Check `function(comm, gradient, count)`: every rank's gradient becomes that of the whole batch."""
    for counts in ([4], [5, 0], [3, 3, 3], [0, 9, 1], [40, 8, 8, 8], [5, 0, 1, 0, 2], [0, 0, 0, 0, 0, 0, 0, 7]):
        images = torch.rand(sum(counts), _LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        run, case = _shared(function, images, counts), f"shards of {counts}"
        usual = among(len(counts), lambda comm: all_reduce(comm, torch.ones(_LENGTH + 1).double())).trace
        why = "does every image count as much as every other?"
        if all(torch.equal(before, got) for before, got in run):
            why = ("no rank's `gradient` has changed: write into it, as gradient.copy_(...) does; `gradient = ...` only gives "
                   "its name to another tensor")  # fmt: skip
        for rank, (_, got) in enumerate(run):
            off = ((got - images.mean(0)).norm() / images.mean(0).norm()).item()
            refuse((1e-12 <= off < 1e-6, f"{case}, rank {rank}: as near as a float32 comes: send it in the dtype of `gradient`"),
                   (not off < 1e-12, f"{case}, rank {rank}: off by {off:.0%}; {why}"))  # fmt: skip
        many, once = len(run.trace), len(usual)
        sent, least = (int(trace.bytes_sent().sum()) // 8 for trace in (run.trace, usual))
        refuse((many > once, f"{case}: {many} messages, and one all-reduce has {once}; let the count travel along"),
               (sent > least, f"{case}: {sent} numbers are sent; with one more than the gradient has, {least} would do"))
    return "every image counts alike, in one all-reduce of one number more than the gradient has"


def _shared(function: Function, images: torch.Tensor, counts: list[int]) -> Run:
    """Each rank's gradient before and after, where an image's gradient is the image. Without images it is 0, as in torch."""

    def work(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shard = images.split(counts)[comm.rank]
        gradient = shard.mean(0) if len(shard) else torch.zeros(_LENGTH, dtype=torch.float64)
        before, returned = gradient.clone(), function(comm, gradient, counts[comm.rank])
        refuse((returned is not None and torch.equal(before, gradient), "what is returned is not looked at: `gradient` itself "
                "is to become the mean, in place"))  # fmt: skip
        return before, gradient

    return among(len(counts), work)


@judged
def shares(function: Function) -> str:
    """Check `function(speeds, batch)`: whole numbers of images that add up to the batch and are done the soonest."""
    dice = random.Random(0)
    cases = [([1000, 1000, 250, 250], 100), ([1000, 700, 300, 7], 100), ([1], 8), ([3, 3, 3], 10), ([1000, 1], 3)]
    cases += [([dice.randint(1, 1000) for _ in range(dice.randint(2, 8))], dice.randint(1, 300)) for _ in range(40)]
    for speeds, batch in cases:
        counts, case = list(function(list(speeds), batch)), f"speeds {speeds}, a batch of {batch}: "
        whole = len(counts) == len(speeds) and all(count == int(count) >= 0 for count in counts)
        refuse((not whole, f"{case}{counts} are not {len(speeds)} whole numbers from 0 up"),
               (sum(counts) != batch, f"{case}{counts} add up to {sum(counts)}"))
        last, slow = max((count / speed, k) for k, (count, speed) in enumerate(zip(counts, speeds, strict=True)))
        said = f"{case}{counts} keep all waiting for device {slow}, {1e3 * last:.1f} ms; another one could take an image of it"
        refuse((last > _soonest(speeds, batch) * (1 + 1e-9), said))
    return f"in {len(cases)} cases nobody could be done sooner"


def _soonest(speeds: list[int], batch: int) -> float:
    """When all can be done: the next image always goes to the device that would be done with it first."""
    counts = [0] * len(speeds)
    for _ in range(batch):
        k = min(range(len(speeds)), key=lambda k: (counts[k] + 1) / speeds[k])
        counts[k] += 1
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


@judged
def accuracy(function: Function) -> str:
    """Check `function(comm, correct, seen)`: the share of correct answers among all ranks' images, on every rank."""
    large = 2**24
    for pairs in ([(3, 4)], [(9, 10), (0, 1)], [(52, 52), (0, 51), (13, 51)], [(0, 0), (1, 3)], [(large, large)] + [(1, 2)] * 4):
        run = among(len(pairs), lambda comm, pairs=pairs: function(comm, *pairs[comm.rank]))
        correct, seen = (sum(column) for column in zip(*pairs, strict=True))
        for rank, got in enumerate(run):
            case = f"(correct, seen) = {pairs}: rank {rank}"
            refuse((got is None, f"{case} returns nothing, and every rank is to return the share"))
            said, why = float(got), "does every image count as much as every other?"
            if seen > large:
                why = "these are whole numbers beyond what a float32 can count"
            elif 0 < abs(said - correct / seen) < 1e-6:
                why = "that is as near as a float32 comes: divide in Python, or in float64"
            wrong = isinstance(got, bool) or said != correct / seen
            refuse((wrong, f"{case} says {said:.10g}, and it is {correct}/{seen} = {correct / seen:.10g}; {why}"))
    return "every image counts alike, and the count is exact"


@judged
def backward(function: Function) -> str:
    """Check `function(loss, model, aggregate)`: the backward pass, and beside it `aggregate(gradient)` as each gets ready.

    Neither is clocked. The check's first layer holds the backward pass up until an aggregation has begun, and the first
    aggregation is held up until the backward pass has come to the first layer: who lets the two overlap never notices.
    """
    for layers in (2, 5):
        watch = _Watch()
        model = nn.Sequential(_Gate(watch), *(nn.Linear(4, 4, bias=False) for _ in range(layers)))
        for again in range(2):  # a hook that was left behind is called twice
            model.zero_grad()
            watch.start()
            start = torch.ones(2, 4, requires_grad=True)
            function(model(start).sum(), model, watch.aggregate)
            weights = [layer.weight for layer in list(model)[1:]]
            times, ready = [watch.seen.count(id(w.grad)) for w in weights], [id(w.grad) for w in reversed(weights)]
            said = (f"run {again + 1} with {layers} layers: the gradients were aggregated {times} times when it returned; each "
                    "should be, once: wait for all before you return, and remove your hooks")  # fmt: skip
            order = "the gradients were aggregated in another order than they got ready, so ranks may not agree on it"
            left = sum(len(getattr(w, "_post_accumulate_grad_hooks", None) or ()) for w in weights)
            behind = f"it leaves {left} hooks behind: what the registration returns has a method remove()"
            refuse((watch.late, watch.late), (times != [1] * layers, said), (watch.seen != ready, order), (left, behind))
    return "the first aggregation began while the backward pass went on, and each gradient was aggregated once, in order"


class _Watch:
    """What was aggregated, and whether it and the backward pass waited for each other."""

    def start(self) -> None:
        self.seen, self.late, self.reached, self.begun, self._lock = list[int](), "", Event(), Event(), Lock()

    def first_layer(self) -> None:
        """The backward pass is at the first layer."""
        self.reached.set()
        if not self.begun.wait(_PATIENCE):
            self.late = self.late or "no aggregation began before the backward pass was over: start one when a gradient is ready"

    def aggregate(self, gradient: torch.Tensor) -> None:
        self.begun.set()
        if not self.reached.wait(_PATIENCE):
            self.late = self.late or "the backward pass stood still while a gradient was aggregated: do that in another thread"
        Event().wait(_WHILE)
        with self._lock:
            self.seen.append(id(gradient))


class _Gate(nn.Module):
    """A layer that changes nothing and tells when the backward pass comes by."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.register_hook(lambda gradient: self.watch.first_layer())
        return y
