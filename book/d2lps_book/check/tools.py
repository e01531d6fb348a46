"""What the checks of several chapters share: a reader's function must be right, its own, and as quick as it should be."""

import functools
import math
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

import numpy as np
import torch

from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import Topology
from d2lps_book.check.exercise import Function, Verdict, Wrong


def right(check: Callable[[Function], Verdict], function: Function) -> Verdict:
    """What a check of a collective says against a function is wrong here, too."""
    if not (verdict := check(function)):
        raise Wrong(verdict.text)
    return verdict


def own(function: Function) -> Function:
    """The function, where no collective of the library works, however it is called.

    >>> from d2lps import collectives
    >>> from d2lps_book import check
    >>> check.all_reduce(own(lambda comm, tensor: getattr(collectives, "all_" + "reduce")(comm, tensor)))
    not yet: with 1 rank and 8 elements, all_reduce is the library's; write it yourself, from sends and receives
    """

    @functools.wraps(function)
    def alone(comm: Any, *args: Any, **options: Any) -> Any:
        split, start = comm.split, comm.start  # what these give is the function's own, too
        vars(comm).update(inside=_refuse, split=lambda *how, **more: _alone(split(*how, **more)),
                          start=lambda fn, *more: start(own(fn), *more))  # fmt: skip
        try:
            return function(comm, *args, **options)
        finally:
            for name in ("inside", "split", "start"):
                vars(comm).pop(name, None)

    return alone


def _refuse(collective: str, apart: bool = False) -> NoReturn:
    raise Wrong(f"{collective} is the library's; write it yourself, from sends and receives")


def _alone(comm: Any) -> Any:
    """A part of a communicator, or None, for good."""
    if comm is not None:
        comm.inside = _refuse
    return comm


def refuse(*found: tuple[object, str]) -> None:
    """Say the words beside the first thing that was found; what stands further down is not looked at.

    >>> refuse((1 > 2, "1 is more than 2"), ([3], "there is a 3"))
    Traceback (most recent call last):
    d2lps_book.check.exercise.Wrong: there is a 3
    """
    for bad, words in found:
        if bad:
            raise Wrong(words)


def in_short(got: Any) -> str:
    """What came back, in few words: a tensor's numbers would fill the page."""
    if isinstance(got, tuple | list):
        return f"({', '.join(map(in_short, got))})"
    return f"a tensor of {list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)


def without(function: Function, *names: str) -> None:
    """Refuse a function that mentions one of these names."""
    for name in names:
        if any(name in code.co_names for code in _codes(function)):
            raise Wrong(f"it uses {name}, and the exercise is to do without")


def _codes(function: Any) -> list[CodeType]:
    """A function's code and that of the functions inside of it."""
    while (inner := getattr(function, "__wrapped__", getattr(function, "func", None))) is not None:
        function = inner
    codes = [code] if (code := getattr(function, "__code__", None)) else []
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes


def played(function: Function, topology: Topology, nbytes: int, *args: Any, **how: Any) -> Run:
    """The run of `function(comm, tensor, *args)` on a described cluster: its time, and its trace."""
    blank = torch.empty(nbytes // 4, device="meta")
    return simulate(function, topology, blank, *args, device="meta", **how)


def number(given: Any, wanted: float, unit: str, hint: str, within: float = 0.01) -> None:
    """An answer that is a number, right to one percent; else the hint."""
    answer = _number(given)
    refuse((math.isnan(answer), f"{given!r} is no number; it is asked in {unit}"),
           (slip := _slip(answer, wanted, within), f"{answer:g} is {slip}: it is asked in {unit}"),
           (not abs(answer - wanted) <= within * abs(wanted), f"{answer:g} {unit} is not it: {hint}"))  # fmt: skip


def near(what: str, given: Any, wanted: float, hint: str, within: float = 0.006) -> None:
    """One answer among several, named by `what`; else the hint.

    >>> near("a message, ms", 2, 2000, "Count them.")
    Traceback (most recent call last):
    d2lps_book.check.exercise.Wrong: a message, ms: not 2, which is a thousand times too small: in which unit is it asked?
    """
    if not abs((answer := _number(given)) - wanted) <= within * abs(wanted):
        said, slip = given.item() if isinstance(given, np.generic) else given, _slip(answer, wanted, within)
        refuse((slip, f"{what}: not {said!r}, which is {slip}: in which unit is it asked?"))
        rounded = math.isfinite(answer) and answer == float(f"{wanted:.2g}") != wanted
        raise Wrong(f"{what}: not {said!r}{', unless you have rounded it: give one digit more' * rounded}. {hint}")


def _slip(answer: float, wanted: float, within: float) -> str:
    """`_slip(3.0, 3000.0, 0.01) == "a thousand times too small"`: an answer in another unit; empty for any other."""
    for factor, times in ((1e3, "a thousand"), (1e6, "a million"), (1e9, "a billion")):
        for other, how in ((wanted * factor, "large"), (wanted / factor, "small")):
            if wanted and abs(answer - other) <= within * abs(other):
                return f"{times} times too {how}"
    return ""


def _number(given: Any) -> float:
    """NumPy's numbers too, and a tensor of one element; NaN for what is none, or several."""
    try:
        return float(given) if hasattr(given, "__float__") and not isinstance(given, bool) else math.nan
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def parts(name: str, given: Any, *wanted: tuple[str, float, str], within: float = 0.006) -> None:
    """An answer of several numbers, each (what it is, its value, a hint).

    >>> parts("a week", (7, 100), ("days", 7, ""), ("hours", 168, "A day has 24."))
    Traceback (most recent call last):
    d2lps_book.check.exercise.Wrong: a week, hours: not 100. A day has 24.
    """
    if not isinstance(given, tuple | list) or len(given) != len(wanted):
        raise Wrong(f"{name}: {len(wanted)} numbers are wanted, ({', '.join(what for what, *_ in wanted)}), not {given!r}")
    if any(got is ... for got in given):
        raise Wrong("not all is filled in")
    for got, (what, right, hint) in zip(given, wanted, strict=True):
        near(f"{name}, {what}", got, right, hint, within)
