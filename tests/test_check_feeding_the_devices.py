"""The checks of *Feeding the devices*: wrong answers are refused in words."""

import random
from functools import cache
from itertools import islice
from math import gcd, isqrt

import numpy as np
import pytest
from solutions import refused

from d2lps_book.check import feeding_the_devices as check


@pytest.mark.parametrize(
    ("name", "wrong", "word"),
    [
        ("queue", (204, 1968, 160, 6, 2), "batches under way"),
        ("queue", (204.8, 1968, 160, 6, 2), "(whole)"),
        ("queue", (205, 1968, 160, 6, 2.15), "part of a device"),
        ("queue", (4, 1968, 160, 6, 2), "64 samples of 80 ms"),
        ("queue", (205, 30.75, 160, 6, 2), "MB"),
        ("queue", (205, 1968, 5120, 6, 2), "ms of a step"),
        ("queue", (205, 1968, 160, 5, 2), "5.2"),
        ("queue", (205, 1968, 160, 6, 220), "how many samples a second".capitalize()),
        ("queue", (205, 1968, 160, 6), "5 numbers are wanted"),
        ("saved", (30, 30, 0), "LRU"),
        ("saved", (1.37, 30, 0), "the store is asked for the rest"),
        ("saved", (38.63, 10, 0), "pinned"),
        ("saved", (38.63, 30, 120), "four machines"),
    ],
)
def test_answer_refused(name, wrong, word):
    refused(getattr(check, name)(wrong), word)


# ---- sample_at ----------------------------------------------------------------------------------------------------------


def rotated(place, n, seed):
    return (place + seed) % n


def hashed(place, n, seed):
    return hash((place, n, seed)) % n


def unshuffled(place, n, seed):
    return place


def not_walked(place, n, seed):
    base = isqrt(n - 1) + 1
    left, right = divmod(place, base)
    for k in range(8):
        left, right = right, (left + hash((k, right, seed))) % base
    return left * base + right


def affine(place, n, seed):
    """A multiplication without any noise: samples of places side by side are evenly spaced."""
    factor = next(a for a in range(1 + hash((seed, 1)) % n, 3 * n) if gcd(a, n) == 1)
    return (factor * place + hash((seed, 2))) % n


def walked(place, n, seed, noise, base):
    while True:
        left, right = divmod(place, base)
        for k in range(8):
            left, right = right, (left + noise((k, right, seed))) % base
        if (place := left * base + right) < n:
            return place


def odd(place, n, seed):
    """A base that may be odd."""
    return walked(place, n, seed, lambda key: hash((hash(key), 1)), isqrt(n - 1) + 1)


def hashed_once(place, n, seed):
    """An even base, but Python's hash of a tuple is no good noise: its last bits follow those of the tuple."""
    base = isqrt(n - 1) + 1
    return walked(place, n, seed, hash, base + base % 2)


@cache
def table(n, seed):
    return random.Random(seed).sample(range(n), n)


def listed(place, n, seed):
    """A table where there is room for one, and a hash where not."""
    return table(n, seed)[place] if n < 10**6 else hash((place, seed)) % n


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (rotated, "usual"), (hashed, "places"), (unshuffled, "with each of 2,400 seeds it is the same order"),
        (not_walked, "none of the samples"), (affine, "usual"),
        (odd, "an odd base?"),
        (hashed_once, "another one in each round"), (listed, "n=1,000,003: of 4,000 places, two hold the same"),
        (lambda place, n, seed: float(rotated(place, n, seed)), "none of the samples"),
    ],
)  # fmt: skip
def test_sample_at_refuses(wrong, word):
    refused(check.sample_at(wrong), word)


def test_a_table_is_asked_first_for_what_it_has_no_room_for():
    asked = []

    def tabled(place, n, seed):
        if n <= 10**6:
            return table(n, seed)[place]
        asked.append(n)
        raise MemoryError

    refused(check.sample_at(tabled), "MemoryError")
    assert asked == [10**12]


# ---- next_batch ---------------------------------------------------------------------------------------------------------


def batches(strided=False, ahead=0, drop=False, wrap=False, last_more=False, epoch=True):
    def next_batch(state, n, batch, ranks):
        now, first = state
        end = min(first + batch, n)
        if drop and first + batch > n:
            end = first
        line = list(range(first, end))
        if wrap:
            line += range(first + batch - n) if first + batch > n else []
        if strided:
            parts = [line[rank::ranks] for rank in range(ranks)]
        else:
            parts = [part.tolist() for part in np.array_split(line, ranks)]
            if last_more:
                parts = [part.tolist() for part in np.array_split(line[::-1], ranks)][::-1]
                parts = [part[::-1] for part in parts]
        after = (now, end + ahead) if end < n else (now + epoch, 0)
        return parts, after

    return next_batch


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (batches(strided=True), "not in order"), (batches(ahead=1), "the line is at"), (batches(drop=True), "come next"),
        (batches(wrap=True), "come next"), (batches(last_more=True), "at most one more"),
        (batches(epoch=False), "the line is at"),
        (lambda state, n, batch, ranks: [[0]] * ranks, "is not (parts"),
        (lambda state, n, batch, ranks: ([list(range(state[1], min(state[1] + batch, n)))], (0, 0)), "parts"),
    ],
)  # fmt: skip
def test_next_batch_refuses(wrong, word):
    refused(check.next_batch(wrong), word)


# ---- shuffled -----------------------------------------------------------------------------------------------------------


def everything(stream, size, dice):
    kept = list(stream)
    dice.shuffle(kept)
    yield from kept


def blocks(stream, size, dice):
    stream = iter(stream)
    while block := list(islice(stream, size)):
        dice.shuffle(block)
        yield from block


def loses_the_rest(stream, size, dice):
    stream = iter(stream)
    buffer = list(islice(stream, size))
    for new in stream:
        at = dice.randrange(len(buffer))
        yield buffer[at]
        buffer[at] = new


def own_dice(stream, size, dice):
    return fair(stream, size, random)


def fair(stream, size, dice, first=0, rest=True, fixed=0):
    stream = iter(stream)
    buffer = list(islice(stream, size))
    for new in stream:
        at = dice.randrange(first, len(buffer) - fixed) if len(buffer) > first + fixed else 0
        yield buffer[at]
        buffer[at] = new
    if rest:
        dice.shuffle(buffer)
    yield from buffer


def oldest(stream, size, dice):
    """What has waited longest is likelier."""
    stream = iter(stream)
    buffer = list(islice(stream, size))
    while buffer:
        yield buffer.pop(min(dice.randrange(len(buffer)), dice.randrange(len(buffer))))
        buffer += islice(stream, 1)


def sticky(stream, size, dice):
    """Half of the buffer is left alone until the end."""
    return fair(stream, size, dice, first=size // 2)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (everything, "buffer of 1"), (loses_the_rest, "not each of them once"), (own_dice, "others thrown"),
        (lambda stream, size, dice: iter(stream), "stream's order"),
        (lambda stream, size, dice: fair(stream, size, random.Random(4)), "with other dice"),
        (lambda stream, size, dice: fair(stream, size + 8 * (size > 20), dice), "places forward"),
        (lambda stream, size, dice: everything(stream, size, dice) if size > 9 else fair(stream, size, dice), "no end"),
        (lambda stream, size, dice: fair(stream, max(1, size // 2), dice), "as likely"),
        (lambda stream, size, dice: fair(stream, size, dice, rest=False), "stream's order"),
        (blocks, "as likely"), (sticky, "as likely"), (oldest, "as likely"),
        (lambda stream, size, dice: fair(stream, size, dice, fixed=1), "sample 99 was kept until the stream had ended"),
    ],
)  # fmt: skip
def test_shuffled_refuses(wrong, word):
    refused(check.shuffled(wrong), word)


# ---- noisy --------------------------------------------------------------------------------------------------------------


def global_state(sample, index, epoch, seed):
    return sample + np.random.normal(size=sample.shape)


def reseeds(sample, index, epoch, seed):
    np.random.seed([seed, epoch, index])
    return sample + np.random.normal(size=sample.shape)


def seeded(key):
    return lambda sample, *keys: sample + np.random.default_rng(key(*keys)).normal(size=sample.shape)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (global_state, "has changed"), (reseeds, "has changed"),
        (seeded(lambda index, epoch, seed: seed + epoch + index), "share their noise"),
        (seeded(lambda index, epoch, seed: [seed, index]), "share their noise"),
        (seeded(lambda index, epoch, seed: [epoch, index]), "share their noise"),
        (seeded(lambda index, epoch, seed: None), "asked again"),
        (seeded(lambda index, epoch, seed: 1000 * seed + 100 * epoch + index), "share their noise"),
        (lambda sample, *keys: sample + np.random.default_rng(keys).random(sample.shape), "mean 0"),
        (lambda sample, *keys: sample + np.random.default_rng(keys).normal(size=8), "broadcast"),
        (lambda sample, *keys: sample + np.random.default_rng(keys).normal(), "in several places"),
        (lambda sample, *keys: np.add(sample, np.random.default_rng(keys).normal(size=sample.shape), out=sample), "itself"),
        (lambda sample, *keys: np.random.default_rng(keys).normal(size=sample.shape), "asked again"),
    ],
)  # fmt: skip
def test_noisy_refuses(wrong, word):
    refused(check.noisy(wrong), word)


@pytest.mark.parametrize("name", ["sample_at", "next_batch", "shuffled", "noisy"])
def test_a_stub_is_still_empty(name):
    def stub(*args): ...

    refused(getattr(check, name)(stub), "still empty")
