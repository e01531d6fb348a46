"""A random order of any number of samples that nobody has to store: who wants its millionth entry computes that one."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

from d2lps.arguments import whole

ROUNDS = 8  # of the Feistel network; four make a pseudorandom permutation of good round functions (Luby and Rackoff 1988)
MOST = 1 << 62  # samples: places are 64-bit integers


@dataclass(frozen=True)
class Shuffle:
    """A permutation of range(length), another one for each (seed, epoch).

    >>> order = Shuffle(length=10, seed=0)
    >>> sorted(order(range(10)).tolist()) == list(range(10)), sorted(order(range(10), epoch=1).tolist()) == list(range(10))
    (True, True)
    >>> Shuffle(10**12, seed=7)([0, 10**12 - 1]).tolist()
    [978785182960, 478941637300]

    A place is written as (left, right), two digits of base ⌈√length⌉ (or one more). A round turns it into (right, left + noise of
    right), which can be undone whatever the noise is, so that different places stay different. Where the result is not below
    `length`, it goes through the rounds again until it is (cycle walking). Memory: none; time: 8 rounds for each place that is
    asked for, and again for at most about 4/√length of them. ValueError for a place that there is not, and for more than 2**62
    samples.
    Source: Black and Rogaway 2002.
    """

    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if whole("length", self.length) > MOST:
            raise ValueError(f"length={self.length} is above 2**62")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} is not a whole number")

    def __call__(self, places: Any, epoch: int = 0) -> np.ndarray:
        """The samples at these places of an epoch's order, as 64-bit integers."""
        found = np.array(places)
        if found.size and found.dtype.kind not in "iu":
            raise ValueError(f"places={places!r} are not whole numbers")
        found = found.astype(np.int64)
        if found.size and not 0 <= found.min() <= found.max() < self.length:
            raise ValueError(f"places from {found.min()} to {found.max()}: an epoch's are 0 to {self.length - 1}")
        keys = np.random.SeedSequence([self.seed % 2**64, epoch]).generate_state(ROUNDS, np.uint64)
        outside = np.ones(found.shape, dtype=bool)
        while outside.any():
            found[outside] = self._rounds(found[outside], keys)
            outside = found >= self.length
        return found

    def _rounds(self, places: np.ndarray, keys: np.ndarray) -> np.ndarray:
        least = isqrt(self.length - 1) + 1
        base = np.uint64(least + least % 2)  # with an odd one all orders would be even permutations
        left, right = np.divmod(places.astype(np.uint64), base)
        for key in keys:
            left, right = right, (left + _noise(right ^ key) % base) % base
        return (left * base + right).astype(np.int64)


def _noise(number: np.ndarray) -> np.ndarray:
    """64 bits that look random and are a function of 64 bits: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor)
    return number
