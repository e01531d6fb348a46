"""Run a reader's function in the simulator, over ranks and sizes, and stop at the first thing that is wrong."""

import dis
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from d2lps.comm import RankHung
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import star
from d2lps.trace import Trace
from d2lps_book.check.diagnose import Left, wrong

RANKS = (1, 2, 3, 4, 5, 8)
SIZES = (8, 7, 1, 0)  # elements: divisible by few, by none, fewer than ranks, none at all
_TIMED = 100_000  # elements of the run whose time is shown
_SMALL, _SMALLER = 1_000, 100  # the same where a tensor is cut into pieces of a fixed size: there would be too many


Function = Callable[..., Any]  # a reader's, to be checked


class Verdict(NamedTuple):
    """True if the function passed; its text, shown as the result of a cell, says how well, or what is wrong and where."""

    passed: bool
    text: str
    seconds: float = math.nan  # of a contest: how long it took,
    factor: float = math.nan  # and how many times as fast as the ring that was

    def __bool__(self) -> bool:
        return self.passed

    @property
    def score(self) -> float:
        """The share of an exercise's points: 1.0 or 0.0."""
        return float(self.passed)

    def __repr__(self) -> str:
        return f"{'passed' if self.passed else 'not yet'}: {self.text}"


def plural(count: float, what: str) -> str:
    """`plural(1, "rank"), plural(2, "rank") == ("1 rank", "2 ranks")`"""
    return f"{count:g} {what}{'s' * (count != 1)}"


class Wrong(Exception):
    """What a check has found, in words; `judged` makes a Verdict of it."""


def judged(check: Callable[..., str]) -> Callable[..., Verdict]:
    """Make a check of a reader's function: it raises `Wrong`, or says how well the function did.

    >>> @judged
    ... def double(function):
    ...     "Check `function(x)`: twice x."
    ...     if (got := function(3)) != 6:
    ...         raise Wrong(f"double(3) gives {got!r}, and 3 + 3 is 6")
    ...     return "it doubles"
    >>> double(lambda x: x + x), double(lambda x: x ** 2)
    (passed: it doubles, not yet: double(3) gives 9, and 3 + 3 is 6)

    What the reader's function raises is said as well; a function that holds nothing but `...` is not run.
    """

    @functools.wraps(check)
    def verdict(function: Function, *args: Any, **kwargs: Any) -> Verdict:
        if not callable(function):
            raise TypeError(f"check.{check.__name__} needs your function, not {function!r}")
        if unwritten(function):
            return Verdict(False, f"{function.__name__} is still empty")
        return _verdict(check, function, *args, **kwargs)

    return verdict


def answered(check: Callable[..., str]) -> Callable[..., Verdict]:
    """Make a check of a reader's answers, numbers or words, likewise; `...` stands for what is not answered yet.

    >>> @answered
    ... def half(answer):
    ...     "Check the answer: what is half of 12?"
    ...     if answer != 6:
    ...         raise Wrong(f"twice {answer!r} is {2 * answer}, not 12")
    ...     return "twice 6 is 12"
    >>> half(...), half(5), half(6)
    (not yet: nothing is filled in, not yet: twice 5 is 10, not 12, passed: twice 6 is 12)
    """

    @functools.wraps(check)
    def verdict(*answers: Any, **named: Any) -> Verdict:
        if any(answer is ... for answer in (*answers, *named.values())):
            return Verdict(False, "nothing is filled in" if len(answers) + len(named) == 1 else "not all is filled in")
        return _verdict(check, *answers, **named)

    return verdict


def _verdict(check: Callable[..., str], *args: Any, **kwargs: Any) -> Verdict:
    try:
        return Verdict(True, check(*args, **kwargs))
    except Wrong as wrong:
        return Verdict(False, str(wrong))
    except Exception as error:
        return Verdict(False, raised(error))


def unwritten(function: Function) -> bool:
    """Whether a function, or a class, is an exercise's stub: `...`, a docstring or nothing.

    >>> def stub(comm): ...
    >>> unwritten(stub), unwritten(lambda comm: None), unwritten(print)
    (True, True, False)
    """
    if isinstance(function, type):
        return not any(callable(value) for value in vars(function).values())
    code = getattr(function, "__code__", None)
    steps = [] if code is None else [step for step in dis.get_instructions(code) if step.opname != "RESUME"]
    nothing = {"LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
    return bool(steps) and all(step.opname in nothing and step.argval is None for step in steps)


def raised(error: Exception) -> str:
    """What a reader's function raised, or a deadlock among its ranks, in words."""
    if isinstance(error, RankHung | Wrong):
        return str(error)
    return f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", [])[:1])


def among(p: int, work: Function, *args: Any, **how: Any) -> Run:
    """`work(comm, *args)` on so many ranks around a switch; links of 1 GB/s, of which two make a way of a microsecond."""
    return simulate(work, star(p, 1e9, 0.5e-6), *args, **how)


Case = tuple[list[Any], list[Left]]  # what one rank gets, after comm, and the tensors of it to look at afterwards
Cases = Callable[[int, int, int], Case]  # the case of (rank, ranks, size)


def exercise(least: float) -> Callable[[Cases], Callable[[Function], Verdict]]:
    """Make a check of readers' functions from an exercise's cases; it has their name and docstring.

    least: how often some of 8 ranks must send the whole tensor, whatever the algorithm.
    """

    def make(case: Cases) -> Callable[[Function], Verdict]:
        def check(function: Function) -> str:
            for p in RANKS:
                for size in SIZES:
                    if trouble := _trouble(case, function, p, size):
                        raise Wrong(f"with {plural(p, 'rank')} and {plural(size, 'element')}, {trouble}")
            return _praise(case, function, least)

        check.__name__, check.__qualname__, check.__doc__ = case.__name__, case.__name__, case.__doc__
        return judged(check)

    return make


def _run(case: Cases, function: Function, p: int, size: int) -> Run:
    """Each rank's result is what it has left."""

    def work(comm: Any) -> list[Left]:
        arguments, left = case(comm.rank, comm.size, size)
        function(comm, *arguments)
        return left

    return among(p, work)


def _trouble(case: Cases, function: Function, p: int, size: int) -> str:
    """The first thing wrong in one run; what a rank raised, or a deadlock, first of all."""
    try:
        run = _run(case, function, p, size)
    except Exception as error:
        return raised(error)
    for rank, tensors in enumerate(run):
        for left in tensors:
            if said := wrong(rank, left, p, run.trace):
                return said
    if run.trace.unmatched:
        return f"{run.trace.unmatched} messages were sent and never received, or awaited and never sent"
    return unfinished(run.trace)


def unfinished(trace: Trace) -> str:
    """Which sends nobody has waited for, in words."""
    late = trace.messages["src"][trace.messages["src_done_seq"] < 0].tolist()
    which = f"{plural(len(late), 'send')} nobody waits for, of ranks {sorted(set(late))}"
    return f"{which}: who then changes the tensor may change what is still on its way" if late else ""


def _praise(case: Cases, function: Function, least: float) -> str:
    p = max(RANKS)
    few, run = (_run(case, function, p, size) for size in (_SMALLER, _SMALL))
    size = _SMALL
    if len(run.trace) < 5 * len(few.trace):  # messages grow in length rather than in number
        size, run = _TIMED, _run(case, function, p, _TIMED)
    nbytes = size * torch.int64.itemsize
    sent = int(run.trace.bytes_sent().max(initial=0))
    return (
        f"{len(RANKS) * len(SIZES)} cases, {min(RANKS)} to {p} ranks. With {p} ranks and tensors of "
        f"n = {nbytes / 1e6:g} MB: {run.trace.rounds} steps, the busiest rank sends {sent / nbytes:.2f} n "
        f"(no algorithm gets below {least:.2f} n), {run.time * 1e3:.3f} ms at 1 GB/s"
    )
