"""Checks of the exercises of *Keys and values*."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from d2lps.kvstore import Placement
from d2lps_book.check.exercise import Function, Wrong, answered, judged
from d2lps_book.check.tools import near, parts, refuse

_KEYS = [f"key {number}" for number in range(4000)]


@answered
def memory(all_reduce: Any, servers: Any, aside: Any) -> str:
    """Check `all_reduce, servers`, each (GB in one worker, GB in all machines), and `aside`, the GB of pushes kept aside."""
    worker = "A worker has weights and a gradient and, without servers, both moments too"
    everybody = f"{worker}; servers have weights and moments once; there are eight workers"
    for name, given, one, all_of_them in ("all_reduce", all_reduce, 1.99, 15.9), ("servers", servers, 0.995, 9.46):
        parts(name, given, ("a worker", one, worker), ("in all", all_of_them, everybody), within=0.03)
    near("aside", aside, 3.98, "Until the iteration is complete, each of eight workers' pushes is there by itself", within=0.03)
    return "15.9 GB with an all-reduce, 9.5 with servers, and 4 more for pushes that wait"


# ---- an optimizer of one's own --------------------------------------------------------------------------------------------


@judged
def rmsprop(ours: Function) -> str:
    """Check a class with `state(value)` and `step(value, gradient, state)`: torch.optim.RMSprop, for several rates and keys."""
    if missing := [name for name in ("state", "step") if not hasattr(ours, name)]:
        raise Wrong(f"{ours.__name__} has no {' and no '.join(missing)} yet")
    for hyper in {"lr": 0.01, "alpha": 0.9}, {"lr": 0.5, "alpha": 0.99}, {"lr": 0.002, "alpha": 0.5}, {"lr": 0.1}:
        for scale in 1.0, 1e-8:  # gradients so small that it matters where epsilon stands
            _as_torch(ours, hyper, scale)
    return "as torch.optim.RMSprop, with four pairs of lr and alpha, and with gradients as small as epsilon"


def _as_torch(ours: Function, hyper: dict[str, Any], scale: float) -> None:
    dice = torch.Generator().manual_seed(0)
    mine, keys = ours(**hyper), []
    for value in [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in ((5,), (2, 3))]:
        judge = value.clone().requires_grad_()
        keys.append([value, mine.state(value), judge, torch.optim.RMSprop([judge], **hyper)])
    kept = keys[0][1]
    if not isinstance(kept, dict) or not kept or not all(isinstance(tensor, torch.Tensor) for tensor in kept.values()):
        found = "no tensors" if isinstance(kept, dict) and not kept else f"{kept!r}, not a dictionary of tensors"
        raise Wrong(f"`state` gives {found}: one optimizer serves many keys, so what it must remember of each is in its state")
    for step in range(12):
        if step == 6:  # as when a server is started anew: what it knows is the dictionary
            mine = ours(**hyper)
            keys = [[value, {name: tensor.clone() for name, tensor in state.items()}, *rest] for value, state, *rest in keys]
        for value, state, judge, other in keys:
            gradient = scale * torch.randn(value.shape, generator=dice, dtype=torch.float64)
            judge.grad, before, old = gradient.clone(), value, value.clone()
            mine.step(value, gradient, state)
            other.step()
            where = f"{', '.join(f'{name}={number}' for name, number in hyper.items())}, step {step}"
            refuse((not torch.equal(gradient, judge.grad), f"{where}: the gradient was changed"))
            refuse((torch.equal(value, old), f"{where}: the value is as it was: `step` is to change it in place"))
            off = (before - judge.detach()).abs().flatten()
            refuse((off.isnan().any(), f"{where}: the value is not a number: is the root that of a mean of squares?"))
            if not off.max() <= 1e-9:
                hint = "; just before, the optimizer was made anew, as on another server: is all in `state`?" * (step == 6)
                small = f" (gradients of about {scale:g}: where does epsilon stand?)" * (scale < 1 and step < 6)
                nearly = " (so near: where does epsilon stand, and has the state the value's dtype?)"
                small = small or nearly * (step == 0 and bool(off.max() < 1e-4 * hyper["lr"]))
                raise Wrong(f"{where}: element {int(off.argmax())} is {off.max():.2g} away from torch's{small}{hint}")


# ---- who owns a key -------------------------------------------------------------------------------------------------------


@judged
def owner(function: Function) -> str:
    """Check `function(key, servers)`: everybody finds the same server, and as little moves as can be."""
    for before, newcomer, keys in (list(range(8)), 8, _KEYS), (["ant", "bee", "cat"], "dog", _KEYS[:1000]):
        whose, after = _owners(function, keys, before), _owners(function, keys, [*before, newcomer])
        left = _owners(function, keys, [server for server in before if server != before[1]])
        for key, elsewhere in _owners(function, keys[:100], before[::-1]).items():
            if elsewhere != whose[key]:
                raise Wrong(f"{key!r} is at {whose[key]!r}, and elsewhere if the same servers are named in another order")
        for key, server in whose.items():
            if after[key] not in (server, newcomer):
                raise Wrong(f"{key!r} goes from {server!r} to {after[key]!r} when {newcomer!r} comes, not to the newcomer")
        for key, server in whose.items():
            if server not in (before[1], left[key]):
                raise Wrong(f"{key!r} goes from {server!r} to {left[key]!r} when {before[1]!r} leaves, which never had it")
        _elsewhere(function, before, [whose[key] for key in keys[:50]])
        counted, share = Counter(after.values()), len(keys) / (len(before) + 1)
        server = max([*before, newcomer], key=lambda server: abs(counted[server] - share))
        if abs(counted[server] - share) > 0.2 * share:
            held = f"{counted[server]} of {len(keys)} keys; its share is {share:.0f}"
            raise Wrong(f"of {len(before) + 1} servers {server!r} has {held}")
    return f"{len(_KEYS) // 9} of {len(_KEYS)} keys are a ninth; the newcomer takes about so many, and nothing else moves"


def _owners(function: Function, keys: Sequence[str], servers: Sequence[Any]) -> dict[str, Any]:
    found = {key: function(key, list(servers)) for key in keys}
    for key, got in found.items():
        refuse((got not in servers, f"owner({key!r}, {servers}) is {got!r}, which is none of them"))
    return found


_OTHER = "import cloudpickle, sys; f, keys, servers = cloudpickle.load(sys.stdin.buffer); print([f(k, [*servers]) for k in keys])"


def _elsewhere(function: Function, servers: Sequence[Any], here: list[Any]) -> None:
    """Another process, whose strings have other hashes, must come to the same."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    asked = cloudpickle.dumps((function, _KEYS[: len(here)], servers))
    found = subprocess.run([sys.executable, "-c", _OTHER], input=asked, capture_output=True, env=environment, check=False)
    if found.returncode:
        raise Wrong(f"in another process it fails: {found.stderr.decode().strip().splitlines()[-1]}")
    if found.stdout.decode().splitlines()[-1] != str(here):
        raise Wrong("another process finds other owners for the same keys: what differs there?")


# ---- numbers --------------------------------------------------------------------------------------------------------------


@answered
def slices(count: Any) -> str:
    """Check into how many slices a large tensor is cut, each with a name of its own, so that 8 servers can become 9."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 100_000:
        raise Wrong(f"{count!r} is no number of slices from 1 to 100,000")
    placement = Placement(range(8), split=1 << 40)
    for number in range(count):
        placement.place(f"tensor/{number}", (100_000 // count, 100), torch.float32)
    held = placement.nbytes().values()
    fullest, moved = 8 * max(held) / sum(held), sum(move.nbytes for move in placement.add(8)) / sum(held)
    found = f"{count} slices: the fullest server has {fullest:.2f} shares, and {moved:.3f} of the bytes move to the ninth"
    refuse((fullest > 1.3 or not 0.6 / 9 < moved < 1.4 / 9, f"{found}; with more slices chance matters less"))
    refuse((count > 2000, f"{found}; but each is a message for every worker, and a tenth of them would do"))
    return found


@answered
def break_even(wide: Any, narrow: Any) -> str:
    """Check up to which fraction of touched rows they are cheaper than the table, for rows of 64 bytes and of 4."""
    for what, given, right in ("64 bytes", wide, 64 / 72), ("4 bytes", narrow, 4 / 12):
        hint = "A row's number travels with the push and again with the pull; the whole table needs none"
        if isinstance(given, int | float) and given > 1:
            hint = "A fraction of the rows is asked for, at most 1"
        near(what, given, right, hint)
    return "eight rows of nine if they have 64 bytes, one of three if they have 4"


@answered
def rows(apart: Any, colocated: Any) -> str:
    """Check `apart, colocated`: up to how many rows a batch may touch for rows to be cheaper than the ring, of a million."""
    if not isinstance(apart, int | float) or not (apart in (1_000_000, float("inf")) or abs(apart - 1_555_556) < 2):
        hint = "A row costs 64 + 8 bytes pushed, 8 asked for and 64 pulled; the ring 2 (m - 1)/m of the table each way"
        raise Wrong(f"apart: not {apart!r}. {hint}")
    near("colocated", colocated, 888_889, "An eighth of the rows stays at home, but the port serves others as much as itself")
    return "with servers apart always, colocated up to eight rows of nine"


@answered
def tiers(hits: Any, misses: Any) -> str:
    """Check how many reads find a key in memory, and how many don't."""
    reads = "Two workers read each of 8 keys twice in each of three rounds, to push and to pull"
    refuse((hits + misses != 96, f"{hits} and {misses} are {hits + misses} reads, not {2 * 2 * 8 * 3}. {reads}"))
    refuse((misses != 24, f"not {misses} misses. Four reads of one key follow one another: which of them miss?"))
    return "the first of four reads misses, three hit"


@answered
def tourist(scanned: Any, peeked: Any) -> str:
    """Check how many of 300 reads hit after a scan of all pages by reading, and after one by peeking."""
    if not isinstance(scanned, int | float) or not 140 <= scanned <= 180:
        raise Wrong(f"after reading: not {scanned!r}. 300 reads ask for some 140 pages; how often does each of these miss?")
    if not isinstance(peeked, int | float) or not 165 <= peeked <= 200:
        raise Wrong(f"after peeking: not {peeked!r}. What was in memory still is: what rate is predicted for a tenth?")
    refuse((peeked <= scanned, f"{scanned!r} after reading, {peeked!r} after peeking: which pages are in memory after either?"))
    return "about 160 after a tourist who reads, 186 after one who peeks"
