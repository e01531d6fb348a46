"""Checks of the exercises of *Pipeline parallelism*."""

import math
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch

from d2lps.parallel.pipeline.balance import cut
from d2lps.parallel.pipeline.schedules import Action, Schedule, gpipe, one_f_one_b, picture, replay
from d2lps.simulator import simulate
from d2lps.topology import star
from d2lps_book.check.exercise import Function, Wrong, answered, judged, plural
from d2lps_book.check.tools import parts, refuse, without

CASES = ((1, 1), (1, 3), (2, 4), (4, 8), (3, 7), (4, 2), (8, 3), (5, 5))
ODD = [[("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)], [("F", 0), ("F", 1), ("B", 0), ("B", 1), ("F", 2), ("B", 2)]]
TURNED = [[("F", 1), ("F", 0), ("B", 1), ("B", 0)]] * 2  # ends, though the micro-batches are not in their order
STUCK = [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 1), ("F", 0), ("B", 0), ("B", 1)]]
EARLY = [[("F", 0), ("B", 0)], [("B", 0), ("F", 0)]]  # the last stage goes backward before it has gone forward
SORTED = [STUCK[0], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]]  # never ends, though they are
MANY = [k * 7 % 11 + 1 for k in range(40)]


def _schedule(rows: Any) -> Schedule:
    return [[Action(kind, rank, k) for kind, k in row] for rank, row in enumerate(rows)]


def _pairs(schedule: Schedule) -> list[list[tuple[str, int]]]:
    return [[(action.kind, action.micro_batch) for action in row] for row in schedule]


@judged
def one_each(function: Function) -> str:
    """Check `one_each(ranks, micro_batches)`: 1F1B as lists of pairs, by rank."""
    without(function, "one_f_one_b", "gpipe", "interleaved", "zero_bubble", "arranged")
    for p, m in CASES:
        case, rows = f"{plural(p, 'rank')}, {m} micro-batch{'es' * (m > 1)}: ", function(p, m)
        refuse(
            (not isinstance(rows, list | tuple) or len(rows) != p, f"{case}a list for each of {p} ranks is wanted, not {rows!r}")
        )
        for rank, (row, wanted) in enumerate(zip(rows, _pairs(one_f_one_b(p, m)), strict=True)):
            if (got := [tuple(pair) for pair in row]) != wanted:
                raise Wrong(f"{case}rank {rank} {_astray(got, wanted)}")
    return "1F1B at 8 sizes, also with fewer micro-batches than ranks\n" + picture(_schedule(function(4, 6)))


def _astray(got: list[Any], wanted: list[Any]) -> str:
    """What is wrong with a rank's list."""
    if sorted(map(repr, got)) != sorted(map(repr, wanted)):
        return f"does {got}: is each micro-batch taken forward and backward, once, and what if there are few of them?"
    ahead, first = ([kind for kind, _ in row].index("B") for row in (got, wanted))
    place = next(k for k, pair in enumerate(got) if pair != wanted[k])
    if ahead != first:
        return f"goes forward {ahead} times before it first goes backward; how many stages are behind it?"
    return f"begins well; then it does {got[place]} after {got[place - 1]}: whose turn is it?"


@judged
def finish(function: Function) -> str:
    """Check `finish(schedule, forward, backward)`: when the last action ends, or None."""
    without(function, "replay", "picture")
    for rows in (ODD, TURNED, *(_pairs(schedule(p, m)) for p, m in CASES for schedule in (gpipe, one_f_one_b))):
        for costs in ((1.0,), (2.0,)), ((1.0, 2.5, 0.75), (3.0, 0.5, 1.75, 1.25)):
            forward, backward = ([some[rank % len(some)] for rank in range(len(rows))] for some in costs)
            told, got = replay(_schedule(rows), forward, backward).time, function([[*row] for row in rows], forward, backward)
            case = f"{len(rows)} ranks, {rows if rows in (ODD, TURNED) else ''}, {forward}, {backward}: "
            refuse((got is None, f"{case}it does end; what do the first and the last stage wait for?"),
                   (not math.isclose(got or 0, told), f"{case}it ends at {told:g}, not {got!r}: who waits?"))  # fmt: skip
    for rows in (STUCK, SORTED, EARLY):
        why = "its own F0" if rows is EARLY else "rank 0's F1, which waits for B0"
        refuse((function([[*row] for row in rows], [1, 1], [1, 1]) is not None, f"{rows}: rank 1 waits for {why}: it never ends"))
    return "the same times as the library's replay, 36 times, and None for a schedule that never ends"


@judged
def carry(function: Function) -> str:
    """Check `carry(comm, schedule, work)`: any schedule, without a deadlock, and in the time of the replay."""
    for p, m in ((1, 2), (2, 4), (3, 5), (4, 8), (8, 3)):
        for name, schedule in (("GPipe", gpipe(p, m)), ("1F1B", one_f_one_b(p, m))):
            case, told = f"{name}, {plural(p, 'rank')}, {m} micro-batches: ", replay(schedule, 1, 2).time
            run = simulate(_carried, star(p, 1e12), function, rows := _pairs(schedule))
            for rank, (done, got, left, changed) in enumerate(run):
                ranks = {"F": range(rank + 1), "B": range(rank, p)}
                wanted = [sum(other + 100.0 * k for other in ranks[kind]) for kind, k in rows[rank]]
                refuse((done != rows[rank], f"{case}rank {rank} does not do what stands in its list, in that order"),
                       (changed, f"{case}rank {rank} has written to a tensor that it sent: was it still under way?"),
                       (got != wanted, f"{case}rank {rank} returns {got}, and {wanted} is right; what is sent? (An action that "
                        "receives nothing begins with zeros.)"),
                       (left, f"{case}rank {rank} leaves before what it has sent is delivered"))  # fmt: skip
            sent, right = len(run.trace), 2 * m * (p - 1)
            refuse((sent != right, f"{case}{sent} messages, and {right} are wanted: does each action hand on what it makes?"),
                   (run.time < told * 0.999, f"{case}{run.time:.1f} s, sooner than can be: who waits?"))  # fmt: skip
            late = f"{case}{run.time:.1f} s, and {told:.1f} would do: where does a rank wait for its sends?"
            refuse((run.time > told * 1.001, late))
    return "it ends with both schedules on 1 to 8 ranks, as soon as the replay says"


def _carried(comm: Any, function: Function, schedule: Any) -> Any:
    done, sent, isend = list[Any](), list[Any](), comm.isend

    def work(kind: str, k: int) -> float:
        done.append((kind, k))
        comm.sleep(1.0 if kind == "F" else 2.0)
        return comm.rank + 100.0 * k

    def watched(tensor: torch.Tensor, *how: Any, **more: Any) -> Any:
        sent.append((isend(tensor, *how, **more), tensor, tensor.clone()))
        return sent[-1][0]

    comm.isend = watched
    made = [float(x[0]) for x in function(comm, schedule, work) or []]
    return done, made, any(not w._complete for w, *_ in sent), any(not torch.equal(now, then) for _, now, then in sent)


@answered
def count(answer: Any) -> str:
    """Check five numbers: micro-batches for 1F1B, interleaved and ZB-H1, and the gigabytes of GPipe and 1F1B."""
    fill = "The bubble is (p - 1)/m, divided by what the schedule divides it by."
    parts("the answer", answer, ("1F1B", 150, fill), ("interleaved", 48, fill + " And how many go around together?"),
          ("ZB-H1", 50, fill), ("GPipe's GB", 450, "All forward passes come before the first backward pass."),
          ("1F1B's GB", 48, "How many are on the way from rank 0 to the last and back?"), within=1e-9)  # fmt: skip
    return "150, 48 and 50 micro-batches; 450 GB, which no device has, and 48"


@judged
def best_cut(function: Function) -> str:
    """Check `best_cut(costs, stages)`: numbers of layers, the slowest stage as quick as can be."""
    without(function, "cut", "rebalance")
    for costs, stages in (([1] * 6, 3), ([1] * 12 + [3], 4), ([5, 1, 1, 1, 1, 5], 3), ([9, 1, 1, 1], 4), ([2, 3, 4, 5, 6], 2),
                          ([0.5, 0.25, 1.5, 0.75], 2),
                          ([4], 1), ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 4), ([1, 1, 1, 9], 2), (MANY, 8)):  # fmt: skip
        got, case = function(list(costs), stages), f"{costs} in {plural(stages, 'stage')}: "
        fits = isinstance(got, list | tuple) and len(got) == stages and all(isinstance(n, int) for n in got)
        refuse(
            (not fits, f"{case}{stages} numbers of layers are wanted, not {got!r}"),
            (fits and (sum(got) != len(costs) or min(got) < 1), f"{case}{got} is not {len(costs)} layers, at least one a stage"),
        )
        bounds = combinations(range(1, len(costs)), stages - 1)
        least = max(sum(costs[k] for k in part) for part in cut(costs, stages)) if costs is MANY \
            else min(_worst(costs, c) for c in bounds)  # fmt: skip
        mine = _worst(costs, accumulate(got[:-1]))
        refuse((mine > least, f"{case}with {list(got)} the slowest takes {mine}, and {least} is possible"))
    return f"as good as the best of all cuts, 10 times; 40 layers in 8 stages: {function(list(MANY), 8)}"


def _worst(costs: list[Any], inner: Any) -> int:
    return max(sum(costs[low:high]) for low, high in pairwise([0, *inner, len(costs)]))


@answered
def pays(answer: Any) -> str:
    """Check three times in seconds, and after how many steps moving has paid."""
    time = "63 times the slowest stage's time for a micro-batch, and once all of them; a stage takes 2 ms for each of its layers."
    parts("the answer", answer, ("before", 1.704, time), ("slowed", 2.472, time + " One takes 1.5 times as long."),
          ("moved", 2.092, time + " 10 layers on the slow stage, 13 on two others."),
          ("steps", 7, "Two layers of 28.8 GB at 25 GB/s, beside what a step gains; a step is whole."), within=0.002)  # fmt: skip
    return "1.704 s, 2.472, 2.092; 2.3 s of moving have paid after 7 steps"
