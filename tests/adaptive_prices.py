"""Hundreds of steps in a moment: each distinct all-reduce is simulated once, and its price remembered.

A sequence of stages is then played with a controller that is told prices as if it had measured them, with one topology
throughout, and by an oracle that knows all stages beforehand. `test_adaptive.py` holds this against whole simulations.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from d2lps.adaptive import Controller, neighbors
from d2lps.adaptive.all_reduce import HELLO
from d2lps.collectives import all_reduce
from d2lps.simulator import Narrow, simulate
from d2lps.topology import hgx_h100, multi_node, spine_leaf

NETS = {
    "two machines": multi_node(hgx_h100(), 2, 12.5e9, 5e-6, ports="node"),
    "four racks": spine_leaf(4, 2, spines=1, bandwidth=12.5e9, oversubscription=2, latency=5e-6),
}
WIRES = {"two machines": ("node0/nic", "network"), "four racks": ("leaf0", "spine0")}
TOPOLOGIES = ("ring", "double_tree", "blockwise")
ROUND_TRIPS = 2


class Stage(NamedTuple):
    """So many steps in which as many buckets of equal length are summed, by some of the ranks, over a wire that is narrowed."""

    steps: int
    nbytes: int
    buckets: int = 8
    narrowed: float = 1.0
    ranks: int = 8


@cache
def price(net: str, name: str, nbytes: int, narrowed: float, ranks: int) -> float:
    faults = [Narrow(WIRES[net], narrowed)] if narrowed != 1 else []
    job = partial(all_reduce, algorithm=name)
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return simulate(job, NETS[net], tensor, device="meta", ranks=places(net, ranks), faults=faults, trace=False).time


def places(net: str, ranks: int) -> list:
    """Evenly on all machines or racks."""
    every = len(NETS[net].devices) // ranks
    return NETS[net].devices[::every]


@cache
def handshakes(net: str, before: frozenset[str], names: frozenset[str], ranks: int) -> float:
    """Seconds to open what `before` had not: there and back, twice, all at once."""
    pairs = {(a, b) for a in range(ranks) for b in wanted(names, a, ranks) - wanted(before, a, ranks)}
    nodes = places(net, ranks)
    routes = [NETS[net].route(nodes[a], nodes[b]) for a, b in pairs]
    return 2 * ROUND_TRIPS * max((route.latency + HELLO / route.bandwidth for route in routes), default=0.0)


def wanted(names: frozenset[str], rank: int, ranks: int) -> set[int]:
    return set().union(*(neighbors(name, rank, ranks) for name in names))


def fixed(net: str, stages: Sequence[Stage], name: str) -> float:
    """Seconds of the whole job with one topology, whose connections are set up once."""
    first = handshakes(net, frozenset(), frozenset([name]), stages[0].ranks)
    return first + sum(s.steps * s.buckets * price(net, name, s.nbytes, s.narrowed, s.ranks) for s in stages)


def oracle(net: str, stages: Sequence[Stage]) -> float:
    """The best topology for each stage, changes paid, by looking at all stages from the beginning."""
    spent = {"": 0.0}
    for s in stages:
        spent = {
            name: s.steps * s.buckets * price(net, name, s.nbytes, s.narrowed, s.ranks)
            + min(so_far + handshakes(net, frozenset([old] if old else []), frozenset([name]), s.ranks)
                  for old, so_far in spent.items())
            for name in TOPOLOGIES
        }  # fmt: skip
    return min(spent.values())


def played(net: str, stages: Sequence[Stage], controller: Controller) -> float:
    """Seconds with a controller: it is told prices, and pays for its trials, its changes and for agreeing."""
    total, setup, opened, laps, before = 0.0, 0.0, frozenset[str](), {}, 0
    for s in stages:
        for _ in range(s.steps):
            plan = controller.plan([s.nbytes] * s.buckets, s.ranks)
            names = frozenset([controller.current, *plan])
            if s.ranks != before:
                opened, before = frozenset(), s.ranks
            opening = handshakes(net, opened, names, s.ranks) if names != opened else 0.0
            opened, total, setup = names, total + opening, setup + opening
            for name in plan:
                laps.setdefault((name, s.nbytes), []).append(price(net, name, s.nbytes, s.narrowed, s.ranks))
                total += laps[name, s.nbytes][-1]
            while controller.due:
                told = {key: sum(times) / len(times) for key, times in laps.items()}
                nbytes = 8 * (len(told) + 1)
                agreeing = price(net, controller.current, nbytes, s.narrowed, s.ranks)
                laps, total = {(controller.current, nbytes): [agreeing]}, total + agreeing
                controller.observe(told, setup or None)
                setup = 0.0
    return total
