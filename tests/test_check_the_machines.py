"""The checks of *The machines*: each refuses, in words, what readers hand in."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
from solutions import refused

from d2lps import Topology, topology
from d2lps_book.check import the_machines as check

Function = Callable[..., Any]


def test_units() -> None:
    assert check.units(0.783, 0.92, 100)
    refused(check.units(235 / 600, 0.92, 100), "Is 600 GB/s one direction, or both")
    refused(check.units(0.783, 23 / 200, 100), "How many bytes are 200 Gb")
    refused(check.units(0.783, 0.92, 12.5), "turn bytes into bits")
    refused(check.units(78.3, 92, 100), "a share from 0 to 1: not 78.3.")
    refused(check.units("78%", 0.92, 100), "a share from 0 to 1: not '78%'")


def test_spine() -> None:
    assert check.spine(48) and check.spine(48.005)
    refused(check.spine(60), "not twice the old time")
    refused(check.spine(30), "ms: not 30. What leaves a rack")
    refused(check.spine(0.048), "ms: not 0.048, which is a thousand times too small: in which unit is it asked?")


def test_ports() -> None:
    assert check.ports(2, 8.01)
    refused(check.ports(0.25, 8), "a port each, ms: not 0.25")
    refused(check.ports(0.002, 0.008), "a port each, ms: not 0.002, which is a thousand times too small")
    refused(check.ports(2, 2), "one port, ms: not 2. How many messages share it")
    refused(check.ports(8, 2), "a port each, ms: not 8")


def test_torus_times() -> None:
    assert check.torus_times(30, 1.6e12)
    refused(check.torus_times(16, 1.6e12), "count the messages on the fullest link")
    refused(check.torus_times(7.5, 1.6e12), "ms: not 7.5")
    refused(check.torus_times(30, 0.8e12), "Each of the 16 rings is cut in two places")
    refused(check.torus_times(30, 3.2e12), "One direction only")


def test_fat_tree() -> None:
    assert check.fat_tree(65_536, 5120, 6)
    refused(check.fat_tree(64**3, 5120, 6), "devices: pods, times edge switches")
    refused(check.fat_tree(65_536, 4096, 6), "those between the pods")
    refused(check.fat_tree(65_536, 5120, 3), "how does it come down")


Routes = list[tuple[int, ...]]
Capacity = dict[int, float]


def users_of(routes: Routes) -> Counter[int]:
    return Counter(link for route in routes for link in route)


def shortcut(routes: Routes, capacity: Capacity) -> list[float]:
    users = users_of(routes)
    return [min(capacity[link] / users[link] for link in route) for route in routes]


def repeated_shortcut(routes: Routes, capacity: Capacity) -> list[float]:
    rates, left = [0.0] * len(routes), dict(capacity)
    for _ in range(50):
        more = shortcut(routes, left)
        for message, route in enumerate(routes):
            rates[message] += more[message]
            for link in route:
                left[link] -= more[message]
    return rates


def in_order(routes: Routes, capacity: Capacity) -> list[float]:
    """First come, first served."""
    rates, left = [], dict(capacity)
    for route in routes:
        rates.append(min(left[link] for link in route))
        for link in route:
            left[link] -= rates[-1]
    return rates


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (shortcut, "message 0 gets 10 and could have more"),
        (repeated_shortcut, "message 1 gets 8; on each full link of its way somebody gets more, at its cost"),
        (in_order, "gets 0; on each full link of its way somebody gets more"),
        (lambda routes, capacity: [min(capacity[link] for link in route) for route in routes], "on link 0, which carries 20"),
        (lambda routes, capacity: [1e-3] * len(routes), "could have more"),
        (lambda routes, capacity: [1.0], "1 rates for 4 routes"),
    ],
)
def test_max_min(function: Function, words: str) -> None:
    refused(check.max_min(function), words)


def grid(rows: int, columns: int, bandwidth: float, latency: float, closed: bool = True, both: bool = True) -> Topology:
    graph = nx.DiGraph()
    graph.add_nodes_from([(r, c) for r in range(rows) for c in range(columns)], kind="device", forwards=True)
    for row, column in list(graph):
        for down, right in ((0, 1), (1, 0)):
            if not closed and (row + down == rows or column + right == columns):
                continue
            other = ((row + down) % rows, (column + right) % columns)
            for link in [((row, column), other), (other, (row, column))][: 1 + both]:
                graph.add_edge(*link, bandwidth=bandwidth, latency=latency)
    return Topology(graph, "grid")


def twisted(rows: int, columns: int, bandwidth: float, latency: float) -> Topology:
    """Four links each, but around one long ring."""
    graph, count = nx.DiGraph(), rows * columns
    graph.add_nodes_from(range(count), kind="device", forwards=True)
    for chip in range(count):
        for step in (1, -1, 2, -2):
            graph.add_edge(chip, (chip + step) % count, bandwidth=bandwidth, latency=latency)
    return Topology(graph, "twisted")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda r, c, b, a: grid(r, c, b, 0), "has latency 0, not 1e-06"),
        (lambda r, c, b, a: grid(r, c, 50e9, 1e-6), "3 x 5: the link"),
        (lambda r, c, b, a: grid(4, 4, b, a), "3 x 5: 16 devices, not 15"),
        (lambda r, c, b, a: grid(r, c, b, a, closed=False), "2 links out and 2 in, not 4 and 4"),
        (lambda r, c, b, a: topology.ring(r * c, b, a), "2 links out"),
        (twisted, "links to the farthest chip"),
        (lambda r, c, b, a: nx.DiGraph(), "a DiGraph, not a Topology"),
    ],
)
def test_torus(function: Function, words: str) -> None:
    refused(check.torus(function), words)
