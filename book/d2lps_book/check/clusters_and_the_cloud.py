"""Checks of the chapter *Clusters and the cloud*: who reads what, who is let in, how long a burst lasts, when to stop asking."""

import math
import random
from collections.abc import Sequence
from typing import Any

from d2lps_book.check.exercise import Function, Wrong, answered, judged
from d2lps_book.check.tools import near, parts, refuse


@judged
def mine(function: Function) -> str:
    """Check `mine(done, batch, rank, size)`: what a rank reads in the step after `done` steps, of `size` ranks in that step."""
    jobs = [(12, [3, 3, 2, 2, 3]), (24, [8, 5, 5, 1]), (7, [3, 2, 1, 7]), (5, [8, 2])]
    for batch, sizes in jobs:
        found: list[int] = []
        for done, size in enumerate(sizes):
            shares = [[int(sample) for sample in function(done, batch, rank, size)] for rank in range(size)]
            again = [[int(sample) for sample in function(done, batch, rank, size)] for rank in reversed(range(size))]
            found += [sample for share in shares for sample in share]
            case, wanted = f"batch {batch}, {done} steps done, {size} ranks", (done + 1) * batch
            twice = sorted({sample for sample in found if found.count(sample) > 1})
            missing, beyond = sorted({*range(wanted)} - {*found}), sorted({*found} - {*range(wanted)})
            lengths = [len(share) for share in shares]
            refuse((again[::-1] != shares, f"{case}, asked again: other samples. A rank that has started anew remembers nothing"),
                   (twice, f"{case}: sample {twice[:1]} is read a second time; who began where?"),
                   (beyond, f"{case}: sample {beyond[:1]} belongs to a later step: the batch is of all ranks together"),
                   (missing, f"{case}: sample {missing[:1]} is never read"),
                   (max(lengths) > min(lengths) + 1, f"{case}: shares of {lengths} samples: all wait for the largest"))
    return f"{len(jobs)} jobs that grow and shrink, every sample once"


@judged
def admit(function: Function) -> str:
    """Check `admit(free, waiting)`: the names of the jobs that start now, of waiting = [(name, devices), ...] in order."""
    dice = random.Random(0)
    queues = [(12, [8, 8]), (12, [8, 8, 4]), (0, [1]), (4, []), (8, [9, 8]), (3, [2, 2, 1])]
    queues += [(dice.randrange(20), [dice.randrange(1, 12) for _ in range(dice.randrange(8))]) for _ in range(200)]
    for free, wants in queues:
        waiting = [(f"job{number}", want) for number, want in enumerate(wants)]
        said, right, left = list(function(free, list(waiting))), [], free
        for name, want in waiting:
            if want <= left:
                right.append(name)
                left -= want
        unknown = [name for name in said if name not in dict(waiting)]
        taken = sum(dict(waiting)[name] for name in said if name in dict(waiting))
        refuse((unknown, f"{unknown[0] if unknown else ''!r} is no job that waits"),
               (taken > free, f"{free} free, {waiting}: {said} need {taken} devices"),
               (said != right, f"{free} free, {waiting}: not {said}. In order, each job that fits into what is left, whole"))
    return f"{len(queues)} queues"


@judged
def lasts(function: Function) -> str:
    """Check `lasts(bucket, peak, base, share)`: seconds from a full bucket until a link used for `share` of the time is slow."""
    for bucket in (1e9, 4e11):
        for peak, base in ((1.25e9, 1.25e8), (1e9, 5e8), (3e9, 3e9)):
            for share in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
                said, drain = function(bucket, peak, base, share), share * peak - base
                right = bucket / drain if drain > 1e-6 * peak else math.inf
                case = f"lasts({bucket:g}, {peak:g}, {base:g}, {share:g})"
                ever = right == math.inf
                refuse((ever and said != right, f"{case}: not {said!r}. No more goes out than comes in: for how long?"),
                       (not ever and said == math.inf, f"{case}: the bucket does get empty"))  # fmt: skip
                if not ever:
                    near(case, said, right, "What comes into the bucket in a second, and what goes out?")
    return "36 links, some of which last for ever"


@answered
def cold(seconds: Any) -> str:
    """Check (image, weights, all), in seconds, of a cold start on 16 nodes: 12 GB of image, 3/4 there, and 140 GB of weights."""
    parts("cold start", seconds,
          ("image", 16 * 3 / 2.5, "Each node pulls 3 GB, no faster than 1 GB/s; what can the registry give to sixteen at once?"),
          ("weights", 140.0, "Each node needs all 140 GB over its own port of 1 GB/s; its neighbors give no less to each."),
          ("all", 16 * 3 / 2.5 + 140 + 20, "One after the other, and 20 s at the end."))  # fmt: skip
    return "of 179.2 s, the image is a tenth: here it is the weights that should be near"


@judged
def breaker(function: Function) -> str:
    """Check `breaker(requests, failures, pause)`: which of the requests [(time, works), ...] are passed on, as a list of bool."""
    dice = random.Random(1)
    for case in range(300):
        failures, pause = dice.randrange(1, 4), dice.randrange(1, 8)
        times = sorted(dice.sample(range(60), 14))
        requests = [(time, dice.random() < (0.2, 0.5, 0.8)[case % 3]) for time in times]
        said, right = list(function(list(requests), failures, pause)), _passed(requests, failures, pause)
        refuse((len(said) != len(right), f"{len(requests)} requests, and {len(said)} answers"))
        for number, (got, wanted) in enumerate(zip(said, right, strict=True)):
            if bool(got) != wanted:
                how = "is not passed on, though it should be" if wanted else "is passed on, though the breaker is open"
                hint = "a failed probe opens it again at once, and a success begins the count anew"
                raise Wrong(f"failures={failures}, pause={pause}, {requests[: number + 1]}: the last one {how}; {hint}")
    return "300 services, from poor to good"


def _passed(requests: Sequence[tuple[float, bool]], failures: int, pause: float) -> list[bool]:
    passed, bad, until = [], 0, -math.inf
    for time, works in requests:
        passed.append(time >= until)
        if time >= until:
            bad = 0 if works else bad + 1
            if bad >= failures:  # of a probe, the count is as high as it was
                until = time + pause
    return passed


@answered
def slip(field: Any, value: Any) -> str:
    """Check which field of the Job keeps it from ever training, and what it should be."""
    field = field.rsplit(".", 1)[-1] if isinstance(field, str) else field
    refuse((field in ("completions", "backoffLimit"), f"{field} is as it should be: four workers, and none of them again"),
           (field in ("completionMode", "subdomain"), f"{field} gives the pods their numbers and names, and is right"),
           (field != "parallelism", f"{field!r} is not it. How many pods does Kubernetes start before the first has ended?"),
           (isinstance(value, int) and value > 4, f"{value} would do no harm, but there are only four workers"),
           (value != 4, f"with {value!r} at a time, do all four that wait for one another run at once?"))  # fmt: skip
    return "two pods wait for two that wait for them to end: a gang again"
