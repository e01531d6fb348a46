"""Checks of the chapter *Sending less often*: rounds, outer steps, fragments, and three ways to be wrong without an error."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from d2lps.check.exercise import Function, Wrong, judged
from d2lps.simulator import simulate
from d2lps.topology import star


@judged
def shortest(function: Function) -> str:
    """Check `shortest(step, average, busy)`: the smallest whole H with which the share `busy` of the time is computing."""
    cases = [(1, 32, 0.9), (1, 32, 0.5), (0.25, 1, 0.8), (0.5, 3, 0.75), (2, 0.1, 0.5), (0.7, 11.3, 0.95), (3, 500, 0.99)]
    for step, average, busy in cases:
        said, told = function(step, average, busy), f"a step of {step} s, an average of {average} s, {busy:.0%} of the time"
        if not isinstance(said, int) or said < 1:
            raise Wrong(f"{told}: {said!r} is not a number of steps; they are whole, and at least one")
        if _busy(said, step, average) < busy - 1e-12:
            raise Wrong(f"{told}: with H = {said} it is {_busy(said, step, average):.1%}, which is too little")
        if said > 1 and _busy(said - 1, step, average) >= busy + 1e-12:
            raise Wrong(f"{told}: H = {said} is enough, but so is a smaller one")
    return f"{len(cases)} clusters"


def _busy(H: int, step: float, average: float) -> float:
    return H * step / (H * step + average)


@judged
def outer(function: Function) -> str:
    """Check `outer(comm, shared, mine, momentum, rate, mu)`: three rounds, as torch's SGD with nesterov=True makes them."""
    for ranks, rate, mu in ((1, 0.7, 0.9), (2, 1.0, 0.5), (3, 0.7, 0.9), (5, 0.4, 0.0), (8, 0.3, 0.8)):
        run = simulate(_three_rounds, star(ranks, 1e9, 1e-6), function, rate, mu)
        case = f"with {ranks} worker{'s' * (ranks > 1)}, rate {rate}, momentum {mu}"
        for rank, found in enumerate(run):
            if found is not None:
                raise Wrong(f"{case}: worker {rank}, {found}")
        if ranks > 1 and (most := run.trace.bytes_sent().max() / 3) > 2 * 8 * 12:
            raise Wrong(f"{case}: a worker sends {most:.0f} bytes a round; one all-reduce of {8 * 12} bytes is enough")
    return "three rounds of 1 to 8 workers"


def _three_rounds(comm: Any, function: Function, rate: float, mu: float) -> str | None:
    dice = torch.Generator().manual_seed(5)
    shared = torch.rand(12, generator=dice, dtype=torch.double)
    wanted, right, momentum = shared.clone(), *torch.zeros(2, 12, dtype=torch.double)
    for number in (1, 2, 3):
        deltas = torch.rand(comm.size, 12, generator=dice, dtype=torch.double)
        mine, before = shared - deltas[comm.rank], shared.clone()
        function(comm, shared, mine, momentum, rate, mu)
        right.mul_(mu).add_(deltas.mean(0))
        wanted -= rate * (deltas.mean(0) + mu * right)
        if not torch.allclose(shared, wanted):
            moved, due = (before - shared)[0].item(), (before - wanted)[0].item()
            hint = "the momentum is empty yet" if number == 1 else "the momentum carries the rounds before"
            return f"round {number}: the first weight went down by {moved:.4g}, and should by {due:.4g}; {hint}"
        if not torch.equal(mine, shared):
            return f"round {number}: its own weights are not the shared ones, from which it must go on"
    return None


@judged
def repaired(function: Function) -> str:
    """Check `repaired(comm, model, make, gradient, rounds, H)`: DiLoCo, with an inner optimizer that is made once."""
    for ranks, rounds, H in ((1, 2, 3), (2, 3, 4), (3, 3, 1), (5, 2, 5)):
        wanted = simulate(_trained, star(ranks, 1e9, 1e-6), _right, rounds, H, trace=False)[0]
        for rank, (end, made, steps) in enumerate(simulate(_trained, star(ranks, 1e9, 1e-6), function, rounds, H, trace=False)):
            case = f"{ranks} worker{'s' * (ranks > 1)}, {rounds} rounds of {H} steps, worker {rank}"
            if steps != rounds * H:
                raise Wrong(f"{case}: {steps} gradients were computed, and {rounds * H} should be")
            if made != 1:
                raise Wrong(f"{case}: {made} inner optimizers were made; a new one has forgotten all moments")
            if not torch.allclose(end, wanted[0]):
                raise Wrong(f"{case}: {_astray(end, wanted[0])}")
    return "1 to 5 workers"


def _astray(end: torch.Tensor, wanted: torch.Tensor) -> str:
    """Of a training that begins at zero and has its minimum above."""
    if (end < 0).all():
        return "the loss went up: which sign has a gradient, and which has your delta?"
    return f"the first weight ends at {end[0].item():.4g}, and should at {wanted[0].item():.4g}; print the deltas: are they zero?"


def _trained(comm: Any, function: Callable[..., Any], rounds: int, H: int) -> tuple[torch.Tensor, int, int]:
    made: list[torch.optim.Optimizer] = []
    steps: list[int] = []
    linear = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(linear.weight)

    def make(weights: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(list(weights), lr=0.01, momentum=0.9))
        return made[-1]

    def gradient(model: Any) -> None:
        steps.append(1)
        goal = torch.tensor([2.0, 3.0, 5.0], dtype=torch.double) + comm.rank
        model.weight.grad = (model.weight.detach() - goal) * (1 + 0.1 * comm.rank)

    function(comm, linear, make, gradient, rounds, H)
    return linear.weight.detach().flatten().clone(), len(made), len(steps)


def _right(comm: Any, model: nn.Module, make: Function, gradient: Function, rounds: int, H: int) -> None:
    from d2lps.parallel import DiLoCo

    inner, helper = make(model.parameters()), DiLoCo(comm, model.parameters(), H)
    for _ in range(rounds * H):
        gradient(model)
        inner.step()
        helper.step()


@judged
def fair(function: Function) -> str:
    """Check `fair(one, many, workers)`: of two logs {step: loss}, the losses after as many batches."""
    one = {step: 5 - math.log(step) / 3 for step in (12, 24, 30, 48, 60, 96, 120)}
    many = {step: 4.9 - math.log(step) / 2.5 for step in (4, 6, 10, 12, 15, 24, 30, 48, 60)}
    for workers in (1, 2, 4, 5):
        said, right = function(dict(one), dict(many), workers), {s * workers: loss for s, loss in many.items()}
        wanted = {count: (one[count], right[count]) for count in one.keys() & right.keys()}
        if not isinstance(said, dict):
            raise Wrong(f"with {workers} workers: {said!r} is no dictionary {{batches: (loss, loss)}}")
        for count in sorted(said.keys() ^ wanted.keys()):
            what = "is missing" if count in wanted else "is there, and not both have been measured then"
            raise Wrong(f"with {workers} workers: {count} batches {what}; in a step, {workers} workers read one batch each")
        for count, pair in sorted(wanted.items()):
            if tuple(said[count]) != pair:
                raise Wrong(f"with {workers} workers: after {count} batches the losses are not {said[count]}; whose are these?")
    return "1 to 5 workers"


@judged
def talks(function: Function) -> str:
    """Check `talks(step, warm, H)`: "gradients", "deltas" or None."""
    for warm, H in ((0, 1), (0, 5), (3, 5), (5, 5), (7, 3), (10, 4)):
        alone = 0
        for step in range(1, 41):
            alone = 0 if step <= warm else alone % H + 1
            wanted = "gradients" if step <= warm else "deltas" if alone == H else None
            if (said := function(step, warm, H)) != wanted:
                since = "still in the warm start" if step <= warm else f"step {alone} alone since they last talked"
                raise Wrong(f"warm = {warm}, H = {H}, step {step}: {said!r}; it is {since}")
    return "6 plans of 40 steps"


@judged
def due(function: Function) -> str:
    """Check `due(step, H, fragments)`: the fragment that is sent after this step, or None."""
    for H, fragments in ((4, 1), (4, 2), (4, 4), (12, 3), (20, 5), (1, 1)):
        sent = {step: said for step in range(1, 3 * H + 1) if (said := function(step, H, fragments)) is not None}
        case, gap = f"H = {H}, {fragments} fragment{'s' * (fragments > 1)}", H // fragments
        if list(sent) != (steps := list(range(gap, 3 * H + 1, gap))):
            raise Wrong(f"{case}: something is sent after steps {list(sent)[:8]}...; equal gaps would be {steps[:8]}...")
        if list(sent.values()) != [turn % fragments for turn in range(3 * fragments)]:
            raise Wrong(f"{case}: the fragments that are sent are {list(sent.values())[:8]}...; they take turns, from 0")
    return "6 plans of three rounds"


@judged
def steps_of(function: Function) -> str:
    """Check `steps_of(seconds, H)`: as many steps as fit into the time in which the fastest makes H, at least one."""
    for seconds, H in (([1, 1, 1, 4], 20), ([2, 1], 7), ([0.1, 0.3, 0.7], 30), ([3], 5), ([1, 90, 2.5], 50)):
        said, time = list(function(list(seconds), H)), H * min(seconds)
        for worker, each in enumerate(seconds):
            fits = max(1, math.floor(time / each + 1e-6))
            if len(said) != len(seconds) or said[worker] != fits:
                raise Wrong(
                    f"seconds {seconds}, H = {H}: {said}; the fastest is done after {time:g} s, and worker {worker} has"
                    f" time for {fits} step{'s' * (fits > 1)}"
                )
    return "1 to 4 workers"
