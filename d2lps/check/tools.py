"""What the checks of several chapters share: a reader's function must be right, its own, and as quick as it should be."""

import functools
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

import torch

from d2lps.check.exercise import Function, Verdict, Wrong
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import Topology

_READY_MADE = "d2lps.collectives", "d2lps.aggregate"


def right(check: Callable[[Function], Verdict], function: Function) -> Verdict:
    """What a check of a collective says against a function is wrong here, too."""
    if not (verdict := check(function)):
        raise Wrong(verdict.text)
    return verdict


def own(function: Function) -> None:
    """Refuse a function that has the library do what was to be written.

    >>> from d2lps.collectives import all_reduce
    >>> own(lambda comm, tensor: all_reduce(comm, tensor))
    Traceback (most recent call last):
    d2lps.check.exercise.Wrong: all_reduce is the library's; write it yourself, from sends and receives
    """
    if found := next(_ready_made(function, set()), ""):
        raise Wrong(f"{found} is the library's; write it yourself, from sends and receives")


def refuse(*found: tuple[object, str]) -> None:
    """Say the words beside the first thing that was found; what stands further down is not looked at.

    >>> refuse((1 > 2, "1 is more than 2"), ([3], "there is a 3"))
    Traceback (most recent call last):
    d2lps.check.exercise.Wrong: there is a 3
    """
    for bad, words in found:
        if bad:
            raise Wrong(words)


def without(function: Function, *names: str) -> None:
    """Refuse a function that mentions one of these names."""
    for name in names:
        if any(name in code.co_names for code in _codes(function)):
            raise Wrong(f"it uses {name}, and the exercise is to do without")


def _ready_made(function: Any, seen: set[int]) -> Iterator[str]:
    """The names of the library's collectives that a function, or one that it calls, mentions."""
    seen.add(id(function))
    for code in _codes(function):
        for name, value in _mentioned(getattr(function, "__globals__", {}), code, function):
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
            if home.startswith(_READY_MADE) or (home == "d2lps" and {"collectives", "aggregate"} & set(code.co_names)):
                yield "d2lps.collectives" if home == "d2lps" else name
            elif callable(value) and id(value) not in seen and not home.startswith(("d2lps.", "torch", "numpy")):
                yield from _ready_made(value, seen)


def _codes(function: Any) -> list[CodeType]:
    """A function's code and that of the functions inside of it."""
    while isinstance(function, functools.partial):
        function = function.func
    codes = [code] if (code := getattr(function, "__code__", None)) else []
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes


def _mentioned(names: dict[str, Any], code: CodeType, function: Any) -> list[tuple[str, Any]]:
    """(name, what it stands for) in a piece of code; of imports in it, the module's name stands for itself."""
    cells = zip(getattr(function, "__code__", code).co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    inside = [(name, cell.cell_contents) for name, cell in cells]
    imported = [(name, ModuleType(name)) for name in code.co_names if name.startswith(_READY_MADE)]
    return inside + imported + [(name, names[name]) for name in code.co_names if name in names]


def played(function: Function, topology: Topology, nbytes: int, *args: Any, **how: Any) -> Run:
    """The run of `function(comm, tensor, *args)` on a described cluster: its time, and its trace."""
    blank = torch.empty(nbytes // 4, device="meta")
    return simulate(function, topology, blank, *args, device="meta", **how)


def number(given: Any, wanted: float, unit: str, hint: str, within: float = 0.01) -> None:
    """An answer that is a number, right to one percent; else the hint."""
    if not isinstance(given, int | float) and not hasattr(given, "__float__"):
        raise Wrong(f"{given!r} is no number; it is asked in {unit}")
    given = float(given)
    for factor, said in ((1e3, "a thousand times too large"), (1e-3, "a thousand times too small")):
        if abs(given - wanted * factor) <= within * abs(wanted * factor):
            raise Wrong(f"{given:g} is {said}: it is asked in {unit}")
    if not abs(given - wanted) <= within * abs(wanted):
        raise Wrong(f"{given:g} {unit} is not it: {hint}")
