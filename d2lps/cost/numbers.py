"""What the formulas are fed with, and how their results are written."""

import math
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def log2_up(ranks: int) -> int:
    """ceil(log2 p): `[log2_up(p) for p in (1, 2, 3, 4, 5)] == [0, 1, 2, 2, 3]`"""
    return (ranks - 1).bit_length()


def check(nbytes: float, ranks: int, alpha: float, beta: float) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r} is not a whole number from 1 up")
    for name, value in (("nbytes", nbytes), ("alpha", alpha), ("beta", beta)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} is not a number from 0 up")


def named(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """The entry of that name; an unknown one is named, beside those there are."""
    if name not in table:
        raise ValueError(f"{kind}={name!r} is unknown: choose one of {', '.join(map(repr, table))}")
    return table[name]


def in_words(seconds: float) -> str:
    """`in_words(0.005185) == "5.185 ms"`"""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
