"""Consistent hashing: which server has a key, so that a server more or less moves few keys."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b


def point(name: str) -> int:
    """Where on the circle of 2^64 points a name lies: the same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


@cache
def places(server: int, points: int) -> list[tuple[int, int]]:
    """Where a server stands."""
    return [(point(f"server {server} point {number}"), server) for number in range(points)]


class HashRing:
    """Each server stands at many points of a circle; a key belongs to the first server that follows it.

    A server that comes takes its share, 1/s of the keys, from all others; one that goes leaves its own to all others. No
    other key moves. Many points (virtual nodes) make the shares alike: they differ by about 1/sqrt(points).

    >>> ring = HashRing([0, 1, 2])
    >>> before = [ring.owner(f"key {i}") for i in range(1000)]
    >>> ring.remove(1)
    >>> all(old in (1, ring.owner(f"key {i}")) for i, old in enumerate(before))
    True

    Cost of `owner`: log(s points) comparisons. Source: Karger et al., STOC 1997; virtual nodes: Stoica et al., 2001.
    """

    def __init__(self, servers: Iterable[int] = (), points: int = 128) -> None:
        self.points = points
        self.circle: list[tuple[int, int]] = []  # (point, server), in order
        for server in servers:
            self.add(server)

    def add(self, server: int) -> None:
        self.circle = sorted(self.circle + places(server, self.points))

    def remove(self, server: int) -> None:
        self.circle = [(place, other) for place, other in self.circle if other != server]

    def owner(self, key: str) -> int:
        return self.circle[bisect(self.circle, (point(key), -1)) % len(self.circle)][1]
