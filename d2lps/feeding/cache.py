"""What a machine keeps of what it has read: two rules for which of it goes when there is room for no more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import log
from typing import Any

from d2lps.arguments import named, whole


class Cache:
    """The last things read ("lru", least recently used goes), or the first ones, for good ("pinned").

    >>> cache = Cache(room=2, rule="lru")
    >>> [cache.get(key, str.upper) for key in "abcab"], cache.hits
    (['A', 'B', 'C', 'A', 'B'], 0)
    >>> cache = Cache(room=2, rule="pinned")
    >>> [cache.get(key, str.upper) for key in "abcab"], cache.hits
    (['A', 'B', 'C', 'A', 'B'], 2)

    room: how many things, all of one size. get(key, load): what is kept, or `load(key)`. hits and misses are counted.
    Pinned is the MinIO cache of Mohan et al. 2021.
    """

    def __init__(self, room: int, rule: str = "lru") -> None:
        self.room, self.rule = whole("room", room), rule
        named("rule", rule, HITS)
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: Hashable, load: Callable[[Any], Any]) -> Any:
        if key in self.kept:
            self.hits += 1
            self.kept.move_to_end(key)
            return self.kept[key]
        self.misses += 1
        value = load(key)
        if self.rule == "lru" or len(self.kept) < self.room:
            self.kept[key] = value
        if len(self.kept) > self.room:
            self.kept.popitem(last=False)
        return value


def lru_hits(share: float) -> float:
    """f + (1 - f) ln(1 - f): the share of hits when each epoch reads everything once in a new random order.

    >>> round(lru_hits(0.5), 3)
    0.153

    share: f, of all things how many the cache has room for. A sample at place u of one epoch (0 to 1) and v of the next is still
    there if fewer than f others came between: (1 - u) after it in the first, v before it in the second, of which (1 - u) v are
    the same ones. That is u (1 - v) > 1 - f, and both factors are uniform.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r} is not from 0 to 1")
    return share + (1 - share) * log(1 - share) if share < 1 else 1.0


def pinned_hits(share: float) -> float:
    """f: what is kept is asked for once an epoch, whatever the order. `pinned_hits(0.5) == 0.5`"""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r} is not from 0 to 1")
    return share


HITS = {"lru": lru_hits, "pinned": pinned_hits}  # rule: the share of hits from the second epoch on
