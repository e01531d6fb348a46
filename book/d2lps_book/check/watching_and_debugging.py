"""Checks of the chapter *Watching and debugging*: who is slow, who hangs, whose numbers are wrong, and what came first."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from d2lps.collectives import all_reduce
from d2lps.simulator import Narrow, Slow, simulate
from d2lps.topology import Device, star
from d2lps.watch.stragglers import GOLDEN, Suspicion
from d2lps_book.check.exercise import Function, answered, judged
from d2lps_book.check.tools import parts, refuse, without

_CLUSTER = star(5, 1e9, 1e-6, device=Device(flops=1e9, memory=1e9, memory_bandwidth=1e12))


def _job(comm: Any) -> None:
    """Ten steps; rank 0 adds up by itself what the others send, so that it hardly waits."""
    for _ in range(10):
        luck = 1 + 0.1 * torch.rand((), generator=comm.generator).item()
        with comm.compute("step", flops=1e6 * luck):
            pass
        all_reduce(comm, torch.empty(50_000, device=comm.device), algorithm="flat")


@judged
def culprit(function: Function) -> str:
    """Check `culprit(trace)`: the rank whose computing takes longer than 1.3 times the others' median, or None."""
    without(function, "stragglers")
    cases: list[tuple[str, list[Any], int | None]] = [
        ("nobody is slow", [], None),
        ("rank 3 computes 1.35 times as long", [Slow("gpu3", 1.35)], 3),
        ("rank 1 computes 1.2 times as long", [Slow("gpu1", 1.2)], None),
        ("all but rank 1 compute twice as long", [Slow(f"gpu{rank}", 2) for rank in (0, 2, 3, 4)], None),
        ("rank 0 computes three times as long", [Slow("gpu0", 3)], 0),
        ("ranks 2 and 4 compute 1.5 times as long, rank 3 1.8 times",
         [Slow("gpu2", 1.5), Slow("gpu3", 1.8), Slow("gpu4", 1.5)], 3),
        ("only the cable of rank 2 is slow", [Narrow(("gpu2", "switch"), 8)], None),
        ("rank 4 computes twice as long, and rank 1's cable is slow", [Slow("gpu4", 2), Narrow(("gpu1", "switch"), 8)], 4),
        ("rank 1 computes 1.2 times as long, rank 0 hardly at all", [Slow("gpu1", 1.2), Slow("gpu0", 0.01)], None),
    ]
    for told, faults, right in cases:
        said = function(simulate(_job, _CLUSTER, faults=faults, device="meta").trace)
        hint = ("compare what each rank computes with the median of the *others*" if said is None else
                "how a rank waits tells nothing of it: how much does it compute, beside the median of the others?")  # fmt: skip
        refuse((said != right, f"{told}: not {said!r}; {hint}"))
    return f"{len(cases)} jobs, of ranks and cables"


@judged
def slow(function: Function) -> str:
    """Check `slow(seconds, patience)`: the ranks whose count reaches patience, sorted; seconds[step][rank]."""
    without(function, "Suspicion")
    dice = np.random.default_rng(0)
    for case in range(60):
        ranks, steps, patience = int(dice.integers(2, 9)), 60, int(dice.integers(4, 20))
        table = dice.lognormal(0, (0.02, 0.3)[case % 2], (steps, ranks))
        table[int(dice.integers(steps)) :, int(dice.integers(ranks))] *= (1, 1.3, 10)[case % 3]
        table[int(dice.integers(steps)), :] *= dice.choice([1, 100], ranks)  # a pause
        suspicion = Suspicion(ranks, patience=patience)
        right = sorted({column for row in table for column, *_ in suspicion.look(row)})
        said = [int(rank) for rank in function(table.tolist(), patience)]
        missing, more = sorted({*right} - {*said}), sorted({*said} - {*right})
        told = f"{ranks} ranks, {steps} steps, patience {patience}:"
        refuse((more, f"{told} rank {more[:1]} is named, and its count never got there. One pause must not name anybody"),
               (missing, f"{told} rank {missing[:1]} is not named. With whom is it compared? Does the count begin again at 0?"),
               (said != right, f"{told} {said} is not sorted, or names one twice"))  # fmt: skip
    said = [int(rank) for rank in function([[1.0, 1.3, 1.35]] * 20, 5)]  # the mean of the middle two is another median
    refuse((said, f"3 ranks take 1, 1.3 and 1.35 s in each step, patience 5: not {said}; of two others the larger counts"))
    return "60 tables, with pauses of a hundred times"


Noted = dict[int, list[tuple[str, int, list[int], bool]]]
_HANGS: list[tuple[str, Noted, list[int]]] = [
    ("rank 2 is late", {r: [("all", 4, [0, 1, 2], True)] + [("all", 5, [0, 1, 2], False)] * (r != 2) for r in range(3)}, [2]),
    ("all are through", {r: [("all", 4, [0, 1], True)] for r in range(2)}, []),
    ("rank 1 has entered nothing", {0: [("all", 1, [0, 1], False)], 1: []}, [1]),
    ("rank 0 waits for 1, which waits for 3",
     {0: [("a", 7, [0, 1], False)], 1: [("a", 6, [0, 1], True), ("b", 3, [1, 3], False)],
      2: [("c", 9, [2], True)], 3: [("b", 2, [1, 3], True), ("d", 8, [3], True)]}, [3]),
    ("all are inside", {r: [("all", 5, [0, 1, 2], False)] for r in range(3)}, []),
    ("two are late", {r: [("all", 3, [0, 1, 2, 3], r % 2 == 0)] + [("all", 4, [0, 1, 2, 3], False)] * (r % 2) for r in range(4)},
     [0, 2]),
    ("rank 0 is through, and rank 2 is late", {r: [("all", 5 - r // 2, [0, 1, 2], r != 1)] for r in range(3)}, [2]),
]  # fmt: skip


@judged
def to_blame(function: Function) -> str:
    """Check `to_blame(flights)`: {rank: [(group, number, members, done), ...]} -> the ranks to look at, sorted."""
    without(function, "absent")
    for told, noted, right in _HANGS:
        said = [int(rank) for rank in function(noted)]
        more, waiting = {*said} - {*right}, {rank for rank, entries in noted.items() if not all(done for *_, done in entries)}
        hint = ("somebody who waits itself is not to blame" if more & waiting else "does anybody wait for all of these?" if more
                else "who has not entered what others are in?")  # fmt: skip
        refuse((said != right, f"{told}: not {said}; {hint}"))
    return f"{len(_HANGS)} hangs, one in a chain"


@judged
def lamport(function: Function) -> str:
    """Check `lamport(events)`: of each rank's ("line",), ("send", k), ("recv", k), a number: causes have smaller ones."""
    cases: list[list[list[tuple[Any, ...]]]] = [
        [[("line",), ("send", 0)], [("line",), ("line",), ("line",), ("recv", 0), ("line",)]],
        [[("recv", 1), ("line",), ("send", 2)], [("line",), ("line",), ("send", 1)], [("recv", 2), ("line",)]],
        [[("recv", 3)], [("recv", 2), ("send", 3)], [("recv", 1), ("send", 2)], [("recv", 0), ("send", 1)], [("send", 0)]],
        [[("send", 0), ("recv", 3)], [("recv", 0), ("send", 1)], [("recv", 1), ("send", 2)], [("recv", 2), ("send", 3)]],
    ]
    for events in cases:
        said = function([list(mine) for mine in events])
        unlike = [len(of) for of in said] != [len(of) for of in events]
        refuse((unlike, f"{events}: one number for each event is wanted, not {said}"))
        sent = {event[1]: n for mine, of in zip(events, said, strict=True) for event, n in zip(mine, of, strict=True)
                if event[0] == "send"}  # fmt: skip
        for rank, (mine, numbers) in enumerate(zip(events, said, strict=True)):
            falls = any(after <= before for before, after in pairwise(numbers))
            refuse((falls, f"rank {rank}'s own events have the numbers {numbers}: each must have a larger one than the last"))
            for event, n in zip(mine, numbers, strict=True):
                early = event[0] == "recv" and n <= sent[event[1]]
                refuse((early, f"rank {rank} receives message {event[-1]} at {n}, and it was sent at {sent.get(event[-1])}"))
            refuse((max(numbers) > sum(map(len, events)), f"rank {rank} has {max(numbers)}: larger than all events together"))
    return f"{len(cases)} runs, one with a ring of messages"


@judged
def liar(function: Function) -> str:
    """Check `liar(own, came)`: (rank that added wrongly, chunk); own[rank][chunk], came[rank][hop - 1], or None."""
    dice = np.random.default_rng(0)
    for p, wrong in [(ranks, wrong) for ranks in (3, 5, 8) for wrong in (None, *range(ranks))]:
        own = dice.integers(-99, 99, (p, p))
        came = [[int(own[[(r - h + k) % p for k in range(h)], (r - h) % p].sum()) for h in range(1, p)] for r in range(p)]
        right = None
        if wrong is not None:
            hop = int(dice.integers(2, p))
            right = wrong, (wrong + 1 - hop) % p
            for h in range(hop, p):
                came[(right[1] + h) % p][h - 1] += 1000
        said = function(own.tolist(), came)
        said = said if said is None else tuple(int(n) for n in said)
        late = said and right and said[1] == right[1]
        hint = ("the chunk is right; where does it arrive wrong first, and who has made what arrives there?" if late else
                "in hop h, chunk r - h comes to rank r, of h ranks")  # fmt: skip
        refuse((said != right, f"{p} ranks: not {said}: {hint}"))
    return "3 to 8 ranks, each of them once"


@answered
def patience(h: Any, minutes: Any) -> str:
    """Check the answers: the patience for one false alarm in 54 days of 16,384 GPUs, and the minutes until one is named."""
    steps = 54 * 86400 / 5
    right = math.ceil(math.log(16384 * steps) / math.log(GOLDEN))
    parts("54 days", (h, minutes), ("patience", right, "p T g**-h is to be at most 1: take logarithms. T is in steps."),
          ("minutes", right * 5 / 60, "A slow rank's count goes up by one each step."), within=0.015)  # fmt: skip
    return f"a patience of {right}, for {16384 * steps:.2g} numbers"
