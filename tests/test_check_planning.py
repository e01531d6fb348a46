"""The checks of *Planning*: solutions pass, wrong answers are refused in words."""

from functools import partial

import pytest
from solutions import refused, solution

from d2lps_book.check import planning as check

SOLUTIONS = {"survive": "ex-planning-survive", "amdahl": "ex-planning-amdahl"}
ANSWERS = {name: f"ex-planning-{name}" for name in ("interval", "bisection", "power", "units")}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solution_passes(name):
    verdict = getattr(check, name)(solution(SOLUTIONS[name])[name])
    assert verdict, verdict


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_passes(name):
    assert getattr(check, name)(solution(ANSWERS[name])["answer"])


@pytest.mark.parametrize(("name", "answer"), [("bisection", (614, 88, 0.25)), ("power", (21, 23, 30)), ("units", (200, 4.4, 64))])
def test_rounded_answers_pass(name, answer):
    assert getattr(check, name)(answer)


@pytest.mark.parametrize(
    ("name", "answer", "word"),
    [("interval", (27.7, 0.5), "8 times as often"), ("interval", (9.8, 0.25), "under a root"), ("interval", 9.8, "2 numbers"),
     ("bisection", (1228.8, 175.5, 0.245), "Half of the devices"), ("bisection", (614.4, 614.4, 0.245), "a seventh"),
     ("bisection", (614.4, 87.77, 0.28), "Seven eighths"), ("power", (167.1, 184, 238), "2,048 machines"),
     ("power", (20.89, 32.8, 42.5), "PUE 1.1"), ("power", (20.89, 22.98, 1.24), "MWh"),
     ("units", (1600, 4.44, 64), "8 bits are a byte"), ("units", (200, 0.556, 64), "12.5 GB/s"),
     ("units", (200, 4.44, 8), "divides"), ("units", ..., "nothing is filled in")],
)  # fmt: skip
def test_numbers_are_refused(name, answer, word):
    refused(getattr(check, name)(answer), word)


def lived(failures, work, interval, save, restart, again=True, whole=False, saving=True, late=True, sharp=False):
    failures, now, done = sorted(failures), 0.0, 0.0
    while done < work:
        step = interval if whole else min(interval, work - done)
        end = now + step + (save if saving else 0.0)
        if failures and (failures[0] < end or (sharp and failures[0] == end)) and late:
            now = failures.pop(0) + restart
            while failures and failures[0] < now:
                failure = failures.pop(0)
                now = failure + restart if again else now
            continue
        now, done = now + step + save, done + step
    return now


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(partial(lived, again=False), "while it restarts"), (partial(lived, whole=True), "is shorter"),
     (partial(lived, saving=False), "does not count"),
     (partial(lived, sharp=True), "at the very moment"), (partial(lived, late=False), "one failure in the second interval"),
     (lambda *given: lived(*given[:4], 5.0), "by chance"), (lambda *given: lived(*given[:3], 1.0, given[4]), "by chance"),
     (lambda *given: "soon", "no number of seconds"), (lambda *given: float("nan"), "without a failure"),
     (lambda failures, work, interval, save, restart: work, "without a failure")],
)  # fmt: skip
def test_survive_refuses(wrong, word):
    assert check.survive(lived)
    refused(check.survive(wrong), word)


def share(n, t, last=False):
    a = (t[-1] - t[0] * n[0] / n[-1]) / (1 - n[0] / n[-1])
    return t[-1] / t[0] if last else a / (a + n[0] * (t[0] - a))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(share, "least squares, where every time counts alike, has the share 0.216, not "),
     (partial(share, last=True), "T(n) = a + b/n"), (lambda n, t: 1 - share(n, t), "T(n) = a + b/n"),
     (lambda n, t: (t[-1] - t[0] / n[-1]) / (1 - 1 / n[-1]) / t[0], "T(n) = a + b/n"), (lambda n, t: "0.2", "is no number")],
)  # fmt: skip
def test_amdahl_refuses(wrong, word):
    refused(check.amdahl(wrong), word)
