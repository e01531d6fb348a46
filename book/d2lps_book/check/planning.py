"""Checks of the exercises of *Planning*."""

import random
from typing import Any

from d2lps_book.check.exercise import Function, answered, judged
from d2lps_book.check.tools import parts, refuse

__all__ = ["amdahl", "bisection", "interval", "power", "survive", "units"]

ROUNDED = 0.025  # who rounds to two digits is right, too


@answered
def interval(answer: Any) -> str:
    """Check two numbers: Young's interval in minutes, and by how much it grows if saving takes a quarter of the time."""
    parts("interval", answer,
          ("minutes", 9.798, "sqrt(2 x 48 s x mtbf), and 8 times the devices fail 8 times as often."),
          ("factor", 0.5, "The time to save stands under a root."))  # fmt: skip
    return "9.8 minutes; with a quarter of the cost one saves twice as often"


@judged
def survive(function: Function) -> str:
    """Check `function(failures, work, interval, save, restart)`: when a job with failures at these times is done."""
    cases = [([], 100.0, 10.0, 1.0, 5.0), ([15.0], 20.0, 10.0, 1.0, 5.0), ([10.5], 20.0, 10.0, 1.0, 5.0),
             ([15.0, 17.0], 20.0, 10.0, 1.0, 5.0), ([500.0], 20.0, 10.0, 1.0, 5.0), ([4.0], 25.0, 10.0, 1.0, 5.0),
             ([11.0], 20.0, 10.0, 1.0, 5.0)]  # fmt: skip
    told = ["without a failure", "one failure in the second interval", "one while it saves: that checkpoint does not count",
            "a second failure while it restarts", "a failure after the end", "a last interval that is shorter",
            "a failure at the very moment at which a checkpoint is done"]  # fmt: skip
    dice = random.Random(7)
    for _ in range(20):
        failures = sorted(dice.uniform(0, 400) for _ in range(dice.randrange(6)))
        work, interval = dice.uniform(50, 200), dice.uniform(5, 30)
        cases.append((failures, work, interval, dice.choice((0.5, 1.0, 2.0)), dice.choice((3.0, 5.0, 8.0))))
    for number, case in enumerate(cases):
        got, right = function(list(case[0]), *case[1:]), _survived(*case)
        what = told[number] if number < len(told) else "failures by chance"
        times = [round(t, 2) for t in case[0]]
        given = "failures={}, work={:.4g}, interval={:.4g}, save={:g}, restart={:g}".format(times, *case[1:])
        refuse((not isinstance(got, int | float), f"{got!r} is no number of seconds"))
        refuse((not abs(got - right) <= 1e-6, f"{what}: {given}: {got:.6g} s, and it is done after {right:.6g} s"))
    return f"{len(cases)} lives, with failures in work, in saving and in restarting"


def _survived(failures: list[float], work: float, interval: float, save: float, restart: float) -> float:
    now = done = 0.0
    left = sorted(failures)
    while done < work:
        step, failed = min(interval, work - done), False
        now += step + save
        while left and left[0] < now:
            now, failed = left.pop(0) + restart, True
        done += 0.0 if failed else step
    return now


@answered
def bisection(answer: Any) -> str:
    """Check three numbers: TB/s of a bisection, the same behind 7 : 1, and seconds of an all-to-all."""
    parts("bisection", answer,
          ("TB/s", 614.4, "Half of the devices send to the other half, each through its port, one way."),
          ("TB/s behind 7 : 1", 87.77, "Out of the pods goes a seventh."),
          ("seconds", 0.245, "Seven eighths of what a pod's 3,072 devices have are for other pods."), within=ROUNDED)  # fmt: skip
    return "614 TB/s, 88 TB/s, and a quarter of a second, where ports that do not share need 0.04"


@answered
def power(answer: Any) -> str:
    """Check three numbers: MW of the machines, MW with the building, and GWh of 54 days."""
    parts("power", answer, ("MW", 20.89, "2,048 machines of 10.2 kW."), ("MW with the building", 22.98, "PUE 1.1 times that."),
          ("GWh", 29.78, "MW times hours is MWh."), within=ROUNDED)  # fmt: skip
    return "21 MW in the machines, 23 MW at the meter, 30 GWh: at most, for machines seldom draw what they may"


@judged
def amdahl(function: Function) -> str:
    """Check `function(n, t)`: from times of a fixed job on n devices, the share of it that does not become faster."""
    for share, one in ((0.0, 1.0), (0.05, 10.0), (0.3, 200.0), (1.0, 3.0), (0.001, 7.0)):
        for counts in ([1, 2], [1, 4, 16], [2, 8, 32, 512]):
            times = [one * (share + (1 - share) / n) for n in counts]
            got, case = function(counts, times), f"n={counts}, t={[round(t, 4) for t in times]}"
            refuse((not isinstance(got, int | float), f"{got!r} is no number"))
            hint = f"T(n) = a + b/n, and the share is a/(a + b), here {share:g}"
            refuse((not abs(got - share) < 1e-4, f"{case}: not {got:.4g}. {hint}"))
    counts, times = [1, 2, 4, 8], [10.0, 6.3, 3.7, 3.4]
    got = function(counts, times)
    refuse((not isinstance(got, int | float), f"{got!r} is no number"))
    hint = f"the one with the least squares, where every time counts alike, has the share 0.216, not {got:.3g}"
    refuse((not abs(got - 0.21596) < 1e-3, f"n={counts}, t={times} lie on no line a + b/n: {hint}"))
    return "from any two counts on; measured times lie on no such line, and then least squares finds the nearest"


@answered
def units(answer: Any) -> str:
    """Check three numbers: TB of the weights, hours over one port, and the factor of the slip."""
    parts("units", answer,
          ("TB", 200.0, "100 trillion numbers of 16 bits, and 8 bits are a byte."),
          ("hours", 4.444, "100 Gb/s are 12.5 GB/s; 200 TB / 12.5 GB/s."),
          ("factor", 64.0, "Multiplied by 8 where one divides by 8."), within=ROUNDED)  # fmt: skip
    return "200 TB, 4.4 hours, and a slip of 64: bits times 8 are no bytes"
