"""Run a reader's function in the simulator, over ranks and sizes, and stop at the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from d2lps.check.verdict import Verdict
from d2lps.comm import RankHung
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import star

RANKS = (1, 2, 3, 4, 5, 8)
SIZES = (8, 7, 1, 0)  # elements: divisible by few, by none, fewer than ranks, none at all
_BANDWIDTH, _LATENCY = 1e9, 0.5e-6  # of each link of the star; two links make a path: 1 microsecond
_TIMED = 100_000  # elements of the run whose time is shown
_SMALL, _SMALLER = 1_000, 100  # the same where a tensor is cut into pieces of a fixed size: there would be too many

Prepare = Callable[[int, int, int], tuple[Any, ...]]
Judge = Callable[[int, int, int, tuple[Any, ...], Run], str]


@dataclass
class Exercise:
    """
    name: of the function that the reader writes. prepare(rank, ranks, size): the arguments after comm.
    judge(rank, ranks, size, arguments as they were left, run): what is wrong, "" if nothing.
    least_bytes(ranks, nbytes): what some rank must send, whatever the algorithm.
    """

    name: str
    prepare: Prepare
    judge: Judge
    least_bytes: Callable[[int, int], float]

    def check(self, function: Callable[..., Any], ranks: tuple[int, ...] = RANKS, sizes: tuple[int, ...] = SIZES) -> Verdict:
        if not callable(function):
            raise TypeError(f"check.{self.name} needs your function, not {function!r}")
        for p in ranks:
            for size in sizes:
                trouble = self._trouble(function, p, size)
                if trouble:
                    return Verdict(False, f"with {p} rank{'s' if p > 1 else ''} and {size} elements, {trouble}")
        cases = f"{len(ranks) * len(sizes)} cases, {min(ranks)} to {max(ranks)} ranks"
        return Verdict(True, self._praise(function, max(ranks), cases))

    def _run(self, function: Callable[..., Any], p: int, size: int) -> Run:
        prepare = self.prepare

        def work(comm: Any) -> Any:
            arguments = prepare(comm.rank, comm.size, size)
            function(comm, *arguments)
            return arguments

        return simulate(work, star(p, _BANDWIDTH, _LATENCY))

    def _trouble(self, function: Callable[..., Any], p: int, size: int) -> str:
        """The first thing wrong in one case; what a rank raised, or a deadlock, first of all."""
        try:
            run = self._run(function, p, size)
        except RankHung as error:
            return str(error)
        except Exception as error:
            note = next(iter(getattr(error, "__notes__", [])), "")
            return f"{type(error).__name__}: {error}" + (f" ({note})" if note else "")
        for rank, arguments in enumerate(run):
            if problem := self.judge(rank, p, size, arguments, run):
                return problem
        if run.trace.unmatched:
            return f"{run.trace.unmatched} messages were sent and never received, or awaited and never sent"
        return ""

    def _praise(self, function: Callable[..., Any], p: int, cases: str) -> str:
        few, run = (self._run(function, p, size) for size in (_SMALLER, _SMALL))
        size = _SMALL
        if len(run.trace) < 5 * len(few.trace):  # messages grow in length rather than in number
            size, run = _TIMED, self._run(function, p, _TIMED)
        trace, nbytes = run.trace, size * torch.int64.itemsize
        sent, least = int(trace.bytes_sent().max(initial=0)), self.least_bytes(p, nbytes)
        return (
            f"{cases}. With {p} ranks and tensors of n = {nbytes / 1e6:g} MB: {trace.rounds} steps, the busiest rank sends "
            f"{sent / nbytes:.2f} n (no algorithm gets below {least / nbytes:.2f} n), {run.time * 1e3:.3f} ms at 1 GB/s"
        )
