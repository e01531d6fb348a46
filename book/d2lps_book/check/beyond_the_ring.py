"""Checks of the exercises of *Beyond the ring*."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from d2lps.collectives import all_reduce as ready_made
from d2lps.result import Run
from d2lps.topology import hgx_h100, multi_node, spine_leaf, star
from d2lps_book.check.exercise import RANKS, Function, among, answered, judged
from d2lps_book.check.exercises import all_gather, all_reduce, contest
from d2lps_book.check.tools import number, own, played, refuse, right

__all__ = ["all_gather", "all_reduce", "bruck", "by_hand", "contest", "five_times", "groups", "recursive_doubling", "tree_merge"]

_N = 8_000  # bytes
_FAST = 10e-3  # seconds, which the groups are to beat


@answered
def by_hand(ring: float, tree: float, recursive_doubling: float, halving_doubling: float, equal: float) -> str:
    """Check the answers: microseconds of four all-reduces of 1 MB among 16 ranks, and kB at which the last two are equal."""
    number(ring, 450, "µs", "how many steps has a ring of 16, and how long is a chunk?")
    number(tree, 720, "µs", "a tree goes up and down, and passes the whole tensor in each of its steps")
    number(recursive_doubling, 360, "µs", "recursive doubling does in L steps what the tree does up and down")
    number(halving_doubling, 230, "µs", "it has the tree's steps and the ring's bytes")
    number(equal, 40 / 2.125 * 12.5, "kB", "for which n are 4 alpha + 4 n beta and the time of halving-doubling the same?", 0.02)
    return "few steps below 235 kB, few bytes above"


@judged
def recursive_doubling(function: Function) -> str:
    """Check `function(comm, tensor)`: whole tensors are swapped with partners 1, 2, 4, ... away, for every number of ranks."""
    function = own(function)
    right(all_reduce, function)
    for p in RANKS:
        trace, floor = played(function, star(p, 1e9, 1e-6), _N).trace, p.bit_length() - 1
        core, sent = 2**floor, trace.bytes_sent().max(initial=0) / _N
        steps, most = (floor, floor) if p == core else (floor + 2, floor + 1)
        total, enough = len(trace), floor * core + 2 * (p - core)
        parts = [int(n) for n in trace.messages["nbytes"] if n != _N][:1]
        case = f"with {p} ranks"
        refuse(
            (trace.rounds > steps, f"{case} it takes {trace.rounds} steps; {steps} are enough, if all you have is exchanged"),
            (parts, f"{case}, a message has {parts} bytes: in each step the whole tensor is exchanged, {_N:,}"),
            (sent > most, f"{case}, one sends {sent:g} tensors: one a step, {most}, are enough"),
            (total > enough, f"{case}, {total} tensors are sent: {enough} do, if those beyond {core} only hand theirs in"),
        )
    return "log2 p steps where p is a power of two, and two more elsewhere"


@judged
def bruck(function: Function) -> str:
    """Check `function(comm, tensor_list, tensor)`: Bruck's all-gather, in ceil(log2 p) steps for every p."""
    function = own(function)
    right(all_gather, function)
    for p in RANKS:

        def work(comm: Any) -> None:
            part = torch.empty(100, device="meta")
            function(comm, [torch.empty_like(part) for _ in range(comm.size)], part)

        trace, steps = among(p, work, device="meta").trace, (p - 1).bit_length()
        most, sent = np.bincount(trace.messages["src"], minlength=p).max(), trace.bytes_sent().max(initial=0) / 400
        refuse(
            (max(trace.rounds, most) > steps, f"with {p} ranks it takes {trace.rounds} steps, and a rank sends {most} messages; "
             f"{steps} are enough: what a rank has can double with each message"),
            (sent > p - 1, f"with {p} ranks, one sends {sent:g} parts, and {p - 1} are missing at another"),
        )  # fmt: skip
    return "ceil(log2 p) messages from each rank, and no part twice"


@judged
def tree_merge(function: Function) -> str:
    """Check `function(comm, triple)`: a binomial tree merges the (count, mean, M) of all ranks into that of rank 0."""
    for p in RANKS:
        run = _merged(function, p)
        data = np.concatenate([_numbers(rank) for rank in range(p)])
        wanted = [float(len(data)), float(data.mean()), float(((data - data.mean()) ** 2).sum())]
        hints = {"count": "; it is as it was before: write the merge into `triple`" if p > 1 and run[0][0] == 1 else "",
                 "M": "; is its last term there, made of the counts and means from before the merge?"}  # fmt: skip
        for name, got, value in zip(("count", "mean", "M"), run[0], wanted, strict=True):
            said = f"with {p} ranks, the {name} on rank 0 is {got:.6g}, and that of all the numbers is {value:.6g}"
            refuse((not np.isclose(got, value, rtol=1e-9), said + hints.get(name, "")))
        trace, steps, case = run.trace, (p - 1).bit_length(), f"with {p} ranks"
        into = np.bincount(trace.messages["dst"], minlength=p)
        refuse(
            (len(trace) > p - 1, f"{case} there are {len(trace)} messages: each rank but 0 hands its triple up, once"),
            (into.max() > steps, f"{case}, rank {into.argmax()} receives from {into.max()} others: that is a star. In a binomial "
             f"tree it receives from at most {steps}; let others merge what they hear before they pass it on"),
            (trace.rounds > steps, f"{case} it takes {trace.rounds} steps one after another, and a binomial tree {steps}"),
            (trace.bytes_sent().sum() > 24 * (p - 1), f"{case}, more than a triple is sent at a time"),
        )  # fmt: skip
    return "the numbers of all ranks, seen by none, in ceil(log2 p) steps"


def _numbers(rank: int) -> np.ndarray:
    """As many on each rank as its number says, far from 0."""
    return 1000.0 + np.arange(rank + 1.0) + rank**2


def _merged(function: Function, p: int) -> Run:
    def work(comm: Any) -> list[float]:
        x = torch.tensor(_numbers(comm.rank))
        triple = torch.stack([torch.tensor(float(len(x)), dtype=torch.float64), x.mean(), ((x - x.mean()) ** 2).sum()])
        function(comm, triple)
        return triple.tolist()

    return among(p, work)


@answered
def groups(chosen: Sequence[Sequence[int]]) -> str:
    """Check the answer: groups of the 16 ranks of the chapter's racks, by which 160 MB take less than 10 ms."""
    nested = all(hasattr(each, "__iter__") for each in (chosen, *(chosen if hasattr(chosen, "__iter__") else ())))
    refuse((not nested, f"{chosen!r} is no list of groups: each group is a list of ranks, as in [[0, 1], [2, 3]]"))
    ranks = sorted(rank for group in chosen for rank in group)
    refuse((ranks != list(range(16)), "the groups should hold each rank from 0 to 15 once"))
    racks = spine_leaf(4, 4, spines=2, oversubscription=4)

    def job(comm: Any, tensor: torch.Tensor) -> None:
        ready_made(comm, tensor, algorithm="hierarchical", groups=[list(map(int, group)) for group in chosen])

    seconds = played(job, racks, 160_000_000, trace=False).time
    said = f"160 MB take {seconds * 1e3:.2f} ms"
    refuse((seconds >= _FAST, f"{said} with these groups: which links do the large messages inside a group take?"))
    return said


@judged
def five_times(function: Function) -> str:
    """Check `function(comm, tensor)`: an all-reduce of 160 MB that is five times as fast as the ring on four machines of H100."""
    function = own(function)
    cluster = multi_node(hgx_h100(), 4)
    verdict = right(partial(contest, topology=cluster), function)
    mine, ring = (played(f, cluster, 160_000_000, trace=False).time for f in (function, ready_made))
    refuse((ring < 5 * mine, f"{verdict.text}; how many bytes does each rank send out of its machine?"))
    return verdict.text
