"""Checks of the chapter *Consistency*: who may read, what waiting and delay cost, and a server that threads share."""

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import torch

from d2lps.kvstore import simulate
from d2lps.topology import star
from d2lps_book.check.exercise import Function, Wrong, answered, judged, plural
from d2lps_book.check.tools import refuse


@judged
def may_read(function: Function) -> str:
    """Check `may_read(mine, clocks, bound)`: whether a worker at clock `mine` may read, `mine` being one of `clocks`."""
    cases = 0
    for workers, bound in product((1, 2, 3, 4), (0, 1, 2, 3, math.inf)):
        for clocks in product(range(5), repeat=workers):
            for worker, mine in enumerate(clocks):
                if bool(function(mine, given := list(clocks), bound)) == any(mine - bound > other for other in clocks):
                    how = "reads too early" if mine - min(clocks) > bound else "waits in vain"
                    raise Wrong(f"with bound {bound} and clocks {list(clocks)}, worker {worker} {how}")
                refuse((given != list(clocks), f"it changed the clocks {list(clocks)} to {given}: looking must not move them"))
                cases += 1
    return f"{cases:,} cases, 1 to 4 workers"


@answered
def pause(**seconds: float) -> str:
    """Check how long 40 iterations take with two pauses of 6 s: pause(**{"BSP": ..., "ASP": ..., "SSP(2)": ...})."""
    bounds = {"BSP": 0, "ASP": 40} | {f"SSP({b})": b for b in (2, 4, 6, 8)}
    refuse(((missing := [rule for rule in bounds if rule not in seconds]), f"nothing is said of {', '.join(missing)}"))
    for rule, bound in bounds.items():
        if not abs((said := seconds[rule]) - (right := _paused(bound))) <= 0.5:
            why = "two workers pause once each, at different times; for which of the pauses does somebody else stand still?"
            if rule.startswith("SSP"):
                why = "how far may worker 1 run on while worker 0 pauses, and does that lead help when its own pause comes?"
            raise Wrong(f"{rule} takes {'more' if said < right else 'less'} than {said:g} s: {why}")
    return ", ".join(f"{rule} {said:g} s" for rule, said in seconds.items())


def _paused(bound: int, pauses: tuple[tuple[int, int], ...] = ((0, 9), (1, 29)), steps: int = 40) -> float:
    """Seconds until four workers have ended, without messages: nobody begins a step before all have ended `bound` fewer."""
    ended = [[0.0] * 4]  # by step, by worker
    for step in range(steps):
        gate = max(ended[step - bound]) if step >= bound else 0.0
        ended.append([max(ended[-1][rank], gate) + 1 + 6 * ((rank, step) in pauses) for rank in range(4)])
    return max(ended[-1])


@judged
def largest_rate(function: Function) -> str:
    """Check `largest_rate(workers, mean)`: of ASP with equal workers on a parabola of curvature 1; `mean`: pushes are divided."""
    for workers, mean in product((1, 2, 3, 4, 8, 16), (True, False)):
        said = float(function(workers, mean))
        for factor, converges in ((0.95, True), (1.05, False)):
            step = factor * said / (workers if mean else 1)
            if _converges(step, workers - 1) != converges:
                how = "does not converge" if converges else "still converges"
                case = f"{plural(workers, 'worker')}, {'mean' if mean else 'sum'}: you say {said:.3g}"
                raise Wrong(f"{case}, but {factor * said:.3g} {how} when each push, of {step:.3g} times the gradient, is late by"
                            f" {workers - 1}")
    return "1 to 16 workers, mean and sum: 5% less converges, 5% more does not"


def _converges(step: float, delay: int) -> bool:
    w = [1.0] * (delay + 1)
    while len(w) < 401 * (delay + 1) and abs(w[-1]) < 1e6:
        w.append(w[-1] - step * w[-1 - delay])
    return max(map(abs, w[-50:])) < 0.1


@judged
def used(function: Function) -> str:
    """Check `used(k, workers, q, f)`: gradients used per unit of time if each iteration drops the last k of them."""
    cases = [(k, *rest) for rest in ((100, 0.02, 5), (3, 0.5, 2), (8, 0.1, 10)) for k in (0, 1, 2) + (7,) * (rest[0] > 8)]
    for k, workers, q, f in cases:
        slow = sum(math.comb(workers, i) * q**i * (1 - q) ** (workers - i) for i in range(k + 1, workers + 1))
        said, right = function(k, workers, q, f), (workers - k) / (1 + (f - 1) * slow)
        if not math.isclose(said, right, rel_tol=0.005):
            case = f"k = {k} of {plural(workers, 'worker')}, q = {q}, f = {f}"
            raise Wrong(f"{case}: {said:.4g} is too {'much' if said > right else 'little'}; an iteration takes {f} with"
                        f" probability {slow:.3g}, else 1, and some gradients are dropped")
    return f"{len(cases)} cases, 3 to 100 workers"


# ---- a worker that computes while messages travel -----------------------------------------------------------------------

_FLOATS, _BANDWIDTH, _STEPS = 10_000, 1e7, 20  # 4 ms a tensor, as 4 MB take at 1 GB/s


@judged
def overlap(function: Function) -> str:
    """Check `overlapped(kv, weights, steps, compute)`: each gradient pushed once, one round late at most, in the longer time."""
    first, *_ = [_overlapped(function, *case) for case in ((4, 0.06), (1, 0.03), (2, 0.01), (8, 0.03))]
    return f"{1e3 * first:.0f} ms an iteration with 4 workers, and every gradient counts once"


def _overlapped(function: Function, workers: int, seconds: float) -> float:
    """The time of an iteration; each gradient has a place of its own in the weights, and counts in the first."""

    def worker(kv: Any) -> tuple[float, list[float]]:
        weights, found, pull = torch.zeros(_FLOATS), [], kv.pull

        def pull_late(key: str, out: torch.Tensor, **more: Any) -> Any:
            out.fill_(math.nan)  # nobody's until it was waited for
            return pull(key, out, **more)

        def compute(w: torch.Tensor) -> torch.Tensor:
            found.append(w[0].item() / kv.num_workers)  # rounds that are in w
            kv.comm.sleep(seconds)
            gradient = torch.zeros(_FLOATS)
            gradient[0] = gradient[1 + kv.rank * _STEPS + len(found) - 1] = 1
            return gradient

        kv.pull = pull_late
        kv.init("w", weights)
        kv.barrier()
        start = kv.comm.now()
        function(kv, weights, _STEPS, compute)
        return (kv.comm.now() - start) / _STEPS, found

    run = simulate(worker, star(workers + 1, _BANDWIDTH, 1e-6), workers, 1, trace=False)
    _each_once(run[0][1], run.values["w"], workers)
    each, messages = max(each for each, _ in run), 2 * workers * 4 * _FLOATS / _BANDWIDTH
    if each > (longest := 1.12 * max(seconds, messages)):
        raise Wrong(f"with {plural(workers, 'worker')} an iteration takes {1e3 * each:.0f} ms; computing takes"
                    f" {1e3 * seconds:.0f} ms and the messages {1e3 * messages:.0f} ms: side by side, at most"
                    f" {1e3 * longest:.0f} ms")
    return each


def _each_once(found: list[float], values: torch.Tensor, workers: int) -> None:
    for k, rounds in enumerate(found):
        if math.isnan(rounds):
            raise Wrong(f"gradient {k + 1} is computed from a tensor that is still being pulled: wait for the pull, or let it"
                        " fill another tensor")
        if k - rounds > 1:
            lacks = plural(k - rounds, "round")
            raise Wrong(f"gradient {k + 1} is computed from weights without {lacks}; one may be missing, not more")
    refuse((len(found) != _STEPS, f"in {_STEPS} steps worker 0 computed {plural(len(found), 'gradient')}"))
    counts = values[1 : 1 + workers * _STEPS].view(workers, _STEPS)
    for rank, step in (counts != 1).nonzero().tolist():
        times = plural(int(counts[rank, step]), "time") if counts[rank, step] else "not at all"
        raise Wrong(f"at the end, gradient {step + 1} of worker {rank}'s {_STEPS} is {times} in the weights")


# ---- a rate divided by 1 + the delay ------------------------------------------------------------------------------------


@judged
def aware(make: Callable[..., Any]) -> str:
    """Check a class `Aware(weights, rate)` with `pull()`, weights and version, and `push(gradient, version)`."""
    for seed, workers in ((0, 1), (1, 2), (2, 5)):
        dice = torch.Generator().manual_seed(seed)
        right, rate = torch.rand(3, generator=dice, dtype=torch.double), 0.5 + seed
        server = make(right.clone(), rate)
        read = [(*_pulled(server), 0) for _ in range(workers)]
        for pushes in range(30):
            rank = int(torch.randint(workers, (1,), generator=dice))
            (weights, version, then), gradient = read[rank], torch.rand(3, generator=dice, dtype=torch.double)
            before, old = weights.clone(), right.clone()
            server.push(gradient, version)
            right -= rate * gradient / (1 + pushes - then)
            if not torch.equal(weights, before):
                raise Wrong("weights that a worker had pulled changed under its hands when somebody pushed: hand out a copy")
            read[rank] = (*_pulled(server), pushes + 1)
            if not torch.allclose(read[rank][0], right):
                moved, others = (old - read[rank][0])[0] / gradient[0], plural(pushes - then, "other gradient")
                raise Wrong(f"push {pushes + 1}, with {plural(workers, 'worker')} and a rate of {rate:g}: {others} came"
                            f" between the read and the push, and the weights moved by {moved:.3g} times the gradient")
    return "90 pushes of 1 to 5 workers"


def _pulled(server: Any) -> tuple[torch.Tensor, Any]:
    """A copy of the weights, and their version."""
    found = server.pull()
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[0], torch.Tensor):
        raise Wrong(f"pull() returns {found!r}, and is to return two things: a copy of the weights, and their version")
    return found[0], found[1]


# ---- a server that threads share ----------------------------------------------------------------------------------------


class Meeting:
    """A gradient of 1; adding it waits for another addition to begin, half a second at most."""

    def __init__(self, parties: int) -> None:
        self.door, self.met = threading.Barrier(parties, timeout=0.3), False

    def __radd__(self, value: int) -> int:
        with suppress(threading.BrokenBarrierError):  # nobody else came
            self.door.wait()
            self.met = True
        return value + 1

    __add__ = __radd__


class Failing(Meeting):
    """A gradient that can't be added."""

    def __radd__(self, value: int) -> int:
        raise ArithmeticError

    __add__ = __radd__


class Polite:
    """A lock; whoever lets it go gives the others time to take it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.acquire = self.lock.acquire

    def __enter__(self) -> bool:
        return self.acquire()

    def release(self, *error: Any) -> None:
        self.lock.release()
        threading.Event().wait(0.05)

    __exit__ = release


@judged
def server(make: Callable[[int], Any]) -> str:
    """Check a class `FixedServer(value)` with `push(gradient)` and `value`: threads that push at once lose nothing."""
    refuse((_pushed(make, 5, []).value != 5, "made with the value 5, it has another"))
    for pushes in (1, 2, 3):
        gradient = Meeting(2)
        found = _pushed(make, 5, [gradient] * pushes).value
        if found != 5 + pushes:
            how = ": two additions ran at the same time" if gradient.met else ": somebody came between a read and its write"
            raise Wrong(f"{plural(pushes, 'thread')} pushed 1 each to a value of 5, and it became {found}{how}")
    if _pushed(make, 5, [Failing(2), Meeting(2)]).value != 6:
        raise Wrong("after a push whose addition failed, the next one is not in the value")
    return "up to 3 threads, and one push that fails"


def _pushed(make: Callable[[int], Any], value: int, gradients: list[Any]) -> Any:
    """The server after threads have pushed, each lock of its own replaced by a polite one."""
    server = make(value)
    for name, lock in list(vars(server).items()):
        if isinstance(lock, type(threading.Lock()) | type(threading.RLock())):
            setattr(server, name, Polite())

    errors = []

    def push(gradient: Any) -> None:
        try:
            with suppress(ArithmeticError):
                server.push(gradient)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=[gradient], daemon=True) for gradient in gradients]
    for thread in threads:
        thread.start()
        if isinstance(gradients[0], Failing):
            thread.join(2)  # one after another
    for thread in threads:
        thread.join(2)
        refuse((thread.is_alive(), "a push never came back: somebody took a lock and did not give it back, or took one twice"))
    if errors:
        raise errors[0]
    return server
