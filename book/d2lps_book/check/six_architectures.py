"""Checks of the chapter *Six network architectures*: gossip by hand, what crosses a port, and which form fits which job."""

import math
from collections.abc import Callable
from itertools import product
from numbers import Integral
from typing import Any

import numpy as np
import torch

from d2lps_book.check.exercise import Function, Wrong, among, answered, judged, plural
from d2lps_book.check.tools import own, refuse

# ---- gossip -------------------------------------------------------------------------------------------------------------


@judged
def one_peer(function: Function) -> str:
    """Check `one_peer(comm, tensor, step)`: the mean with what comes from 1, 2, 4, ... places back; exact after log2 p steps."""
    for size, steps in product((1, 2, 4, 8, 5), (1, 2, 3, 4)):
        run = among(size, _mixed(own(function), steps))
        right = np.eye(size)
        for step in range(steps if size > 1 else 0):
            hop = 1 << step % math.ceil(math.log2(size))
            right = (right + np.roll(right, hop, axis=0)) / 2
        for rank, values in enumerate(run):
            if not np.allclose(values, right[rank]):
                case = f"{plural(size, 'rank')}, after {plural(steps, 'step')}, rank {rank}"
                raise Wrong(f"{case} has {_shares(values)}, not {_shares(right[rank])}")
        if size == 8:
            sent = int(run.trace.bytes_sent().max(initial=0))
            refuse((sent > 64 * steps, f"with 8 ranks somebody sends {sent} bytes in {steps} steps; 64 in each are enough"))
    return "1 to 8 ranks, 1 to 4 steps; 8 ranks are exact after 3"


def _mixed(function: Function, steps: int) -> Callable[[Any], list[float]]:
    """Rank r begins with a one in place r: in the end place s says how much of rank s is there."""

    def work(comm: Any) -> list[float]:
        tensor = torch.zeros(comm.size, dtype=torch.double)
        tensor[comm.rank] = 1
        for step in range(steps):
            function(comm, tensor, step)
        return tensor.tolist()

    return work


def _shares(values: Any) -> str:
    return ", ".join(f"{value:.3g} of rank {rank}" for rank, value in enumerate(values) if abs(value) > 1e-12) or "nothing"


@judged
def rounds(function: Function) -> str:
    """Check `rounds(gap, eps)`: the least number of steps of which each leaves 1 - gap, until eps is left; 1 for a gap of 1."""
    for gap, eps in [(0.05, 1e-3), (0.4, 1e-3), (0.4, 0.5), (0.9, 1e-6), (0.003, 0.01), (1.0, 1e-9)]:
        said, right = function(gap, eps), max(1, math.ceil(math.log(eps) / math.log1p(-gap))) if gap < 1 else 1
        refuse((isinstance(said, float) and said % 1, f"gap {gap:g}: {said:.5g} is no whole number of steps"))
        if said != right:
            left = (1 - gap) ** said if isinstance(said, int | float) else math.nan
            raise Wrong(f"gap {gap:g}: {said!r} steps leave {left:.3g} of the distance, and at most {eps:g} was to be left,"
                        f" in as few steps as possible")
    return "6 gaps, from 0.003 to 1"


@judged
def buried(function: Function) -> str:
    """Check `buried(W, dead)`: the mixing matrix of the survivors, symmetric and with rows that sum to 1, from local changes."""
    for size, dead in [(4, 3), (5, 0), (8, 5), (8, 0), (6, 2)]:
        given = _ring(size)
        said = np.asarray(function(given.copy(), dead), dtype=float)
        kept = np.delete(np.delete(given, dead, 0), dead, 1)
        case = f"a ring of {size} without rank {dead}"
        refuse((said.shape != kept.shape, f"{case}: {size - 1} ranks are left, and your matrix has the shape {list(said.shape)}"))
        knew = np.delete(given[:, dead], dead) > 0
        off = ~np.eye(size - 1, dtype=bool) & ~np.outer(knew, knew)  # the dead rank's neighbors may well begin to talk
        refuse(
            ((said < -1e-12).any(), f"{case}: a share can't be negative"),
            (not np.allclose(said.sum(1), 1), f"{case}: row sums are {np.round(said.sum(1), 3).tolist()}: no means"),
            (not np.allclose(said.sum(0), 1), f"{case}: column sums are {np.round(said.sum(0), 3).tolist()}: some ranks count"
             " more than others"),
            (not np.allclose(said[off], kept[off]), f"{case}: two mix otherwise than before, of whom one did not know the dead"
             " rank; how should they have heard?"),
        )  # fmt: skip
    return "5 rings of 4 to 8 ranks"


def _ring(size: int) -> np.ndarray:
    one = np.eye(size)
    return (one + np.roll(one, 1, 0) + np.roll(one, -1, 0)) / 3


# ---- bytes ----------------------------------------------------------------------------------------------------------------


@answered
def busiest(**gigabytes: float) -> str:
    """Check the bytes out of the busiest port, n = 1 GB, 16 machines: one_server, servers (16, colocated), ring, one_peer."""
    right = {"one_server": 16.0, "servers": 1.875, "ring": 1.875, "one_peer": 1.0}
    why = {
        "one_server": "to how many workers does the server send all weights?",
        "servers": "a machine pushes 15 of its 16 parts, and answers 15 workers for the part that it keeps",
        "ring": "the ring goes round twice, and each time a machine sends 15 of 16 pieces",
        "one_peer": "how many messages, of how many bytes, does a machine send in one step?",
    }
    refuse(((missing := [name for name in right if name not in gigabytes]), f"nothing is said of {', '.join(missing)}"))
    for name, each in right.items():
        if not math.isclose(gigabytes[name], each, rel_tol=0.01):
            raise Wrong(f"{name}: {gigabytes[name]:g} GB is too {'much' if gigabytes[name] > each else 'little'}: {why[name]}")
    return ", ".join(f"{name} {each:g} GB" for name, each in right.items())


@judged
def form(function: Function) -> str:
    """Check `form(table, touched, dense, m, s)`: whose busiest port carries the least, of 'all-reduce', 'store' and 'mixed'."""
    dice = np.random.default_rng(0)
    drawn = [(10.0 ** dice.uniform(4, 9), 10.0 ** dice.uniform(-4, 0), 10.0 ** dice.uniform(4, 9), int(dice.integers(2, 17)),
              int(dice.integers(1, 17))) for _ in range(60)]  # fmt: skip
    seen = set()
    for table, share, dense, m, s in [(1e9, 0.001, 1e6, 8, 2), (1e8, 1.0, 1e7, 2, 1), (1e8, 0.01, 1e9, 4, 8), *drawn]:
        touched, ring = table * share, 2 * (m - 1) / m
        port = {
            "all-reduce": ring * (table + dense),
            "store": max(m / s, 1) * (touched + dense),
            "mixed": max(ring * dense + touched, m / s * touched),
        }
        best = min(port, key=lambda name: port[name])
        second = sorted(port.values())[1]
        if second < 1.02 * port[best]:
            continue  # too close to call
        seen.add(best)
        said = function(table, touched, dense, m, s)
        refuse((said not in port, f"{said!r} is none of {', '.join(map(repr, port))}"))
        if said != best:
            raise Wrong(f"table {table:.2g} B, {touched:.2g} of them touched, dense {dense:.2g} B, {m} workers, {s} servers: with"
                        f" {said!r} the busiest port sends {port[said]:.3g} B, with another form {port[best]:.3g}")
    return f"each of {', '.join(sorted(seen))} is best somewhere"


@judged
def pieces(function: Function) -> str:
    """Check `pieces(n, p, alpha, beta)`: into how many pieces to cut a chain's broadcast, at most 1% slower than the best."""

    def time(k: int, n: float, p: int, alpha: float, beta: float) -> float:
        return (k + p - 2) * (n / k * beta + alpha)

    cases = [(n, p, 1e-5, 1e-10) for n, p in ((1e9, 16), (1e9, 256), (1e6, 256), (1e3, 64), (1e9, 2))]
    for case in cases:
        said = function(*case)
        n, p, alpha, beta = case
        refuse((not isinstance(said, Integral) or isinstance(said, bool) or said < 1,
                f"{said!r} is no whole number of pieces from 1 up"))  # fmt: skip
        near = max(1.0, math.sqrt((p - 2) * n * beta / alpha))
        best = min((math.floor(near), math.ceil(near)), key=lambda k: time(k, *case))
        if time(said, *case) > 1.01 * time(best, *case):
            raise Wrong(f"n = {n:g} B, {p} ranks: {said} pieces take {1e3 * time(said, *case):.3g} ms, and"
                        f" {'more' if said < best else 'fewer'} would take {1e3 * time(best, *case):.3g}")
    return f"{len(cases)} chains, of 2 to 256 ranks"


# ---- which form -------------------------------------------------------------------------------------------------------------

_RIGHT: dict[str, tuple[set[str], str]] = {
    "recommender": ({"parameter server"}, "a batch touches a thousandth of the table: who would carry the rest round?"),
    "one_machine": ({"ring"}, "equal devices, equal links, a model that fits: what does anything more complicated buy?"),
    "giant": ({"hybrid"}, "the weights don't fit on a device: in which form does nobody need all of them?"),
    "pod": ({"hierarchical", "hybrid"}, "the network is much slower than the links inside a machine: who sums before it sends?"),
    "spot": ({"cloud-native"}, "machines vanish, and losses must not change: who reads the share of one that is gone?"),
    "shared": ({"dynamic"}, "links get slow and fast again through other people's traffic: who notices while it runs?"),
}


@answered
def choose(**architecture: str) -> str:
    """Check which architecture fits each job: recommender, one_machine, giant, pod, spot, shared."""
    refuse(((missing := [job for job in _RIGHT if job not in architecture]), f"nothing is said of {', '.join(missing)}"))
    known = {"parameter server", "ring", "hybrid", "hierarchical", "dynamic", "cloud-native"}
    for job, (right, why) in _RIGHT.items():
        said = architecture[job]
        refuse((said not in known, f"{job}: {said!r} is none of {', '.join(sorted(known))}"))
        if said not in right:
            raise Wrong(f"{job}: not {said!r}: {why}")
    return f"{len(_RIGHT)} jobs"
