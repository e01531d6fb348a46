"""The checks of *Clusters and the cloud*: wrong answers are refused in words that say why."""

import math
from typing import Any

import pytest
from solutions import refused, solution

from d2lps_book.check import clusters_and_the_cloud as check


def each(done: int, batch: int, rank: int, size: int) -> range:
    return range(done * batch * size + rank * batch, done * batch * size + (rank + 1) * batch)


def restarted(done: int, batch: int, rank: int, size: int) -> range:
    return range(rank, batch, size)


def cut(done: int, batch: int, rank: int, size: int) -> range:
    start, share = done * batch, batch // size
    return range(start + rank * share, start + (rank + 1) * share)


def uneven(done: int, batch: int, rank: int, size: int) -> range:
    return range(done * batch, done * batch + batch) if rank == 0 else range(0)


read = 0


def counter(done: int, batch: int, rank: int, size: int) -> range:
    """Goes on where the last call ended: nobody has to tell it which step it is."""
    global read
    first = read = 0 if done == rank == 0 else read
    read += len(range(rank, batch, size))
    return range(first, read)


@pytest.mark.parametrize(("wrong", "words"), [
    (each, "the batch is of all ranks together"), (restarted, "is read a second time"), (cut, "is never read"),
    (uneven, "all wait for the largest"),
    (lambda done, batch, rank, size: range(done * batch, (done + 1) * batch), "a second time"), (counter, "asked again"),
], ids=["a batch each", "from the start", "no remainder", "rank 0 alone", "all read all", "a counter"])  # fmt: skip
def test_reading(wrong: Any, words: str) -> None:
    refused(check.mine(wrong), words)


def in_order(free: int, waiting: list[tuple[str, int]]) -> list[str]:
    names = []
    for name, want in waiting:
        if want > free:
            break
        free -= want
        names.append(name)
    return names


@pytest.mark.parametrize(("wrong", "words"), [
    (in_order, "whole"), (lambda free, waiting: [name for name, _ in waiting], "need 16 devices"),
    (lambda free, waiting: [name for name, want in waiting if want <= free], "need 16 devices"),
    (lambda free, waiting: ["job9"], "is no job that waits"), (lambda free, waiting: [], "not []"),
], ids=["stops at the first", "all", "each alone", "unknown", "nobody"])  # fmt: skip
def test_admitting(wrong: Any, words: str) -> None:
    refused(check.admit(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda bucket, peak, base, share: bucket / (peak - base) if peak > base else math.inf, "for how long"),
    (lambda bucket, peak, base, share: math.inf, "does get empty"),
    (lambda bucket, peak, base, share: bucket / (share * peak) if share * peak > base else math.inf, "what goes out"),
    (lambda bucket, peak, base, share: bucket / (share * (peak - base)), "ZeroDivisionError"),
], ids=["always busy", "for ever", "nothing comes in", "the share of both"])  # fmt: skip
def test_bursts(wrong: Any, words: str) -> None:
    refused(check.lasts(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    ((3, 140, 163), "the registry give"), ((19.2, 896, 935.2), "140 GB"), ((19.2, 140, 159.2), "20 s"),
    ((76.8, 140, 236.8), "3 GB"), ((19.2, 140), "3 numbers are wanted"),
], ids=str)  # fmt: skip
def test_cold_starts(wrong: Any, words: str) -> None:
    refused(check.cold(wrong), words)


def forgets_the_probe(requests: list[tuple[float, bool]], failures: int, pause: float) -> list[bool]:
    """After a pause it wants all its failures again."""
    passed, bad, until = [], 0, -1.0
    for time, works in requests:
        passed.append(time >= until)
        if passed[-1]:
            bad = 0 if works else bad + 1
            if bad == failures:
                bad, until = 0, time + pause
    return passed


def never_closes(requests: list[tuple[float, bool]], failures: int, pause: float) -> list[bool]:
    passed, bad = [], 0
    for _, works in requests:
        passed.append(bad < failures)
        bad += passed[-1] and not works
    return passed


@pytest.mark.parametrize(("wrong", "words"), [
    (forgets_the_probe, "though the breaker is open"), (never_closes, "though it should be"),
    (lambda requests, failures, pause: [True] * len(requests), "though the breaker is open"),
    (lambda requests, failures, pause: [], "0 answers"),
    (lambda requests, failures, pause: [works for _, works in requests], "though it should be"),
], ids=["forgets the probe", "never closes", "no breaker", "no answers", "an oracle"])  # fmt: skip
def test_breakers(wrong: Any, words: str) -> None:
    refused(check.breaker(wrong), words)


@pytest.mark.parametrize(("field", "value", "words"), [
    ("completions", 2, "four workers"), ("subdomain", "x", "is right"), ("image", "", "before the first has ended"),
    ("parallelism", 3, "run at once"), ("parallelism", 8, "only four workers"), (..., ..., "not all is filled in"),
])  # fmt: skip
def test_slips(field: Any, value: Any, words: str) -> None:
    refused(check.slip(field, value), words)


def test_other_right_answers() -> None:
    assert check.mine(lambda done, batch, rank, size: [*range(done * batch + rank, (done + 1) * batch, size)])
    assert check.cold((19.2, 140, 179.2)) and check.slip("spec.parallelism", 4)
    assert check.breaker(solution("ex-clusters-breaker")["breaker"])
