"""The checks of *Clusters and the cloud*: wrong answers are refused in words that say why."""

import math

from solutions import refusing, tried

read = 0


def counter(done: int, batch: int, rank: int, size: int) -> range:
    """Goes on where the last call ended: nobody has to tell it which step it is."""
    global read
    first = read = 0 if done == rank == 0 else read
    read += len(range(rank, batch, size))
    return range(first, read)


MINE, LASTS = "range(done * batch + rank, (done + 1) * batch, size) -> ", "bucket / drain if -> "
OPEN = "closed_from = time + pause -> "

test_refused = refusing({
    "ex-clusters-mine mine": [
        (f"{MINE}range((done * size + rank) * batch, (done * size + rank + 1) * batch)",
         "the batch is of all ranks together"),  # a batch each
        (f"{MINE}range(rank, batch, size)", "is read a second time"),
        ((f"{MINE}range(start + rank * share, start + (rank + 1) * share)",
          "size):\n -> size):\n    start, share = done * batch, batch // size\n"), "is never read"),  # no remainder
        (f"{MINE}range(done * batch, (done + (rank == 0)) * batch)", "all wait for the largest"),
        (f"{MINE}range(done * batch, (done + 1) * batch)", "a second time"),
        (counter, "asked again"),
    ],
    "ex-clusters-admit admit": [
        ("names.append(name) -> names.append(name)\n        else:\n            break", "whole"),
        ("if devices <= free -> if True", "need 16 devices"), ("free -= devices -> pass", "need 16 devices"),
        (lambda free, waiting: ["job9"], "is no job that waits"), (lambda free, waiting: [], "not []"),
    ],
    "ex-clusters-bucket lasts": [
        ("share * peak - base -> peak - base", "for how long"),
        (lambda bucket, peak, base, share: math.inf, "does get empty"),
        (f"{LASTS}bucket / (share * peak) if", "what goes out"),
        (lambda bucket, peak, base, share: bucket / (share * (peak - base)), "ZeroDivisionError"),
    ],
    "ex-clusters-cold cold": [
        ("(3, 140, 163)", "the registry give"), ("(19.2, 896, 935.2)", "140 GB"), ("(19.2, 140, 159.2)", "20 s"),
        ("(76.8, 140, 236.8)", "3 GB"), ("(19.2, 140)", "3 numbers are wanted"),
    ],
    "ex-clusters-breaker breaker": [
        (f"{OPEN}failed, closed_from = 0, time + pause", "though the breaker is open"),  # after a pause it wants all again
        (f"{OPEN}closed_from = math.inf", "though it should be"),
        (lambda requests, failures, pause: [True] * len(requests), "though the breaker is open"),
        (lambda requests, failures, pause: [], "0 answers"),
        (lambda requests, failures, pause: [works for _, works in requests], "though it should be"),
    ],
    "ex-clusters-slip slip": [
        ('"completions", 2', "four workers"), ('"subdomain", "x"', "is right"), ('"image", ""', "before the first has ended"),
        ('"parallelism", 3', "run at once"), ('"parallelism", 8', "only four workers"), ("..., ...", "not all is filled in"),
    ],
})  # fmt: skip


def test_other_right_answers() -> None:
    assert tried("ex-clusters-mine mine", f"{MINE}[*range(done * batch + rank, (done + 1) * batch, size)]")
    assert tried("ex-clusters-slip slip", '"spec.parallelism", 4')
