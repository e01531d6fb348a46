"""Consistent hashing: which server has a key, so that a server more or less moves few keys."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b

POINTS = 128  # of a server


def point(name: str) -> int:
    """Where on the circle of 2^64 points a name lies: the same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


@cache
def places(server: int) -> list[tuple[int, int]]:
    """Where a server stands."""
    return [(point(f"server {server} point {number}"), server) for number in range(POINTS)]


class HashRing:
    """Each server stands at many points of a circle; a key belongs to the first server that follows it.

    A server that comes takes its share, 1/s of the keys, from all others; one that goes leaves its own to all others. No
    other key moves. Many points (virtual nodes) make the shares alike: they differ by about 1/sqrt(POINTS).

    >>> ring, without = HashRing([0, 1, 2]), HashRing([0, 2])
    >>> all(ring.owner(key) in (1, without.owner(key)) for key in map("key {}".format, range(1000)))
    True

    Cost of `owner`: log(s POINTS) comparisons. Source: Karger et al., STOC 1997; virtual nodes: Stoica et al., 2001.
    """

    def __init__(self, servers: Iterable[int]) -> None:
        self.circle = sorted(place for server in servers for place in places(server))  # (point, server)

    def owner(self, key: str) -> int:
        return self.circle[bisect(self.circle, (point(key), -1)) % len(self.circle)][1]
