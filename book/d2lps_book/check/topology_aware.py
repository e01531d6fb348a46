"""Checks of the exercises of *Topology-aware and dynamic*."""

import math
import random
from collections.abc import Hashable, Sequence
from itertools import pairwise, product
from numbers import Real
from typing import Any

import networkx as nx
import numpy as np

from d2lps.collectives import all_reduce
from d2lps.topology import Topology, fat_tree, spine_leaf, star
from d2lps_book.check.exercise import RANKS, Function, among, answered, judged, plural
from d2lps_book.check.tools import number, played, refuse

__all__ = ["by_hand", "change", "decide", "fit", "oracle", "place"]


@answered
def by_hand(ring: float, mesh: float, equal: float, again: float) -> str:
    """Check the answers: tensors through a port by ring and by mesh, MB at which both take as long, steps until a retry."""
    number(ring, 1.875, "tensors", "only one of a machine's ranks sends out of it; what does a rank of a ring send in all?")
    number(mesh, 8, "tensors", "each of 8 ranks sends 1/16 of the tensor to each of 8 others, twice")
    number(equal, 28 * 14e-6 * 12.5e9 / 6.125 / 1e6, "MB", "when is 30 alpha + 1.875 n beta the same as 2 alpha + 8 n beta?")
    number(again, 100 * math.log(4), "steps", "after which age does 4 exp(-age / 100) fall to 1?", 0.02)
    return "0.8 MB, and 139 steps"


@judged
def place(function: Function) -> str:
    """Check `function(topology, nodes)`: the nodes in an order in which a ring passes as few links as it can."""
    for numbered in (spine_leaf(4, 4, spines=2, oversubscription=4), fat_tree(4), star(5, 1e9)):
        for seed in range(3):
            topology, by_rack = _renumbered(numbered, dice := random.Random(seed))
            nodes = dice.sample(by_rack, len(by_rack))[seed:]  # some are taken by another job
            order = function(topology, list(nodes))
            case = f"on {topology.name}"
            refuse((not isinstance(order, list | tuple), f"{case} it gives {order!r}, and a list of nodes is wanted"))
            refuse((sorted(map(str, order)) != sorted(map(str, nodes)), f"{case} the order should hold each of the nodes once"))
            mine, least = _hops(topology, order), _hops(topology, [node for node in by_rack if node in nodes])
            refuse((mine > least, f"{case} a ring in your order passes {mine} links; {least} are enough: who is whose neighbor?"))
    racks = spine_leaf(4, 4, spines=2, oversubscription=4)
    mixed = _mixed(racks)
    return f"160 MB in {_ring(racks, function(racks, list(mixed))):.2f} ms on four racks; shuffled {_ring(racks, mixed):.2f}"


def _renumbered(topology: Topology, dice: random.Random) -> tuple[Topology, list[Hashable]]:
    """The same network with other numbers on its devices, that say nothing of their racks; and the devices rack by rack."""
    by_rack = dice.sample(topology.devices, len(topology.devices))
    new = dict(zip(topology.devices, by_rack, strict=True))
    graph = nx.DiGraph()
    graph.add_nodes_from(topology.graph.nodes(data=True))
    graph.add_edges_from((new.get(a, a), new.get(b, b), what) for a, b, what in topology.graph.edges(data=True))
    return Topology(graph, topology.name), by_rack


def _hops(topology: Topology, order: Sequence[Hashable]) -> int:
    """Links that a ring passes, once round."""
    return sum(len(topology.route(a, b).links) for a, b in zip(order, [*order[1:], order[0]], strict=True))


def _mixed(topology: Topology) -> list[Hashable]:
    return random.Random(0).sample(topology.devices, len(topology.devices))


def _ring(topology: Topology, order: Sequence[Hashable]) -> float:
    return 1e3 * played(all_reduce, topology, 160_000_000, ranks=list(order), trace=False).time


@judged
def fit(function: Function) -> str:
    """Check `function(sizes, seconds, ages, patience)`: (alpha, beta) by relative least squares in which old rows count less."""
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    for alpha, beta in ((10e-6, 1e-9), (1e-3, 1e-10)):
        got = _pair(function(sizes, alpha + beta * sizes, np.zeros(4), 10))
        said = f"a line of alpha {alpha:g} and beta {beta:g} is fitted as {got}"
        refuse((not np.allclose(got, (alpha, beta), rtol=1e-6), said))
    noisy = (10e-6 + 1e-9 * sizes) * np.array([1.1, 0.9, 1.1, 0.9])
    _same(function, sizes, noisy, np.zeros(4), "with an error of 10% at each size: a share of the time, so weigh by 1 / seconds")
    twice = np.tile(sizes, 2)
    changed = np.concatenate([10e-6 + 4e-9 * sizes, 10e-6 + 1e-9 * sizes])
    _same(function, twice, changed, np.repeat([50.0, 0.0], 4), "with rows from 50 steps ago, before the link got faster")
    _same(function, twice, changed, np.repeat([5.0, 0.0], 4), "with rows from 5 steps ago: an error counts exp(-age / 10)")
    _same(function, twice, changed, np.repeat([5.0, 0.0], 4), "with rows from 5 steps ago and a patience of 3", 3)
    return "at all sizes alike, and the past fades"


def _pair(given: Any) -> tuple[float, float]:
    refuse((not hasattr(given, "__len__") or len(given) != 2, f"it gives {given!r}; a pair (alpha, beta) is wanted"))
    return float(given[0]), float(given[1])


def _same(function: Function, sizes: np.ndarray, seconds: np.ndarray, ages: np.ndarray, case: str, patience: int = 10) -> None:
    beta, alpha = np.polyfit(sizes, seconds, 1, w=np.exp(-ages / patience) / seconds)
    got = _pair(function(sizes, seconds, ages, patience))
    said = f"{case}, alpha is {1e6 * alpha:.3f} us and beta {1e9 * beta:.3f} ns, not {1e6 * got[0]:.3f} and {1e9 * got[1]:.3f}"
    refuse((not np.allclose(got, (alpha, beta), rtol=1e-4), said))


@judged
def change(function: Function) -> str:
    """Check `function(now, then, setup, gain, horizon)`: whether steps of `then` seconds are worth a change from `now`."""
    shares, setups = (0.4, 0.6, 0.94, 0.96, 1.0, 1.5), (0.0, 0.3, 10.0)
    for now, share, setup, gain, horizon in product((1.0, 2e-3), shares, setups, (0.0, 0.05, 0.5), (1, 10)):
        then = share * now
        wanted = then < (1 - gain) * now and (now - then) * horizon > setup
        got = function(now, then, setup, gain, horizon)
        case = f"now {now:g} s, then {then:g} s, setup {setup:g} s, gain {gain:.0%}, horizon {horizon}"
        saved = f"a step saves {1 - then / now:.0%}, {horizon} of them {(now - then) * horizon:.3g} s"
        refuse((bool(got) != wanted, f"{case}: {saved}, so {'change' if wanted else 'stay'}"))
    return "216 cases"


@judged
def oracle(function: Function) -> str:
    """Check `function(stages, change)`: the least seconds by which all stages can be done, each change paid."""
    dice = random.Random(0)
    for _ in range(40):
        names = ["ring", "tree", "mesh"][: dice.randint(1, 3)]
        stages = [{name: dice.randint(1, 9) for name in names} for _ in range(dice.randint(1, 5))]
        cost = dice.choice([0, 1, 3, 20])
        ways = product(names, repeat=len(stages))
        wanted = min(sum(s[n] for s, n in zip(stages, way, strict=True)) + cost * _changes(way) for way in ways)
        got = function(stages, cost)
        said = f"for {stages} and {cost} s a change it gives {got!r}, and {wanted} is possible and the least"
        refuse((not isinstance(got, Real) or abs(float(got) - wanted) > 1e-9, said))
    long = [{"ring": 1 + k % 2, "tree": 2 - k % 2} for k in range(200)]
    got = function(long, 0.5)
    said = f"200 stages, 1 s by ring and tree in turn, else 2, changes 0.5 s: 299.5 s are the least, not {got!r}"
    refuse((got != 299.5, said))
    return "40 jobs, against all ways there are; and one of 200 stages"


def _changes(way: Sequence[str]) -> int:
    return sum(a != b for a, b in pairwise(way))


@judged
def decide(function: Function) -> str:
    """Check `function(comm, mine)`: the topology that is quickest on average, the same one on every rank."""
    for p in RANKS:
        for seed in range(4):
            dice = np.random.default_rng(seed)
            names = ["ring", "tree", "mesh", "star"][: 3 + seed % 2]
            times = [{str(name): dice.uniform(1, 2) for name in dice.permutation(names)} for _ in range(p)]

            def work(comm: Any, times: list[dict[str, float]] = times) -> Any:
                return function(comm, times[comm.rank])

            run = among(p, work)
            sums = {name: sum(mine[name] for mine in times) for name in times[0]}
            best = min(sums, key=sums.__getitem__)
            case, said = f"with {plural(p, 'rank')}", ", ".join(map(str, run))
            longest = run.trace.messages["nbytes"].max(initial=0)
            refuse(
                (len(set(map(str, run))) > 1, f"{case} they decide for {said}: who goes round a ring alone waits for ever"),
                (run[0] != best, f"{case} all decide for {run[0]!r}; on the average over the ranks {best!r} is the quickest"),
                (longest > 256, f"{case} a message has {longest} bytes, more than 256 bytes: one number for each topology does"),
            )
    return f"1 to {max(RANKS)} ranks, each with times of its own"
