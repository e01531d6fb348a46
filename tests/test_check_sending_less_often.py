"""The checks of *Sending less often*: wrong answers are refused in words that say why."""

import math
from typing import Any

import torch
from solutions import refusing

from d2lps import parallel


def by_torch(comm: Any, shared: Any, mine: Any, momentum: Any, rate: float, mu: float) -> None:
    torch.optim.SGD([shared], lr=rate, momentum=mu, nesterov=mu > 0).step()


def by_library(comm: Any, model: Any, make: Any, gradient: Any, rounds: int, H: int) -> None:
    parallel.DiLoCo(comm, model.parameters(), H)


def told(step: int, warm: int, late: bool) -> str | None:
    return "gradients" if step <= warm else "deltas" if late else None


ALONE = ("all_reduce(comm, delta) -> pass", "delta /= comm.size -> pass")
VIEWS = "shared.clone(), model.parameters())\n        for -> shared, model.parameters())\n        for"
UPHILL = ("delta = shared - parameters_to_vector(model.parameters()).detach() -> "
          "delta = parameters_to_vector(model.parameters()).detach() - shared")  # fmt: skip

test_refused = refusing({
    "ex-often-busy shortest": [
        (lambda step, average, busy: max(1, int(busy / (1 - busy) * average / step)), "too little"),
        (lambda step, average, busy: math.ceil(busy / (1 - busy) * average / step) + 1, "so is a smaller one"),
        (lambda step, average, busy: busy / (1 - busy) * average / step, "is not a number of steps"),
        (lambda step, average, busy: math.ceil(average / step), "with H = 32 it is 50.0%"),
        (lambda step, average, busy: round(busy / (1 - busy) * average), "with H ="),
        (lambda step, average, busy: 0, "at least one"),
        (lambda step, average, busy: max(1, math.ceil(busy / (1 - busy) * average / step)), "but so is a smaller one, 288"),
        (lambda step, average, busy: max(1, round(busy / (1 - busy) * average / step)),
     "it is 79.5%, which is too little by 0.005"),
    ],
    "ex-often-outer outer": [
        ("delta /= comm.size -> pass", "workers: 2"),
        ("shared - mine -> mine - shared", "round 1: the first weight went down by -"),
        ("(delta + mu * momentum) -> momentum", "the momentum is empty yet"),
        (ALONE, "workers: 2"),
        ("mine.copy_(shared) -> pass", "`mine` is not equal to it; do you change it in place"),
        ("add_(delta) -> add_(shared - mine)", "the first weight went down"),
        ("momentum.mul_ -> all_reduce(comm, momentum); momentum /= comm.size; momentum.mul_",
         "a worker sends 256 bytes a round; an all-reduce of 96 is enough"),
        ("lambda comm, shared, *more: outer(comm, shared.clone(), *more)", "do you change `shared` in place"),
        ("lambda comm, shared, mine, m, *more: outer(comm, shared, mine, m.clone(), *more)", "`momentum` is not the sum"),
        (("add_(delta) -> add_(rate * delta)", "rate * (delta + mu * momentum) -> rate * delta + mu * momentum"),
         "`momentum` is not the sum"),  # right weights, of a momentum that holds the rate as well
        (by_torch, "it uses optim"),
    ],
    "ex-often-bug repaired": [
        (VIEWS, "are deltas zero"),
        ("for _ in range(rounds): -> for number in range(rounds):\n"
         "        inner = make(model.parameters()) if number else inner",
         "2 inner optimizers were made"),
        (UPHILL, "the loss went up"),
        ("delta / comm.size -> delta", "which mean ends it"),
        (", nesterov=True) -> )", "where does a round begin"),
        ("range(H) -> range(H - 1)", "4 gradients were computed, and 6 should be"),
        ((VIEWS, UPHILL), "are deltas zero"),
        (by_library, "it uses DiLoCo"),
    ],
    "ex-often-tokens fair": [
        (lambda one, many, p: {s: (one[s], many[s]) for s in one.keys() & many.keys()}, "alone has made 12 steps, each of 2 6"),
        (lambda one, many, p: {s * p: (one[s], many[s]) for s in one.keys() & many.keys()}, "workers: 2"),
        (lambda one, many, p: {s: (one[s], many[s * p]) for s in one if s * p in many}, "workers: 2, 12 batches: not (4"),
        (lambda one, many, p: {s: (many[s // p], one[s]) for s in one if s % p == 0 and s // p in many}, "whose are these"),
        (lambda one, many, p: {s: (loss, many.get(s // p)) for s, loss in one.items()}, "96 batches: it is there, and not both"),
        (lambda one, many, p: {}, "12 batches: it is not there; batches read in a step: 1"),
        (lambda one, many, p: [loss for loss in one.values()], "is no dictionary"),
    ],
    "ex-often-cold talks": [
        (lambda step, warm, H: told(step, warm, step % H == 0), "warm = 3, H = 5, step 5: 'deltas'; it is step 2 alone"),
        (lambda step, warm, H: told(step, warm - 1, (step - warm) % H == 0), "still in the warm start"),
        (lambda step, warm, H: told(step, warm, (step - warm) % H == 1), "H = 1, step 1: None; it is step 1 alone"),
        (lambda step, warm, H: told(step, 0, (step - warm) % H == 0), "still in the warm start"),
        (lambda step, warm, H: "gradients", "warm = 0, H = 1, step 1"),
    ],
    "ex-often-fragments due": [
        (lambda step, H, f: None if step % H else 0, "H = 4, 2 fragments: something is sent after [4, 8, 12]"),
        (lambda step, H, f: None if step % (H // f) else step // (H // f) % f, "they take turns, from 0"),
        (lambda step, H, f: step % H if step % H < f else None, "equal gaps would be"),
        (lambda step, H, f: (step - 1) % f, "equal gaps would be"),
        (lambda step, H, f: 0 if step % (H // f) == 0 else None, "they take turns, from 0"),
    ],
    "ex-often-slow steps_of": [
        (lambda seconds, H: [H] * len(seconds), "worker 3 makes 5 until then"),
        (lambda seconds, H: [int(H * min(seconds) / each) for each in seconds], "or its only one"),
        (lambda seconds, H: [round(H * max(seconds) / each) for each in seconds], "worker 0 makes 20"),
        (lambda seconds, H: [math.ceil(H * min(seconds) / each) for each in seconds], "worker 0 makes 3"),
        (lambda seconds, H: [H], "[20]; the fastest is done after 20 s"),
    ],
})  # fmt: skip
