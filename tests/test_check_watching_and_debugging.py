"""The checks of *Watching and debugging*: wrong answers are refused in words that say why."""

from typing import Any

import numpy as np
import pytest
from solutions import refused

from d2lps_book.check import watching_and_debugging as check


def busy(trace: Any) -> np.ndarray:
    bars = trace.bars()["computing"]
    return np.bincount(bars["rank"], bars["end"] - bars["start"], trace.ranks)


def above_rank_0(trace: Any) -> int | None:
    return next(iter(np.flatnonzero(busy(trace) > 1.3 * busy(trace)[0]).tolist()), None)


def waits_least(trace: Any) -> int | None:
    waits = trace.time_waiting()
    return int(np.argmin(waits)) if waits.min() < 0.7 * np.median(waits) else None


def beyond(trace: Any, factor: float, usual: Any) -> int | None:
    return next(iter(np.flatnonzero(busy(trace) > factor * usual(busy(trace))).tolist()), None)


def above_the_mean(trace: Any) -> int | None:
    found = busy(trace)
    return next((rank for rank, mine in enumerate(found) if mine > 1.3 * np.delete(found, rank).mean()), None)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda trace: int(np.argmin(trace.time_waiting())), "nobody is slow: not "),
    (lambda trace: int(np.argmax(busy(trace))), "nobody is slow: not "),
    (above_rank_0, "rank 0 computes three times as long: not"),
    (lambda trace: trace and None, "rank 3 computes 1.35 times as long: not None; compare what each"),
    (waits_least, "not None; compare what each rank computes"),
    (lambda trace: beyond(trace, 1.3, np.mean), "rank 3 computes 1.35"),
    (lambda trace: beyond(trace, 1.1, np.median), "rank 1 computes 1.2 times as long: not 1"),
    (above_the_mean, "rank 0 hardly at all: not 1; how a rank waits tells nothing of it: how much"),
    (lambda trace: beyond(trace, 1.3, np.min), "all but rank 1 compute twice as long: not"),
    (lambda trace: beyond(trace, 1.3, np.median),
     "ranks 2 and 4 compute 1.5 times as long, rank 3 1.8 times: not None; compare what each rank computes"),
], ids=["waits least", "the longest", "by rank 0", "nobody", "waiting", "mean", "a tenth",
        "others' mean", "quickest", "of all"])  # fmt: skip
def test_the_culprit_misjudged(wrong: Any, words: str) -> None:
    refused(check.culprit(wrong), words)


def count(seconds: list[list[float]], patience: int, middle: Any, down: int = 2, floor: int = 0) -> list[int]:
    counts, named = [0] * len(seconds[0]), set()
    for row in seconds:
        for rank, mine in enumerate(row):
            usual = middle(row[:rank] + row[rank + 1 :])
            counts[rank] = max(floor, counts[rank] + (1 if mine > 1.1 * usual else -down))
            if counts[rank] >= patience:
                named.add(rank)
    return sorted(named)


def upper(rest: list[float]) -> float:
    return sorted(rest)[len(rest) // 2]


def test_a_count_of_signs() -> None:
    assert check.slow(lambda seconds, patience: count(seconds, patience, upper))


@pytest.mark.parametrize("wrong", [
    lambda seconds, patience: count(seconds, patience, lambda rest: sum(rest) / len(rest)),
    lambda seconds, patience: count(seconds, patience, min),
    lambda seconds, patience: count(seconds, patience, np.median),
    lambda seconds, patience: count(seconds, patience, upper, down=0),
    lambda seconds, patience: count(seconds, patience, upper, floor=-1000),
    lambda seconds, patience: [rank for rank in range(len(seconds[0])) if max(row[rank] for row in seconds) > 5],
    lambda seconds, patience: [],
], ids=["mean", "minimum", "between the middle two", "never down", "no floor", "one pause", "nobody"])
def test_a_count_miscounted(wrong: Any) -> None:
    refused(check.slow(wrong), "patience")


def inside(flights: Any, rank: int) -> bool:
    return any(not done for *_, done in flights[rank])


def behind(flights: Any) -> list[int]:
    reached = {(rank, group): number for rank, entries in flights.items() for group, number, *_ in entries}
    late = {other for rank, entries in flights.items() for group, number, members, done in entries if not done
            for other in members if reached.get((other, group), 0) < number}  # fmt: skip
    return sorted(late)


def missing(flights: Any, late: bool = False) -> list[int]:
    """Those for whom somebody waits, and who wait for nobody; late: who have not reached its number in any group."""
    return sorted({other for entries in flights.values() for _, number, members, done in entries if not done
                   for other in members if not inside(flights, other)
                   and (not late or max((entry[1] for entry in flights[other]), default=0) < number)})  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), [
    (behind, "rank 0 waits for 1, which waits for 3: not [1, 3]; somebody who waits itself"),
    (lambda flights: [rank for rank in flights if inside(flights, rank)], "rank 2 is late: not [0, 1]"),
    (lambda flights: [rank for rank in flights if not inside(flights, rank)],
     "all are through: not [0, 1]; does anybody wait for all of these?"),
    (lambda flights: [], "rank 2 is late: not []"), (missing, "rank 0 is through, and rank 2 is late: not [0, 2]"),
    (lambda flights: missing(flights, late=True), "rank 0 waits for 1, which waits for 3: not []"),
], ids=["all behind", "all inside", "all outside", "nobody", "all that do not wait", "numbers of other groups"])  # fmt: skip
def test_the_wrong_ones_blamed(wrong: Any, words: str) -> None:
    refused(check.to_blame(wrong), words)


def after_its_send(events: Any) -> list[list[int]]:
    """A receive has one more than its send, whatever its own rank has counted; every send of these stands on an earlier rank."""
    numbers: list[list[int]] = []
    sent: dict[int, int] = {}
    for mine in events:
        numbers.append([])
        for kind, *message in mine:
            numbers[-1].append(1 + (sent.get(message[0], 0) if kind == "recv" else max(numbers[-1][-1:], default=0)))
            sent |= {message[0]: numbers[-1][-1]} if kind == "send" else {}
    return numbers


def twice_round(events: Any) -> list[list[int]]:
    """Each rank in turn, and all of them once more: as if no message went on for longer."""
    sent: dict[int, int] = {}
    for _ in range(2):
        numbers: list[list[int]] = []
        for mine in events:
            numbers.append([])
            for kind, *message in mine:
                last = max(numbers[-1][-1:], default=0)
                numbers[-1].append(1 + max(last, sent.get(message[0], 0) if kind == "recv" else 0))
                sent |= {message[0]: numbers[-1][-1]} if kind == "send" else {}
    return numbers


@pytest.mark.parametrize(("wrong", "words"), [
    (twice_round, "receives message"), (twice_round, "rank 0 receives message 3 at "),
    (lambda events: [list(range(len(mine))) for mine in events], "receives message"),
    (after_its_send, "rank 1's own events have the numbers [1, 2, 3, 3, 4]: each must have a larger one"),
    (lambda events: [[1] * len(mine) for mine in events], "each must have a larger one"),
    (lambda events: [[] for _ in events], "one number for each event"),
    (lambda events: [[k + 1000 * r for k in range(len(mine))] for r, mine in enumerate(events, 1)], "larger than all"),
], ids=["twice round", "its words", "own counts", "only after its send", "ones", "none", "large"])  # fmt: skip
def test_clocks_that_are_wrong(wrong: Any, words: str) -> None:
    refused(check.lamport(wrong), words)


def first_wrong(own: Any, came: Any, order: Any, sender: int = -1) -> Any:
    p = len(own)
    for hop in order(range(1, p)):
        for rank in range(p):
            chunk = (rank - hop) % p
            if came[rank][hop - 1] != sum(own[(chunk + k) % p][chunk] for k in range(hop)):
                return (rank + sender) % p, chunk
    return None


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda own, came: first_wrong(own, came, list, sender=0), "where does it arrive wrong first, and who"),
    (lambda own, came: first_wrong(own, came, lambda hops: hops[::-1]), "where does it arrive wrong first, and who"),
    (lambda own, came: own and None, "not None"), (lambda own, came: (0, 0), "not (0, 0)"),
], ids=["the receiver", "the last hop", "nobody", "always"])  # fmt: skip
def test_the_wrong_liar(wrong: Any, words: str) -> None:
    refused(check.liar(wrong), words)


def test_patience() -> None:
    assert check.patience(49, 49 * 5 / 60)
    refused(check.patience(..., ...), "not all is filled in")
    for h, minutes in ((26, 26 / 12), (48, 4.0), (40, 40 / 12)):
        refused(check.patience(h, minutes), "patience")
    refused(check.patience(49, 245), "minutes")
