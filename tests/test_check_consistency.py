"""The checks of *Consistency*: wrong answers are refused in words that say why."""

import math
import threading
from typing import Any

import pytest
import torch
from solutions import refused

from d2lps_book.check import consistency as check

PAUSE = {"BSP": 52, "ASP": 46, "SSP(2)": 50, "SSP(4)": 48, "SSP(6)": 46, "SSP(8)": 46}


@pytest.mark.parametrize("judge", [check.server, check.aware])
def test_an_empty_class_is_a_stub(judge: Any) -> None:
    class Mine: ...

    assert judge(Mine).text == "Mine is still empty"


def drained(mine: int, clocks: list[int], bound: float) -> bool:
    while clocks:
        if clocks.pop() < mine - bound:
            return False
    return True


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda mine, clocks, b: sum(clocks) / len(clocks) >= mine - b, "with bound 1 and clocks [0, 2], worker 1 reads too early"),
    (lambda mine, clocks, b: min(clocks) > mine - b, "with bound 0 and clocks [0], worker 0 waits in vain"),
    (lambda mine, clocks, b: max(clocks) >= mine - b, "reads too early"),
    (lambda mine, clocks, b: mine - min(clocks) <= 3, "reads too early"),
    (lambda mine, clocks, b: True, "reads too early"),
    (lambda mine, clocks, b: mine == min(clocks) or b == math.inf, "waits in vain"),
    (lambda mine, clocks, b: sorted(clocks)[:3][0] == clocks[0] and clocks[0] >= mine - b, "waits in vain"),
    (lambda mine, clocks, b: min(clocks) >= mine - int(b), "OverflowError"),
    (drained, "it changed the clocks"),
], ids=["the mean", "more than", "the fastest", "one bound", "always", "level or unbound", "the first", "int", "drains"])
def test_who_may_read_wrongly(wrong: Any, words: str) -> None:
    refused(check.may_read(wrong), words)


def test_pauses() -> None:
    assert check.pause(**PAUSE)
    assert check.pause(**dict.fromkeys(PAUSE, ...)).text == "not all is filled in"
    assert check.pause().text.startswith("nothing is said of BSP, ASP")
    assert check.pause(**{rule: 52 for rule in PAUSE if rule != "SSP(8)"}).text == "nothing is said of SSP(8)"
    assert not check.pause(**PAUSE | {"BSP": math.nan})


@pytest.mark.parametrize(("wrong", "words"), [
    ({"BSP": 46}, "BSP takes more than 46 s"), ({"BSP": 58}, "BSP takes less"),
    ({"ASP": 40}, "ASP takes more"), ({"ASP": 52}, "ASP takes less"),
    ({"SSP(2)": 52}, "how far may worker 1 run on"), ({"SSP(2)": 48}, "SSP(2) takes more"), ({"SSP(4)": 46}, "SSP(4) takes more"),
    ({"SSP(8)": 44}, "SSP(8) takes more"),
], ids=str)  # fmt: skip
def test_pauses_misjudged(wrong: dict[str, float], words: str) -> None:
    refused(check.pause(**PAUSE | wrong), words)


def limit(delay: int) -> float:
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda m, mean: 2 / (1 if mean else m), "does not converge"),
    (lambda m, mean: limit(m) * (m if mean else 1), "still converges"),
    (lambda m, mean: limit(m - 1), "still converges when each push"),
    (lambda m, mean: math.pi / (2 * m - 2 or 1.57) * (m if mean else 1), "5 does not converge when each push, of"),
    (lambda m, mean: 1.672 if mean else 0.209, "1 worker, mean: you say 1.67, but 1.76 still converges"),
], ids=["synchronous", "delay m", "the mean forgotten", "for large delays", "eight workers"])
def test_rates_misjudged(wrong: Any, words: str) -> None:
    verdict = check.largest_rate(wrong)
    assert not verdict and words.removeprefix("5 ") in verdict.text


def binomial(k: int, m: int, q: float) -> float:
    return sum(math.comb(m, i) * q**i * (1 - q) ** (m - i) for i in range(k + 1))


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda k, m, q, f: m / (binomial(k, m, q) + f * (1 - binomial(k, m, q))), "k = 1 of 100 workers, q = 0.02, f = 5"),
    (lambda k, m, q, f: (m - k) / (binomial(k - 1, m, q) + f * (1 - binomial(k - 1, m, q))), "is too little"),
    (lambda k, m, q, f: (m - k) * (binomial(k, m, q) + (1 - binomial(k, m, q)) / f), "is too much"),
    (lambda k, m, q, f: (m - k) / (f - (f - 1) * (1 - q) ** (m - k)), "is too little"),
    (lambda k, m, q, f: (100 - k) / (5 - 4 * binomial(k, 100, 0.02)), "k = 0 of 3 workers"),
], ids=["nothing dropped", "fewer than k", "the mean of 1/T", "the first m - k only", "one case"])
def test_backup_workers_misjudged(wrong: Any, words: str) -> None:
    refused(check.used(wrong), words)


# ---- communicate while you compute ---------------------------------------------------------------------------------------


def plain(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    for _ in range(steps):
        kv.pull("w", weights).wait()
        kv.push("w", compute(weights))
        kv.clock()


def overlapped(kv: Any, weights: torch.Tensor, steps: int, compute: Any, push: Any = None) -> None:
    """The solution, with a push of one's own: push(step, gradient)."""
    push = push or (lambda step, gradient: kv.push("w", gradient))
    incoming, arriving = torch.empty_like(weights), None
    kv.pull("w", weights).wait()
    for step in range(steps):
        gradient = compute(weights)
        if arriving is not None:
            arriving.wait()
            weights, incoming = incoming, weights
        push(step, gradient)
        kv.clock()
        arriving = kv.pull("w", incoming)
    assert arriving is not None
    arriving.wait()


def never_pushes_the_last(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    overlapped(kv, weights, steps, compute, lambda step, gradient: step < steps - 1 and kv.push("w", gradient))


def pushes_the_first_twice(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    overlapped(kv, weights, steps, compute, lambda step, gradient: [kv.push("w", gradient) for _ in range(1 + (step == 0))])


def only_one_worker(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    overlapped(kv, weights, steps, compute, lambda step, gradient: kv.rank == 0 and kv.push("w", gradient))


def pushes_ones(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    overlapped(kv, weights, steps, compute, lambda step, gradient: kv.push("w", torch.ones_like(gradient)))


def one_buffer(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    for _ in range(steps):
        kv.pull("w", weights)
        kv.push("w", compute(weights))
        kv.clock()


def never_pulls_again(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    kv.pull("w", weights).wait()
    for _ in range(steps):
        kv.push("w", compute(weights))
        kv.clock()


def one_step_short(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    overlapped(kv, weights, steps - 1, compute)


def computes_once(kv: Any, weights: torch.Tensor, steps: int, compute: Any) -> None:
    gradient = compute(weights)
    for _ in range(steps):
        kv.push("w", gradient)
        kv.clock()


@pytest.mark.parametrize(("wrong", "words"), [
    (plain, "with 4 workers an iteration takes 91 ms"),
    (never_pushes_the_last, "gradient 20 of worker 0's 20 is not at all in the weights"),
    (pushes_the_first_twice, "gradient 1 of worker 0's 20 is 2 times in the weights"),
    (only_one_worker, "rounds; one may be missing"),
    (pushes_ones, "80 times in the weights"),
    (one_buffer, "computed from a tensor that is still being pulled"),
    (never_pulls_again, "gradient 3 is computed from weights without 2 rounds"),
    (one_step_short, "in 20 steps worker 0 computed 19 gradients"),
    (computes_once, "computed 1 gradient"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_overlapped_wrongly(wrong: Any, words: str) -> None:
    refused(check.overlap(wrong), words)


# ---- a rate divided by 1 + the delay ------------------------------------------------------------------------------------


class Aware:
    """Right, with a divisor to be made wrong."""

    def __init__(self, weights: torch.Tensor, rate: float) -> None:
        self.weights, self.rate, self.version = weights, rate, 0

    def pull(self) -> tuple[torch.Tensor, int]:
        return self.weights.clone(), self.version

    def push(self, gradient: torch.Tensor, version: int) -> None:
        self.weights -= self.rate * gradient / self.divisor(self.version - version)
        self.version += 1

    def divisor(self, delay: int) -> float:
        return 1 + delay


class ByTheDelay(Aware):
    def divisor(self, delay: int) -> float:
        return max(delay, 1)


class CountsItself(Aware):
    def divisor(self, delay: int) -> float:
        return 2 + delay


class NeverDivides(Aware):
    def divisor(self, delay: int) -> float:
        return 1


class ByTheVersion(Aware):
    def divisor(self, delay: int) -> float:
        return 1 + self.version


class FixedWorkers(Aware):
    def divisor(self, delay: int) -> float:
        return 5


class Climbs(Aware):
    def divisor(self, delay: int) -> float:
        return -1 - delay


class StandsStill(Aware):
    def push(self, gradient: torch.Tensor, version: int) -> None:
        super().push(gradient, version)
        self.version = 0


class KeepsTheVersion(Aware):
    def pull(self) -> Any:
        return self.weights.clone()


class HandsOutItsOwn(Aware):
    def pull(self) -> tuple[torch.Tensor, int]:
        return self.weights, self.version


@pytest.mark.parametrize(("wrong", "words"), [
    (ByTheDelay, "push 3, with 2 workers and a rate of 1.5: 2 other gradients came"),
    (CountsItself, "moved by 0.25 times the gradient"),
    (NeverDivides, "moved by 1.5 times the gradient"),
    (ByTheVersion, "push 2, with 1 worker"), (FixedWorkers, "push 1, with 1 worker"),
    (Climbs, "moved by -0.5"), (StandsStill, "moved by 1.5 times the gradient"), (HandsOutItsOwn, "hand out a copy"),
    (KeepsTheVersion, "and is to return two things"),
])  # fmt: skip
def test_aware_wrongly(wrong: Any, words: str) -> None:
    refused(check.aware(wrong), words)


# ---- a server that threads share ----------------------------------------------------------------------------------------


class Locked:
    def __init__(self, value: Any) -> None:
        self.value, self.lock = value, threading.Lock()


class AccessesOnly(Locked):
    def push(self, gradient: Any) -> None:
        with self.lock:
            value = self.value
        total = value + gradient
        with self.lock:
            self.value = total


class ReadsBefore(Locked):
    def push(self, gradient: Any) -> None:
        value = self.value
        with self.lock:
            self.value = value + gradient


class ReadsApart(Locked):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.mine = threading.Lock()

    def push(self, gradient: Any) -> None:
        with self.mine:
            value = self.value
        with self.mine:
            self.value = value + gradient


class LockOfEachPush(Locked):
    def push(self, gradient: Any) -> None:
        with threading.Lock():
            self.value = self.value + gradient


class NoLock(Locked):
    def push(self, gradient: Any) -> None:
        self.value += gradient


class NeverLetsGo(Locked):
    def push(self, gradient: Any) -> None:
        self.lock.acquire()
        self.value = self.value + gradient


class LockedByAnError(Locked):
    def push(self, gradient: Any) -> None:
        self.lock.acquire()
        self.value = self.value + gradient
        self.lock.release()


class GivesUp(Locked):
    def push(self, gradient: Any) -> None:
        if self.lock.acquire(blocking=False):
            try:
                self.value = self.value + gradient
            finally:
                self.lock.release()


class AlwaysTwo(Locked):
    def push(self, gradient: Any) -> None:
        self.value = 2


@pytest.mark.parametrize(("wrong", "words"), [
    (AccessesOnly, "2 threads pushed 1 each to a value of 5, and it became 6: two additions ran at the same time"),
    (ReadsBefore, "somebody came between"), (ReadsApart, "became 6"), (LockOfEachPush, "at the same time"),
    (NoLock, "became 6"),
    (NeverLetsGo, "a push never came back"), (LockedByAnError, "a push never came back"), (GivesUp, "2 threads pushed 1 each"),
    (AlwaysTwo, "1 thread pushed 1 each to a value of 5, and it became 2"),
])  # fmt: skip
def test_servers_that_lose(wrong: Any, words: str) -> None:
    refused(check.server(wrong), words)
