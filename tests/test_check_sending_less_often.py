"""The checks of *Sending less often*: wrong answers are refused in words that say why."""

import math
from typing import Any

import pytest
import torch
from solutions import refused
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from d2lps import parallel
from d2lps.collectives import all_reduce
from d2lps_book.check import sending_less_often as check


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda step, average, busy: max(1, int(busy / (1 - busy) * average / step)), "too little"),
    (lambda step, average, busy: math.ceil(busy / (1 - busy) * average / step) + 1, "so is a smaller one"),
    (lambda step, average, busy: busy / (1 - busy) * average / step, "is not a number of steps"),
    (lambda step, average, busy: math.ceil(average / step), "with H = 32 it is 50.0%"),
    (lambda step, average, busy: round(busy / (1 - busy) * average), "with H ="),
    (lambda step, average, busy: 0, "at least one"),
    (lambda step, average, busy: max(1, math.ceil(busy / (1 - busy) * average / step)), "but so is a smaller one, 288"),
    (lambda step, average, busy: max(1, round(busy / (1 - busy) * average / step)), "it is 79.5%, which is too little by 0.005"),
], ids=["rounded down", "one more", "a fraction", "half", "without the step", "none", "289", "to the nearest"])  # fmt: skip
def test_a_wrong_h(wrong: Any, words: str) -> None:
    refused(check.shortest(wrong), words)


def outer(divide: bool = True, sign: int = 1, look: bool = True, share: bool = True, copy: bool = True, own: bool = False,
          twice: bool = False) -> Any:
    def function(comm: Any, shared: Any, mine: Any, momentum: Any, rate: float, mu: float) -> None:
        delta = sign * (shared - mine)
        if share:
            all_reduce(comm, delta)
        if twice:
            all_reduce(comm, momentum)
            momentum /= comm.size
        if divide and share:
            delta /= comm.size
        momentum.mul_(mu).add_(shared - mine if own else delta)
        shared.sub_(rate * (delta + mu * momentum if look else momentum))
        if copy:
            mine.copy_(shared)

    return function


@pytest.mark.parametrize(("wrong", "words"), [
    (outer(divide=False), "workers: 2"), (outer(sign=-1), "round 1: the first weight went down by -"),
    (outer(look=False), "the momentum is empty yet"), (outer(share=False), "workers: 2"),
    (outer(copy=False), "`mine` is not equal to it; do you change it in place"), (outer(own=True), "the first weight went down"),
    (outer(twice=True), "a worker sends 256 bytes a round; an all-reduce of 96 is enough"),
    (lambda comm, shared, *more: outer()(comm, shared.clone(), *more), "do you change `shared` in place"),
    (lambda comm, shared, mine, m, *more: outer()(comm, shared, mine, m.clone(), *more), "`momentum` is not the sum"),
], ids=["the sum", "the sign", "no look ahead", "alone", "no copy", "momenta of one's own", "momenta travel",
        "new w", "new m"])  # fmt: skip
def test_a_wrong_outer_step(wrong: Any, words: str) -> None:
    refused(check.outer(wrong), words)


def by_torch(comm: Any, shared: Any, mine: Any, momentum: Any, rate: float, mu: float) -> None:
    torch.optim.SGD([shared], lr=rate, momentum=mu, nesterov=mu > 0).step()


def aside() -> Any:
    """Right weights, of a momentum that holds the rate as well."""
    def function(comm: Any, shared: Any, mine: Any, momentum: Any, rate: float, mu: float) -> None:
        delta = shared - mine
        all_reduce(comm, delta)
        momentum.mul_(mu).add_(rate * delta / comm.size)
        shared.sub_(rate * delta / comm.size + mu * momentum)
        mine.copy_(shared)

    return function


def by_library(comm: Any, model: Any, make: Any, gradient: Any, rounds: int, H: int) -> None:
    parallel.DiLoCo(comm, model.parameters(), H)


@pytest.mark.parametrize(("judge", "wrong", "words"), [
    (check.outer, by_torch, "it uses optim"), (check.outer, aside(), "`momentum` is not the sum"),
    (check.repaired, by_library, "it uses DiLoCo"),
], ids=["torch's optimizer", "a momentum with the rate in it", "the library's DiLoCo"])  # fmt: skip
def test_another_way_than_was_asked_for(judge: Any, wrong: Any, words: str) -> None:
    refused(judge(wrong), words)


def program(views: bool = False, anew: bool = False, sign: int = 1, mean: bool = True, nesterov: bool = True,
            short: int = 0) -> Any:
    def function(comm: Any, model: Any, make: Any, gradient: Any, rounds: int, H: int) -> None:
        shared = parameters_to_vector(model.parameters()).detach()
        mover = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=nesterov)
        inner = make(model.parameters())
        for number in range(rounds):
            vector_to_parameters(shared if views else shared.clone(), model.parameters())
            if anew and number:
                inner = make(model.parameters())
            for _ in range(H - short):
                gradient(model)
                inner.step()
            delta = sign * (shared - parameters_to_vector(model.parameters()).detach())
            all_reduce(comm, delta)
            shared.grad = delta / comm.size if mean else delta
            mover.step()
        vector_to_parameters(shared.clone(), model.parameters())

    return function


@pytest.mark.parametrize(("wrong", "words"), [
    (program(views=True), "are deltas zero"), (program(anew=True), "2 inner optimizers were made"),
    (program(sign=-1), "the loss went up"), (program(mean=False), "which mean ends it"),
    (program(nesterov=False), "where does a round begin"),
    (program(short=1), "4 gradients were computed, and 6 should be"), (program(views=True, sign=-1), "are deltas zero"),
], ids=["views", "made anew", "the sign", "the sum", "no look ahead", "a step less", "two at once"])  # fmt: skip
def test_a_program_that_is_still_broken(wrong: Any, words: str) -> None:
    refused(check.repaired(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda one, many, p: {s: (one[s], many[s]) for s in one.keys() & many.keys()}, "alone has made 12 steps, each of 2 6"),
    (lambda one, many, p: {s * p: (one[s], many[s]) for s in one.keys() & many.keys()}, "workers: 2"),
    (lambda one, many, p: {s: (one[s], many[s * p]) for s in one if s * p in many}, "workers: 2, 12 batches: not (4"),
    (lambda one, many, p: {s: (many[s // p], one[s]) for s in one if s % p == 0 and s // p in many}, "whose are these"),
    (lambda one, many, p: {s: (loss, many.get(s // p)) for s, loss in one.items()}, "96 batches: it is there, and not both"),
    (lambda one, many, p: {}, "12 batches: it is not there; batches read in a step: 1"),
    (lambda one, many, p: [loss for loss in one.values()], "is no dictionary"),
], ids=["by steps", "steps renamed", "the wrong way", "exchanged", "not measured", "nothing", "a list"])  # fmt: skip
def test_an_unfair_table(wrong: Any, words: str) -> None:
    refused(check.fair(wrong), words)


def told(step: int, warm: int, late: bool) -> str | None:
    return "gradients" if step <= warm else "deltas" if late else None


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda step, warm, H: told(step, warm, step % H == 0), "warm = 3, H = 5, step 5: 'deltas'; it is step 2 alone"),
    (lambda step, warm, H: told(step, warm - 1, (step - warm) % H == 0), "still in the warm start"),
    (lambda step, warm, H: told(step, warm, (step - warm) % H == 1), "H = 1, step 1: None; it is step 1 alone"),
    (lambda step, warm, H: told(step, 0, (step - warm) % H == 0), "still in the warm start"),
    (lambda step, warm, H: "gradients", "warm = 0, H = 1, step 1"),
], ids=["hers", "one too few", "one too early", "no warm start", "always"])  # fmt: skip
def test_who_talks_at_the_wrong_time(wrong: Any, words: str) -> None:
    refused(check.talks(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda step, H, f: None if step % H else 0, "H = 4, 2 fragments: something is sent after [4, 8, 12]"),
    (lambda step, H, f: None if step % (H // f) else step // (H // f) % f, "they take turns, from 0"),
    (lambda step, H, f: step % H if step % H < f else None, "equal gaps would be"),
    (lambda step, H, f: (step - 1) % f, "equal gaps would be"),
    (lambda step, H, f: 0 if step % (H // f) == 0 else None, "they take turns, from 0"),
], ids=["at once", "from one", "all at first", "every step", "always the first"])  # fmt: skip
def test_fragments_out_of_turn(wrong: Any, words: str) -> None:
    refused(check.due(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda seconds, H: [H] * len(seconds), "worker 3 makes 5 until then"),
    (lambda seconds, H: [int(H * min(seconds) / each) for each in seconds], "or its only one"),
    (lambda seconds, H: [round(H * max(seconds) / each) for each in seconds], "worker 0 makes 20"),
    (lambda seconds, H: [math.ceil(H * min(seconds) / each) for each in seconds], "worker 0 makes 3"),
    (lambda seconds, H: [H], "[20]; the fastest is done after 20 s"),
], ids=["all alike", "none at all", "the slowest sets the pace", "rounded up", "one number"])  # fmt: skip
def test_steps_that_do_not_fit(wrong: Any, words: str) -> None:
    refused(check.steps_of(wrong), words)
