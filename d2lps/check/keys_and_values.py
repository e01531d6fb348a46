"""Checks of the exercises of *Keys and values*."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from d2lps.check.exercise import Function, Wrong, answered, judged
from d2lps.kvstore import Placement

_KEYS = [f"key {number}" for number in range(4000)]


def _near(what: str, got: Any, right: float, hint: str, off: float = 0.03) -> None:
    if not isinstance(got, int | float) or abs(got - right) > off * right:
        raise Wrong(f"{what}: not {got!r}. {hint}")


@answered
def memory(all_reduce: Any, servers: Any, aside: Any) -> str:
    """Check `all_reduce, servers`, each (GB in one worker, GB in all machines), and `aside`, the GB of pushes kept aside."""
    worker = "A worker has weights and a gradient and, without servers, both moments too"
    for name, given, right in ("all_reduce", all_reduce, (1.99, 15.9)), ("servers", servers, (0.995, 9.46)):
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise Wrong(f"{name}: two numbers are wanted, (GB in a worker, GB in all), not {given!r}")
        _near(f"{name}, a worker", given[0], right[0], worker)
        _near(f"{name}, in all", given[1], right[1], f"{worker}; servers have weights and moments once; there are eight workers")
    _near("aside", aside, 3.98, "Until the iteration is complete, each of eight workers' pushes is there by itself")
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
    for step in range(12):
        if step == 6:  # as when a server is started anew: what it knows is the dictionary
            mine = ours(**hyper)
            keys = [[value, {name: tensor.clone() for name, tensor in state.items()}, *rest] for value, state, *rest in keys]
        for value, state, judge, other in keys:
            gradient = scale * torch.randn(value.shape, generator=dice, dtype=torch.float64)
            judge.grad, before = gradient.clone(), value
            mine.step(value, gradient, state)
            other.step()
            where = f"{', '.join(f'{name}={number}' for name, number in hyper.items())}, step {step}"
            if not torch.equal(gradient, judge.grad):
                raise Wrong(f"{where}: the gradient was changed")
            off = (before - judge.detach()).abs().flatten()
            if not off.max() <= 1e-9:
                hint = "; just before, the optimizer was made anew, as on another server: is all in `state`?" * (step == 6)
                small = f" (gradients of about {scale:g}: where does epsilon stand?)" * (scale < 1 and step < 6)
                raise Wrong(f"{where}: element {int(off.argmax())} is {off.max():.2g} away from torch's{small}{hint}")


# ---- who owns a key -------------------------------------------------------------------------------------------------------


@judged
def owner(function: Function) -> str:
    """Check `function(key, servers)`: everybody finds the same server, and as little moves as can be."""
    for before in [0, 1, 2, 3, 4, 5, 6, 7], ["ant", "bee", "cat"]:
        if (got := function(_KEYS[0], list(before))) not in before:
            raise Wrong(f"owner({_KEYS[0]!r}, {before}) is {got!r}, which is none of them")
        whose = {key: function(key, list(before)) for key in _KEYS}
        for key in _KEYS[:100]:
            if function(key, before[::-1]) != whose[key]:
                raise Wrong(f"{key!r} is at {whose[key]!r}, and elsewhere if the same servers are named in another order")
        newcomer: Any = 8 if 0 in before else "dog"
        after = {key: function(key, [*before, newcomer]) for key in _KEYS}
        for key in _KEYS:
            if after[key] not in (whose[key], newcomer):
                raise Wrong(f"{key!r} goes from {whose[key]!r} to {after[key]!r} when {newcomer!r} comes, not to the newcomer")
        left = [server for server in before if server != before[1]]
        for key in _KEYS:
            if (now := function(key, left)) not in left:
                raise Wrong(f"owner({key!r}, {left}) is {now!r}, which is none of them")
            if whose[key] not in (before[1], now):
                raise Wrong(f"{key!r} goes from {whose[key]!r} to {now!r} when {before[1]!r} leaves, which never had it")
        if newcomer == 8:
            _elsewhere(function, before)
        _even(after, [*before, newcomer])
    return f"{len(_KEYS) // 9} of {len(_KEYS)} keys are a ninth; the newcomer takes about so many, and nothing else moves"


def _even(whose: dict[str, Any], servers: Sequence[Any]) -> None:
    counted, share = Counter(whose.values()), len(_KEYS) / len(servers)
    server = max(servers, key=lambda server: abs(counted[server] - share))
    if abs(counted[server] - share) > 0.2 * share:
        raise Wrong(f"of {len(servers)} servers {server!r} has {counted[server]} of {len(_KEYS)} keys; its share is {share:.0f}")


_OTHER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import cloudpickle
function, keys, servers = cloudpickle.load(sys.stdin.buffer)
print(json.dumps([function(key, list(servers)) for key in keys]))
"""


def _elsewhere(function: Function, servers: Sequence[Any]) -> None:
    """Another process, whose strings have other hashes, must come to the same."""
    here = [function(key, [*servers]) for key in _KEYS[:50]]
    environment = os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    command = [sys.executable, "-c", _OTHER, json.dumps(sys.path)]
    asked = cloudpickle.dumps((function, _KEYS[: len(here)], [*servers]))
    found = subprocess.run(command, input=asked, capture_output=True, env=environment, check=False)
    if found.returncode:
        raise Wrong(f"in another process it fails: {found.stderr.decode().strip().splitlines()[-1]}")
    if json.loads(found.stdout.splitlines()[-1]) != here:
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
    if fullest > 1.3 or not 0.6 / 9 < moved < 1.4 / 9:
        raise Wrong(f"{found}; with more slices chance matters less")
    if count > 2000:
        raise Wrong(f"{found}; but each is a message for every worker, and a tenth of them would do")
    return found


@answered
def break_even(wide: Any, narrow: Any) -> str:
    """Check up to which fraction of touched rows they are cheaper than the table, for rows of 64 bytes and of 4."""
    for name, got, right in ("64 bytes", wide, 64 / 72), ("4 bytes", narrow, 4 / 12):
        hint = "A row's number travels with the push and again with the pull; the whole table needs none"
        _near(name, got, right, hint, off=0.006)
    return "eight rows of nine if they have 64 bytes, one of three if they have 4"


@answered
def tiers(hits: Any, misses: Any) -> str:
    """Check how many reads find a key in memory, and how many don't."""
    reads = "Two workers read each of 8 keys twice in each of three rounds, to push and to pull"
    if hits + misses != 96:
        raise Wrong(f"{hits} and {misses} are {hits + misses} reads, not {2 * 2 * 8 * 3}. {reads}")
    if misses != 24:
        raise Wrong(f"{misses} misses: not so many. Four reads of one key follow one another: which of them miss?")
    return "the first of four reads misses, three hit"


@answered
def tourist(scanned: Any, peeked: Any) -> str:
    """Check how many of 300 reads hit after a scan of all pages by reading, and after one by peeking."""
    if not isinstance(scanned, int | float) or not 140 <= scanned <= 180:
        raise Wrong(f"after reading: not {scanned!r}. 300 reads ask for some 140 pages; how often does each of these miss?")
    if not isinstance(peeked, int | float) or not 165 <= peeked <= 200:
        raise Wrong(f"after peeking: not {peeked!r}. What was in memory still is: what rate is predicted for a tenth?")
    return "about 160 after a tourist who reads, 186 after one who peeks"
