"""The checks of *Feeding the devices*: wrong answers are refused in words."""

import random
from functools import cache
from math import gcd

from solutions import refused, refusing

from d2lps_book.check import feeding_the_devices as check


def affine(place, n, seed):
    """A multiplication without any noise: samples of places side by side are evenly spaced."""
    factor = next(a for a in range(1 + hash((seed, 1)) % n, 3 * n) if gcd(a, n) == 1)
    return (factor * place + hash((seed, 2))) % n


@cache
def table(n, seed):
    return random.Random(seed).sample(range(n), n)


def listed(place, n, seed):
    """A table where there is room for one, and a hash where not."""
    return table(n, seed)[place] if n < 10**6 else hash((place, seed)) % n


def test_a_table_is_asked_first_for_what_it_has_no_room_for():
    asked = []

    def tabled(place, n, seed):
        if n <= 10**6:
            return table(n, seed)[place]
        asked.append(n)
        raise MemoryError

    refused(check.sample_at(tabled), "MemoryError")
    assert asked == [10**12]


FILL, DRAWN, BEGUN = "(stream, size)) -> ", "randrange(len(buffer)) -> randrange", "stream = iter(stream) -> "
LAST = "buffer[at] = buffer[-1]\n            buffer.pop() -> "
KEYS, NOISE = "[seed, epoch, index] -> ", "dice.normal(size=sample.shape) -> "
SHARED, ALIKE = "share their noise", "as likely"

test_refused = refusing({
    "ex-feeding-queue queue": [
        ("(204, 1968, 160, 6, 2)", "batches under way"), ("(204.8, 1968, 160, 6, 2)", "(whole)"),
        ("(205, 1968, 160, 6, 2.15)", "part of a device"), ("(4, 1968, 160, 6, 2)", "64 samples of 80 ms"),
        ("(205, 30.75, 160, 6, 2)", "MB"), ("(205, 1968, 5120, 6, 2)", "ms of a step"), ("(205, 1968, 160, 5, 2)", "5.2"),
        ("(205, 1968, 160, 6, 220)", "How many samples a second"), ("(205, 1968, 160, 6)", "5 numbers are wanted"),
    ],
    "ex-feeding-cache saved": [
        ("(30, 30, 0)", "LRU"), ("(1.37, 30, 0)", "the store is asked for the rest"), ("(38.63, 10, 0)", "pinned"),
        ("(38.63, 30, 120)", "four machines"),
    ],
    "ex-feeding-order sample_at": [
        (lambda place, n, seed: (place + seed) % n, "usual"),
        (lambda place, n, seed: hash((place, n, seed)) % n, "places"),
        (lambda place, n, seed: place, "with each of 2,400 seeds it is the same order"),
        ("if place < n: -> if True:", "none of the samples"),
        (affine, "usual"),
        ("base += base % 2 -> pass", "an odd base?"),
        ("hash((hash((k, digit, seed)), 1)) -> hash((k, digit, seed))",  # whose last bits follow those of the tuple
         "another one in each round"),
        (listed, "n=1,000,003: of 4,000 places, two hold the same"),
        (lambda place, n, seed: float((place + seed) % n), "none of the samples"),
    ],
    "ex-feeding-resume next_batch": [
        ("list(range(at, at + size)) -> list(range(first, end))[rank::ranks]", "not in order"),
        ("(epoch, end) if -> (epoch, end + 1) if", "the line is at"),
        ("min(first + batch, n) -> first + batch if first + batch <= n else first", "come next"),
        ("return parts, -> parts[-1] += range(first + batch - n)\n    return parts,", "come next"),
        ("rank < more -> rank >= ranks - more", "at most one more"),
        ("(epoch + 1, 0) -> (epoch, 0)", "the line is at"),
        (lambda state, n, batch, ranks: [[0]] * ranks, "is not (parts"),
        ("return parts, -> return [sum(parts, [])],", "parts"),
    ],
    "ex-feeding-buffer shuffled": [
        (f"{FILL}(stream, None))", "buffer of 1"),
        (f"{LAST}return", "not each of them once"),
        ("at = dice.randrange -> import random; at = random.randrange", "others thrown"),
        (lambda stream, size, dice: iter(stream), "stream's order"),
        (f"{BEGUN}import random; stream, dice = iter(stream), random.Random(4)", "with other dice"),
        (f"{FILL}(stream, size + 8 * (size > 20)))", "places forward"),
        (f"{FILL}(stream, size if size < 10 else None))", "no end"),
        (f"{FILL}(stream, max(1, size // 2)))", ALIKE),
        ((f"{DRAWN}(len(buffer)) if len(buffer) == size else 0", f"{LAST}buffer.pop(at)"), "stream's order"),
        (("while buffer: -> while buffer := buffer or list(islice(stream, size)):", "in stream: -> in ():"), ALIKE),  # blocks
        (f"{DRAWN}(size // 2 * (len(buffer) == size), len(buffer))", ALIKE),  # half of it is left alone until the end
        (("dice.randrange(len(buffer)) -> min(dice.randrange(len(buffer)), dice.randrange(len(buffer)))",
          "buffer[at] = new -> buffer.pop(at)\n            buffer.append(new)"), ALIKE),  # the longer it waits, the likelier
        (f"{DRAWN}(max(1, len(buffer) - 1))", "sample 99 was kept until the stream had ended"),
    ],
    "ex-feeding-dice noisy": [
        (f"{NOISE}np.random.normal(size=sample.shape)", "has changed"),
        ("np.random.default_rng( -> np.random; dice.seed(", "has changed"),
        (f"{KEYS}seed + epoch + index", SHARED), (f"{KEYS}[seed, index]", SHARED), (f"{KEYS}[epoch, index]", SHARED),
        (f"{KEYS}1000 * seed + 100 * epoch + index", SHARED),
        (f"{KEYS}None", "asked again"),
        (f"{NOISE}dice.random(sample.shape)", "mean 0"),
        (f"{NOISE}dice.normal(size=8)", "broadcast"),
        (f"{NOISE}dice.normal()", "in several places"),
        (f"sample + {NOISE}sample.__iadd__(dice.normal(size=sample.shape))", "itself"),
        ("return sample + -> return", "asked again"),
    ],
})  # fmt: skip
