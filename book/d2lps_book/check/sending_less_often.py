"""Checks of the chapter *Sending less often*: rounds, outer steps, fragments, and three ways to be wrong without an error."""

import math
from typing import Any

import torch
from torch import nn

from d2lps.parallel import DiLoCo
from d2lps_book.check.exercise import Function, among, judged, plural
from d2lps_book.check.tools import refuse, without


@judged
def shortest(function: Function) -> str:
    """Check `shortest(step, average, busy)`: the smallest whole H with which the share `busy` of the time is computing."""
    cases = (1, 32, 0.9), (1, 32, 0.5), (0.25, 1, 0.8), (2, 0.1, 0.5), (0.7, 11.3, 0.95), (3, 500, 0.99), (1, 3.1, 0.8)
    for step, average, busy in cases:
        H, told = function(step, average, busy), f"a step of {step} s, an average of {average} s, {busy:.0%} of the time"
        refuse((not isinstance(H, int) or H < 1, f"{told}: {H!r} is not a number of steps; they are whole, and at least one"))
        fewer, share = ((steps * step) / (steps * step + average) for steps in (H - 1, H))
        leeway = 1e-12 if average % step else 0.0  # a quotient that is whole has no rounding to excuse
        refuse((share < busy - leeway, f"{told}: with H = {H} it is {share:.1%}, which is too little by {busy - share:.1g}"),
               (H > 1 and fewer >= busy + leeway, f"{told}: H = {H} is enough, but so is a smaller one, {H - 1}"))  # fmt: skip
    return f"{len(cases)} clusters"


@judged
def outer(function: Function) -> str:
    """Check `outer(comm, shared, mine, momentum, rate, mu)`: three rounds, as torch's SGD with nesterov=True makes them."""
    without(function, "optim", "SGD")
    for ranks, rate, mu in ((1, 0.7, 0.9), (2, 1.0, 0.5), (3, 0.7, 0.9), (5, 0.4, 0.0), (8, 0.3, 0.8)):
        run = among(ranks, _three_rounds, function, rate, mu)
        case, most = f"workers: {ranks}, rate {rate}, momentum {mu}", run.trace.bytes_sent().max() / 3
        refuse(*((found, f"{case}: worker {rank}, {found}") for rank, found in enumerate(run)),
               (most > 2 * 96, f"{case}: a worker sends {most:g} bytes a round; an all-reduce of 96 is enough"))  # fmt: skip
    return "three rounds of 1 to 8 workers"


def _three_rounds(comm: Any, function: Function, rate: float, mu: float) -> str | None:
    dice = torch.Generator().manual_seed(5)
    shared = torch.rand(12, generator=dice, dtype=torch.double)
    wanted, right, momentum = shared.clone(), *torch.zeros(2, 12, dtype=torch.double)
    for number, deltas in enumerate(torch.rand(3, comm.size, 12, generator=dice, dtype=torch.double), start=1):
        mine, before = shared - deltas[comm.rank], shared[0].item()
        function(comm, shared, mine, momentum, rate, mu)
        right.mul_(mu).add_(deltas.mean(0))
        wanted -= rate * (deltas.mean(0) + mu * right)
        if not torch.allclose(shared, wanted):
            hint = "is empty yet" if number == 1 else "carries the rounds before"
            hint += "; do you change `shared` in place?" if before == shared[0].item() else ""
            moved = f"the first weight went down by {before - shared[0]:.4g}, and should by {before - wanted[0]:.4g}"
            return f"round {number}: {moved}; the momentum {hint}"
        if not torch.equal(mine, shared):
            return f"round {number}: `shared` is right, but `mine` is not equal to it; do you change it in place?"
        if not torch.allclose(momentum, right):
            return f"round {number}: weights are right, but `momentum` is not the sum of mu times the old one and the mean"
    return None


@judged
def repaired(function: Function) -> str:
    """Check `repaired(comm, model, make, gradient, rounds, H)`: DiLoCo, with an inner optimizer that is made once."""
    without(function, "DiLoCo")
    for ranks, rounds, H in ((1, 2, 3), (2, 3, 4), (3, 3, 1), (5, 2, 5)):
        (wanted, *_), *_ = among(ranks, _trained, _right, rounds, H)
        apart = among(ranks, _trained, _right, 1, rounds * H, False)  # what comes of deltas that are zero
        for rank, (end, made, steps) in enumerate(among(ranks, _trained, function, rounds, H)):
            case = f"workers: {ranks}, {rounds} rounds of {H} steps, worker {rank}"
            ask = "are deltas zero?" if torch.allclose(end, apart[rank][0]) else "where does a round begin, which mean ends it?"
            refuse((steps != rounds * H, f"{case}: {steps} gradients were computed, and {rounds * H} should be"),
                   (made != 1, f"{case}: {made} inner optimizers were made; a new one has forgotten all moments"),
                   ((end < 0).all(), f"{case}: the loss went up: which sign has a gradient, and which has your delta?"),
                   (not torch.allclose(end, wanted), f"{case}: weights are {_few(end)}, not {_few(wanted)}; {ask}"))  # fmt: skip
    return "1 to 5 workers"


def _few(weights: torch.Tensor) -> list[float]:
    return [round(weight, 3) for weight in weights.flatten().tolist()]


def _trained(comm: Any, function: Function, rounds: int, H: int, *more: Any) -> tuple[torch.Tensor, int, int]:
    """A training that begins at zero and has its minimum above."""
    made, steps, linear = list[Any](), list[int](), nn.Linear(3, 1, bias=False, dtype=torch.double)
    nn.init.zeros_(linear.weight)

    def make(weights: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(list(weights), lr=0.01, momentum=0.9))
        return made[-1]

    def gradient(model: Any) -> None:
        steps.append(1)
        model.weight.grad = (model.weight.detach() - torch.tensor([[2, 3, 5]]) - comm.rank) * (1 + 0.1 * comm.rank)

    function(comm, linear, make, gradient, rounds, H, *more)
    return linear.weight.detach().clone(), len(made), len(steps)


def _right(comm: Any, model: nn.Module, make: Function, gradient: Function, rounds: int, H: int, talks: bool = True) -> None:
    inner, helper = make(model.parameters()), DiLoCo(comm, model.parameters(), H)
    for _ in range(rounds * H):
        gradient(model)
        inner.step()
        if talks:
            helper.step()


@judged
def fair(function: Function) -> str:
    """Check `fair(one, many, workers)`: of two logs {step: loss}, the losses after as many batches."""
    one = {step: 5 - math.log(step) / 3 for step in (12, 24, 30, 48, 60, 96, 120)}
    many = {step: 4.9 - math.log(step) / 2.5 for step in (4, 6, 10, 12, 15, 24, 30, 48, 60)}
    for workers in (1, 2, 4, 5):
        said, case = function(dict(one), dict(many), workers), f"workers: {workers}"
        wanted = {s * workers: (one[s * workers], loss) for s, loss in many.items() if s * workers in one}
        refuse((not isinstance(said, dict), f"{case}: {said!r} is no dictionary {{batches: (loss, loss)}}"))
        for count in sorted(said.keys() | wanted.keys()):
            told, what = f"{case}, {count} batches", "not there" if count in wanted else "there, and not both have been measured"
            steps = f"After {count} batches one alone has made {count} steps, each of {workers} {count / workers:g}"
            refuse((count not in said or count not in wanted, f"{told}: it is {what}; batches read in a step: {workers}"),
                   ((pair := said.get(count)) != wanted.get(count), f"{told}: not {pair}; whose are these? {steps}"))  # fmt: skip
    return "1 to 5 workers"


@judged
def talks(function: Function) -> str:
    """Check `talks(step, warm, H)`: "gradients", "deltas" or None."""
    for warm, H in ((0, 1), (0, 5), (3, 5), (5, 5), (7, 3), (10, 4)):
        for step in range(1, 41):
            said, alone = function(step, warm, H), (step - warm - 1) % H + 1
            wanted = "gradients" if step <= warm else "deltas" if alone == H else None
            since = "still in the warm start" if step <= warm else f"step {alone} alone since they last talked"
            refuse((said != wanted, f"warm = {warm}, H = {H}, step {step}: {said!r}; it is {since}"))
    return "6 plans of 40 steps"


@judged
def due(function: Function) -> str:
    """Check `due(step, H, fragments)`: the fragment that is sent after this step, or None."""
    for H, fragments in ((4, 1), (4, 2), (4, 4), (12, 3), (20, 5), (1, 1)):
        sent = {step: said for step in range(1, 3 * H + 1) if (said := function(step, H, fragments)) is not None}
        case, steps = f"H = {H}, {plural(fragments, 'fragment')}", [*range(H // fragments, 3 * H + 1, H // fragments)]
        refuse(([*sent] != steps, f"{case}: something is sent after {[*sent][:8]}...; equal gaps would be {steps[:8]}..."),
               ([*sent.values()] != [*range(fragments)] * 3, f"{case}: {[*sent.values()]}; they take turns, from 0"))  # fmt: skip
    return "6 plans of three rounds"


@judged
def steps_of(function: Function) -> str:
    """Check `steps_of(seconds, H)`: as many steps as fit into the time in which the fastest makes H, at least one."""
    for seconds, H in (([1, 1, 1, 4], 20), ([2, 1], 7), ([0.1, 0.3, 0.7], 30), ([3], 5), ([1, 90, 2.5], 50)):
        said, time = [*function([*seconds], H)], H * min(seconds)
        for worker, fits in enumerate([max(1, math.floor(time / each + 1e-6)) for each in seconds]):
            told = f"the fastest is done after {time:g} s, and worker {worker} makes {fits} until then, or its only one"
            refuse((said[worker : worker + 1] != [fits] or said[len(seconds) :], f"{seconds}, H = {H}: {said}; {told}"))
    return "1 to 4 workers"
