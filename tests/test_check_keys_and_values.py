"""The exercises of *Keys and values*: what is wrong is refused, in words."""

import hashlib
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from solutions import refused_as

from d2lps_book.check import keys_and_values as check

Tensor = torch.Tensor


@pytest.mark.parametrize(("name", "answers", "words"), [
    ("memory", ((2.0, 15.9), (1.0, 9.5), ...), "not all"),
    ("memory", ((1.0, 8.0), (1.0, 9.5), 4.0), "all_reduce, a worker.*both moments"),
    ("memory", ((2.0, 15.9), (1.0, 8.0), 4.0), "servers, in all.*once"),
    ("memory", ((2.0, 15.9), (1.0, 9.5), 0.5), "aside.*by itself"),
    ("memory", (2.0, (1.0, 9.5), 4.0), "2 numbers are wanted"),
    ("slices", (8,), "fullest server has 3.00 shares, and 0.000"),
    ("slices", (1,), "8.00 shares"),
    ("slices", (80,), "1.70 shares.*more slices"),
    ("slices", (50_000,), "each is a message"),
    ("slices", (0,), "no number of slices"),
    ("slices", ("many",), "no number of slices"),
    ("break_even", (1.0, 1.0), "64 bytes"),
    ("break_even", (89, 33), "at most 1"),
    ("break_even", (8 / 9, "a third"), "4 bytes: not 'a third'"),
    ("break_even", (0.8889, 0.5), "4 bytes.*with the push and again with the pull"),
    ("break_even", (64 / 80, 4 / 20), "64 bytes"),
    ("tiers", (24, 72), "72 misses"),
    ("tiers", (90, 6), "not 6 misses"),
    ("tiers", (96, 0), "0 misses"),
    ("tiers", (36, 12), "48 reads, not 96"),
    ("tourist", (30, 186), "after reading"),
    ("tourist", (186, 186), "after reading"),
    ("tourist", (160, 160), "after peeking"),
    ("tourist", (160, 270), "after peeking"),
    ("tourist", (175, 175), "which pages are in memory"),
    ("tourist", (180, 165), "which pages are in memory"),
])  # fmt: skip
def test_wrong_numbers_are_refused(name: str, answers: tuple[Any, ...], words: str) -> None:
    refused_as(getattr(check, name)(*answers), words)


# ---- an optimizer of one's own --------------------------------------------------------------------------------------------


class Right:
    def __init__(self, lr: float = 0.01, alpha: float = 0.99, eps: float = 1e-8) -> None:
        self.lr, self.alpha, self.eps = lr, alpha, eps

    def state(self, value: Tensor) -> dict[str, Tensor]:
        return {"square": torch.zeros_like(value)}

    def mean(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["square"].mul_(self.alpha).add_((1 - self.alpha) * gradient**2)

    def step(self, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        value -= self.lr * gradient / (self.mean(gradient, state).sqrt() + self.eps)


class EpsilonInside(Right):
    def step(self, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        value -= self.lr * gradient / (self.mean(gradient, state) + self.eps).sqrt()


class OneRate(Right):
    """Right at the rate that the exercise tried."""

    def __init__(self, lr: float = 0.01, alpha: float = 0.9, eps: float = 1e-8) -> None:
        super().__init__(0.01, alpha, eps)


class OneAlpha(Right):
    def __init__(self, lr: float = 0.01, alpha: float = 0.9, eps: float = 1e-8) -> None:
        super().__init__(lr, 0.9, eps)


class OtherDefault(Right):
    def __init__(self, lr: float = 0.01, alpha: float = 0.9, eps: float = 1e-8) -> None:
        super().__init__(lr, alpha, eps)


class WithoutRoot(Right):
    def step(self, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        value -= self.lr * gradient / (self.mean(gradient, state) + self.eps)


class ChangesTheGradient(Right):
    def step(self, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        root = self.mean(gradient, state).sqrt() + self.eps
        value -= gradient.mul_(self.lr).div_(root)


class InSinglePrecision(Right):
    def state(self, value: Tensor) -> dict[str, Tensor]:
        return {"square": torch.zeros(value.shape)}


class NotInPlace(Right):
    def step(self, value: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        value = value - self.lr * gradient / (self.mean(gradient, state).sqrt() + self.eps)


class Remembers(Right):
    """Keeps what belongs in the state, by shape."""

    def state(self, value: Tensor) -> dict[str, Tensor]:
        return {}

    def mean(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        kept = self.__dict__.setdefault("kept", {})
        kept[gradient.shape] = kept.get(gradient.shape, 0) * self.alpha + (1 - self.alpha) * gradient**2
        return kept[gradient.shape]


class RemembersBeside(Remembers):
    def state(self, value: Tensor) -> dict[str, Tensor]:
        return {"square": torch.zeros_like(value)}


class ATensor(Right):
    """The running mean itself, not under a name."""

    def state(self, value: Tensor) -> Any:
        return torch.zeros_like(value)


class ANumber(Right):
    """Becomes a tensor in the first step; until then a server could not save it."""

    def state(self, value: Tensor) -> Any:
        return {"square": 0.0}

    def mean(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["square"] = self.alpha * state["square"] + (1 - self.alpha) * gradient**2
        return state["square"]


class NotSquared(Right):
    def mean(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["square"].mul_(self.alpha).add_((1 - self.alpha) * gradient)


class OneState(Right):
    """The same numbers for all keys."""

    def mean(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        self.one = getattr(self, "one", 0.0) * self.alpha + (1 - self.alpha) * float((gradient**2).mean())
        return torch.full_like(gradient, self.one)


class Stub: ...


def test_another_right_optimizer_passes() -> None:
    assert check.rmsprop(Right)


@pytest.mark.parametrize(("wrong", "words"), [
    (EpsilonInside, "so near: where does epsilon stand"), (ATensor, "not a dictionary of tensors"),
    (ANumber, "{'square': 0.0}, not a dictionary of tensors"), (NotSquared, "mean of squares"),
    (OneRate, r"lr=0.5, alpha=0.99, step 0"), (OneAlpha, "alpha=0.99, step 0"),
    (OtherDefault, r"^lr=0.1, step 0"), (WithoutRoot, "step 0: element"), (ChangesTheGradient, "the gradient was changed"),
    (InSinglePrecision, "has the state the value's dtype"),
    (NotInPlace, "in place"), (Remembers, "gives no tensors"),
    (RemembersBeside, "step 6.*is all in `state`"), (OneState, "step 0"), (Stub, "still empty"),
    (torch.optim.RMSprop, "no state yet|TypeError"),
])  # fmt: skip
def test_optimizers_that_are_refused(wrong: type, words: str) -> None:
    refused_as(check.rmsprop(wrong), words)


# ---- who owns a key -------------------------------------------------------------------------------------------------------


def point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def bid(key: str, name: Any) -> int:
    return point(f"{name} bids for {key}")


@cache
def circle_of(servers: tuple[Any, ...], points: int) -> list[tuple[int, str, Any]]:
    return sorted((point(f"{server}, {k}"), str(server), server) for server in servers for k in range(points))


def on_a_ring(key: str, servers: Sequence[Any], points: int = 1) -> Any:
    circle = circle_of(tuple(servers), points)
    return circle[bisect(circle, (point(key),)) % len(circle)][2]


def by_position(key: str, servers: Sequence[Any]) -> Any:
    """Bids of places in a sorted list, not of names."""
    known = sorted(servers, key=str)
    return known[max(range(len(known)), key=lambda place: bid(key, place))]


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda key, servers: servers[point(key) % len(servers)], "named in another order"),
    (lambda key, servers: sorted(servers, key=str)[point(key) % len(servers)], "not to the newcomer"),
    (lambda key, servers: max(servers, key=lambda server: hash((key, server))), "another process finds other owners"),
    (lambda key, servers: max(servers, key=lambda server: f"{server} {key}".__hash__()), "another process finds other owners"),
    (lambda key, servers: servers[max(range(len(servers)), key=lambda k: bid(key, k))], "named in another order"),
    (by_position, "leaves, which never had it|not to the newcomer"),
    (on_a_ring, "its share is"),
    (lambda key, servers: max(servers, key=str), "not to the newcomer|its share is"),
    (lambda key, servers: max(servers, key=lambda server: bid("", server)), "not to the newcomer|its share is"),
    (lambda key, servers: int(point(key) % 8), "which is none of them"),
    (lambda key, servers: bid(key, 0), "which is none of them"),
])  # fmt: skip
def test_owners_that_are_refused(wrong: Callable[[str, Sequence[Any]], Any], words: str) -> None:
    refused_as(check.owner(wrong), words)


def test_other_right_owners_pass() -> None:
    assert check.owner(lambda key, servers: min(servers, key=lambda server: bid(key, server)))
    assert check.owner(lambda key, servers: on_a_ring(key, servers, points=400))
