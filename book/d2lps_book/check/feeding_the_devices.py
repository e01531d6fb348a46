"""Checks of the exercises of *Feeding the devices*."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice, product
from typing import Any

import numpy as np

from d2lps_book.check.exercise import Function, Wrong, answered, judged
from d2lps_book.check.tools import parts as several
from d2lps_book.check.tools import refuse

__all__ = ["next_batch", "noisy", "queue", "sample_at", "saved", "shuffled"]


@answered
def queue(answer: Any) -> str:
    """Check five numbers: batches under way, MB, ms of a step, batches of shards under way, devices."""
    hints = (
        ("batches under way", 205, "64 samples of 80 ms, one after the other, are a batch's W; a (whole) one is used in 25 ms."),
        ("MB", 1968, "As many batches as are under way, each of 64 samples of 0.15 MB."),
        ("ms of a step", 160, "32 batches under way, each for its 5.12 s: how often is one ready?"),
        ("batches of shards", 6, "W is 130 ms now, and 5.2 batches are not enough with 5."),
        ("devices", 2, "How many samples a second does one device ask for? A part of a device can't be fed."),
    )
    several("the queue", answer, *hints, within=1e-6)
    return "205 batches of 1,968 MB, or 6 with shards; 32 workers make steps of 160 ms; two devices fill 5,500 requests a second"


@answered
def saved(answer: Any) -> str:
    """Check three numbers of TB that an epoch reads from the store."""
    several(
        "the caches",
        answer,
        ("LRU", 38.630, "The share of hits is f + (1 - f) ln(1 - f), with f = 1/4; the store is asked for the rest."),
        ("pinned", 30, "What is kept is found once an epoch."),
        ("four machines", 0, "What have the four kept together, when the first epoch is over?"),
        within=0.002,
    )
    return "38.6 TB, 30 TB, and nothing: four quarters are everything"


@judged
def sample_at(function: Function) -> str:
    """Check `function(place, n, seed)`: a random order of n samples, one place at a time."""
    for n in (1, 2, 3, 5, 10, 16, 17, 97, 1000):
        found = [function(place, n, 3) for place in range(n)]
        where = f"n={n}: "
        strange = next((i for i in found if not isinstance(i, int | np.integer) or not 0 <= i < n), None)
        refuse((strange is not None, f"{where}{strange!r} is none of the samples 0 to {n - 1}"))
        twice = next((i for i in found if found.count(i) > 1), None)
        refuse((twice is not None, f"{where}sample {twice} is at {found.count(twice)} places"),
               (found != [function(place, n, 3) for place in range(n)], f"{where}asked again, the order is another"))  # fmt: skip
    _random_enough(function)
    for n in (10**12, 1_000_003):  # what makes a table has no room for the first, and no time for the second
        far = [function(place, n, 3) for place in range(n - 500, n)]
        others = [function(place, n, 3) for place in random.Random(1).sample(range(n - 500), 3500)]
        refuse((len({*far, *others}) < 4000, f"n={n:,}: of 4,000 places, two hold the same sample"),
               (not all(0 <= i < n for i in far + others), f"n={n:,}: a sample is not below n"),
               (np.std(far) < 0.2 * n, f"n={n:,}: samples of places side by side are neighbors as well"))  # fmt: skip
    return "each sample at one place, for n from 1 to 1,000; all orders of five as often; and a trillion samples in no memory"


def _random_enough(function: Function) -> None:
    """Over many seeds all orders of five samples come equally often: their chi-squared is about 119, and seldom above 170."""
    found = Counter(tuple(function(place, 5, seed) for place in range(5)) for seed in range(2400))
    even = sum(times for order, times in found.items() if np.linalg.det(np.eye(5)[list(order)]) > 0)
    far = (sum((times - 20) ** 2 for times in found.values()) + 400 * (120 - len(found))) / 20
    refuse((len(found) == 1, "n=5: with each of 2,400 seeds it is the same order"),
           (far > 200 and even > 1400, f"n=5: of 2,400 seeds {even} give an even permutation, 1,200 are usual: an odd base?"),
           (far > 200, f"n=5: over 2,400 seeds {len(found)} of the 120 orders come, with a chi-squared of {far:.0f} where 119 is "
            "usual: is the noise another one in each round, for each digit, with each seed?"))  # fmt: skip


@judged
def next_batch(function: Function) -> str:
    """Check `function(state, n, batch, ranks)`: parts of the next batch, and the new state, over changes of ranks."""
    dice, changes = random.Random(5), 0
    for n, batch in ((1, 1), (10, 4), (12, 4), (7, 20), (50, 8), (23, 5)):
        state, line = (0, 0), list[int]()
        while state[0] < 2:
            ranks = dice.randint(1, 8)
            case = f"state {state}, n={n}, batch={batch}, ranks={ranks}: "
            given = function(state, n, batch, ranks)
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], tuple)):
                raise Wrong(f"{case}{given!r} is not (parts, (epoch, position))")
            parts, after = list(map(list, given[0])), tuple(given[1])
            _parts(case, parts, ranks, range(state[1], min(state[1] + batch, n)))
            end = min(state[1] + batch, n)
            right = (state[0], end) if end < n else (state[0] + 1, 0)
            refuse((after != right, f"{case}the new state is {after}, and the line is at {right}"))
            line, state, changes = line + [i for part in parts for i in part], right, changes + 1
        refuse((line != [*range(n)] * 2, f"n={n}, batch={batch}: two epochs are not each place once"))
    return f"{changes} batches, each for another number of ranks: nothing lost, nothing twice"


def _parts(case: str, parts: list[list[int]], ranks: int, wanted: range) -> None:
    line, sizes = [i for part in parts for i in part], [len(part) for part in parts]
    refuse((len(parts) != ranks, f"{case}there are {len(parts)} parts"),
           (sorted(line) != list(wanted), f"{case}the places are {line}, and {list(wanted)} come next"),
           (line != list(wanted), f"{case}the places are not in order over the ranks: {parts}"),
           (sizes != sorted(sizes, reverse=True) or sizes[0] - sizes[-1] > 1,
            f"{case}the ranks have {sizes} places: at most one more, and the first ones"))  # fmt: skip


@judged
def shuffled(function: Function) -> str:
    """Check `function(stream, size, dice)`: a generator that shuffles in a buffer."""
    for n, size in ((0, 3), (1, 1), (5, 1), (5, 5), (5, 9), (40, 7), (20, 30)):
        given = list(function(iter(range(n)), size, random.Random(1)))
        refuse((sorted(given) != list(range(n)), f"{n} samples, a buffer of {size}: {given} is not each of them once"),
               (size == 1 and given != list(range(n)), f"a buffer of 1 can't change the order, and it is {given}"),
               (n == 20 and given == list(range(n)), "all 20 were in the buffer, and keep the stream's order"))  # fmt: skip
    _takes_what_it_needs(function)
    n, size = 4000, 100
    orders = [list(function(iter(range(n)), size, random.Random(seed))) for seed in (1, 1, 2)]
    forward = max(sample - at for at, sample in enumerate(orders[0]))
    late = [at - sample for at, sample in enumerate(orders[0]) if 1000 <= sample < 2000]
    refuse((orders[0] != orders[1], "with the same dice the order is another: are others thrown?"),
           (orders[0] == orders[2], "with other dice the order is the same"),
           (forward >= size, f"a buffer of {size}, and a sample came {forward} places forward: where was it kept?"),
           (abs(np.mean(late)) > 20 or not 75 < np.std(late) < 130,
            f"samples come {np.mean(late):.0f} places late on average, give or take {np.std(late):.0f}; where each in a buffer "
            "of 100 is as likely, 0 give or take 100"),
           ((kept := min(orders[0][-size:])) < size, f"sample {kept} was kept until the stream had ended: is each place drawn?"),
           (forward < size - 10, f"none of {n} came more than {forward} places forward, in a buffer of {size}"))  # fmt: skip
    return f"each sample once; in a buffer of {size} none came more than {forward} places forward, however many there are"


def _takes_what_it_needs(function: Function) -> None:
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        for i in count():
            taken = i + 1
            if taken > 500:
                raise Wrong("the stream has no end, and 500 samples were taken of it before the tenth came out of a buffer of 20")
            yield i

    list(islice(function(endless(), 20, random.Random(3)), 10))
    refuse((taken > 30, f"to give out 10 samples from a buffer of 20, {taken} were taken from the stream"))


@judged
def noisy(function: Function) -> str:
    """Check `function(sample, index, epoch, seed)`: noise of a sample's own."""
    numbers = (0, 1, 2, 10, 100, 1000)
    keys, before = list(product(numbers, repeat=3)), np.random.get_state()
    try:
        np.random.seed(0)
        same = str(np.random.get_state())
        found = {key: _noise(function, key, 0.0) for key in keys}
        refuse((str(np.random.get_state()) != same, "the state of np.random has changed"))
        for key in reversed(keys):
            refuse((not np.allclose(_noise(function, key, 1.0), found[key]),
                    "sample {} of epoch {}, seed {} has other noise when asked again in another order".format(*key)))  # fmt: skip
    finally:
        np.random.set_state(before)
    _all_differ(found)
    values = np.concatenate([noise.ravel() for noise in found.values()])
    refuse((abs(values.mean()) > 0.2 or abs(values.std() - 1) > 0.2, "the noise does not have mean 0 and deviation 1"))
    return f"{len(keys)} samples, epochs and seeds, all of them with noise of their own, whoever asks and when"


def _noise(function: Function, key: tuple[int, ...], value: float) -> Any:
    """What is added to a sample of two rows."""
    sample = np.full((2, 4), value)
    given = np.asarray(function(sample, *key))
    refuse((given.shape != (2, 4), f"of a sample of shape (2, 4) it makes one of shape {given.shape}"),
           (bool((sample != value).any()), "the sample itself has changed: the next epoch will add to that"))  # fmt: skip
    return given - value


def _all_differ(found: dict[Any, Any]) -> None:
    """Normal numbers are never the same twice, in two samples or in one."""
    seen: dict[float, Any] = {}
    for key, noise in found.items():
        for value in np.round(noise.ravel(), 9):
            other = seen.setdefault(value, key)
            refuse((other != key, f"(index, epoch, seed) = {key} and {other} share their noise"))
        refuse((len(np.unique(noise)) < noise.size, f"(index, epoch, seed) = {key}: one noise in several places"))
