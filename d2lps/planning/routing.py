"""Which of several equally short ways each message takes: by chance, as switches that hash do, or by looking."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise

import networkx as nx

from d2lps.topology import Topology

Pair = tuple[Hashable, Hashable]
Way = tuple[Hashable, ...]  # nodes


class Routed(Topology):
    """A topology in which some pairs have ways of their own; all others go as before."""

    def __init__(self, topology: Topology, ways: dict[Pair, Way]) -> None:
        super().__init__(topology.graph, topology.name)
        self.ways = ways

    def _way(self, src: Hashable, dst: Hashable) -> list[Hashable]:
        way = self.ways.get((src, dst))
        return list(way) if way is not None else super()._way(src, dst)


def ecmp(topology: Topology, pairs: Iterable[Pair], seed: int = 0) -> Routed:
    """Equal-cost multi-path: each pair's messages take one of the shortest ways, whichever the hash says. They may collide.

    >>> from d2lps.topology import fat_tree
    >>> len({ecmp(fat_tree(4), [("gpu0", "gpu15")], seed).route("gpu0", "gpu15").links for seed in range(99)})
    4

    Source: Al-Fares et al. 2010, who measure what collisions cost.
    """
    dice = random.Random(seed)
    return _routed(topology, pairs, lambda ways: dice.choice(ways))


def adaptive_routing(topology: Topology, pairs: Iterable[Pair]) -> Routed:
    """One pair after another takes the shortest way whose fullest link has the fewest so far, as adaptive routing tends to."""
    taken: Counter[Pair] = Counter()

    def emptiest(ways: Sequence[Way]) -> Way:
        def load(way: Way) -> tuple[int, int]:
            links = [taken[link] for link in pairwise(way)]
            return max(links), sum(links)

        best = min(ways, key=load)
        taken.update(pairwise(best))
        return best

    return _routed(topology, pairs, emptiest)


def _routed(topology: Topology, pairs: Iterable[Pair], choose: Callable[[Sequence[Way]], Way]) -> Routed:
    """ValueError for a node that there is not, and a pair without a way."""
    ways: dict[Pair, Way] = {}
    for src, dst in pairs:
        topology.route(src, dst)
        ways[src, dst] = choose(sorted(map(tuple, nx.all_shortest_paths(topology.graph, src, dst)), key=str))
    return Routed(topology, ways)
