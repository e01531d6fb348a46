"""Checks of *The machines*: units, fair shares, a network that lost a spine, ports, a torus, a fat tree."""

import random
from collections import Counter
from itertools import permutations

from d2lps.topology import Topology
from d2lps_book.check.exercise import Function, Wrong, answered, judged
from d2lps_book.check.tools import near, refuse

Routes = list[tuple[int, ...]]


@answered
def units(usual: float, port: float, network: float) -> str:
    """Check (a) and (b), shares of what one direction promises in bytes, and (c), Gb/s."""
    near("(a), a share from 0 to 1", usual, 235 / 300, "Is 600 GB/s one direction, or both added up?", 0.01)
    near("(b), a share from 0 to 1", port, 23 / 25, "How many bytes are 200 Gb?", 0.01)
    near("(c), Gb/s", network, 100, "Divide the bytes by the time, then turn bytes into bits", 0.01)
    return "nobody needs to call: two usual shares, and a paper that lost a factor of eight"


def _draw(dice: random.Random) -> tuple[Routes, dict[int, float]]:
    """Some messages over some links: each passes one to four of them."""
    capacity = {link: float(dice.choice([4, 10, 12, 16, 20, 50])) for link in range(dice.randint(1, 6))}
    routes = [tuple(dice.sample(sorted(capacity), dice.randint(1, min(4, len(capacity))))) for _ in range(dice.randint(1, 8))]
    return routes, capacity


def _cases() -> list[tuple[Routes, dict[int, float]]]:
    """First what a shortcut gets wrong, repeated or not; then forty drawn by lot."""
    dice = random.Random(1)
    return [([(0,), (0, 1), (1, 2), (2,)], {0: 20.0, 1: 12.0, 2: 4.0})] + [_draw(dice) for _ in range(40)]


@judged
def max_min(function: Function) -> str:
    """Check `function(routes, capacity)`: the max-min fair rate of each route."""
    cases = _cases()
    for routes, capacity in cases:
        rates = list(function(list(routes), dict(capacity)))
        where = f"routes {routes}, capacities {list(capacity.values())}"
        refuse((len(rates) != len(routes), f"{where}: {len(rates)} rates for {len(routes)} routes"))
        refuse(((trouble := _unfair(routes, rates, capacity)), f"{where}: {trouble}"))
    return f"{len(cases)} networks: no link too full, and no message that could have more"


def _unfair(routes: Routes, rates: list[float], capacity: dict[int, float]) -> str:
    """A link too full; or a message without a full link on its way on which nobody is faster."""
    load: Counter[int] = Counter()
    for rate, route in zip(rates, routes, strict=True):
        for link in route:
            load[link] += rate  # type: ignore[assignment]
    for link, used in sorted(load.items()):
        if used > capacity[link] * (1 + 1e-9):
            return f"{used:g} on link {link}, which carries {capacity[link]:g}"
    for message, (rate, route) in enumerate(zip(rates, routes, strict=True)):
        full = [link for link in route if load[link] >= capacity[link] * (1 - 1e-9)]
        if not full:
            return f"message {message} gets {rate:g} and could have more: no link on its way is full"
        if all(max(r for r, way in zip(rates, routes, strict=True) if link in way) > rate * (1 + 1e-9) for link in full):
            return f"message {message} gets {rate:g}; on each full link of its way somebody gets more, at its cost"
    return ""


@answered
def spine(milliseconds: float) -> str:
    """Check the time of the all-to-all with one spine of two left."""
    refuse((milliseconds == 60, "not twice the old time: which link was the fullest before, and which is it now?"))
    near("ms", milliseconds, 48, "What leaves a rack, and by how much uplink, now that half of it is gone?", 0.01)
    return "now the uplinks are the fullest"


@answered
def ports(device: float, node: float) -> str:
    """Check the times, in ms, with a port for each GPU and with one for the server."""
    near("a port each, ms", device, 2, "100 MB through a port of 400 Gb/s", 0.01)
    near("one port, ms", node, 8, "How many messages share it?", 0.01)
    return "four messages share the one port"


def _hops(rows: int, columns: int) -> Counter[int]:
    """How many ordered pairs of chips are so many links apart on a torus."""
    chips = [(row, column) for row in range(rows) for column in range(columns)]
    return Counter(min((a - c) % rows, (c - a) % rows) + min((b - d) % columns, (d - b) % columns)
                   for (a, b), (c, d) in permutations(chips, 2))  # fmt: skip


@judged
def torus(function: Function) -> str:
    """Check `function(rows, columns, bandwidth, latency)`: a Topology of chips in rows and columns closed to rings."""
    for rows, columns, bandwidth, latency in ((4, 4, 50e9, 1e-6), (3, 5, 25e9, 2e-6), (6, 3, 1e9, 5e-7)):
        if trouble := _no_torus(function(rows, columns, bandwidth, latency), rows, columns, bandwidth, latency):
            raise Wrong(f"{rows} x {columns}: {trouble}")
    return "4 x 4, 3 x 5 and 6 x 3: links, distances, bandwidths and latencies"


def _no_torus(grid: Topology, rows: int, columns: int, bandwidth: float, latency: float) -> str:
    if not isinstance(grid, Topology):
        return f"a {type(grid).__name__}, not a Topology"
    if len(grid.devices) != rows * columns:
        return f"{len(grid.devices)} devices, not {rows * columns}"
    for device in grid.devices:
        if (links := grid.graph.out_degree(device)) != 4 or grid.graph.in_degree(device) != 4:
            return f"{device} has {links} links out and {grid.graph.in_degree(device)} in, not 4 and 4"
    for src, dst, link in grid.graph.edges(data=True):
        for what, right in (("bandwidth", bandwidth), ("latency", latency)):
            if link.get(what) != right:
                return f"the link {src} > {dst} has {what} {link.get(what)}, not {right}"
    routes = [grid.route(*pair) for pair in permutations(grid.devices, 2)]
    hops = Counter(len(route.links) for route in routes)
    if hops != (right_hops := _hops(rows, columns)):
        return f"{max(hops)} links to the farthest chip, {max(right_hops)} on a torus; pairs by distance {sorted(hops.items())}"
    return ""


@answered
def torus_times(milliseconds: float, bisection: float) -> str:
    """Check the all-to-all of 4 x 4 chips in ms, and a pod's bisection bandwidth in bytes/s."""
    if milliseconds == 16:
        raise Wrong("16 ms is what evenly spread routes would make: count the messages on the fullest link of the fixed ones")
    near("all-to-all, ms", milliseconds, 30, "How many of the 240 routes pass the fullest link?", 0.01)
    cut = {0.8e12: "Each of the 16 rings is cut in two places", 3.2e12: "One direction only"}
    hint = cut.get(bisection, "How many links are cut, and what does each carry one way?")
    near("the bisection, bytes/s", bisection, 1.6e12, hint, 0.01)
    return "the fullest link decides, and a cut goes through every ring twice"


@answered
def fat_tree(devices: int, switches: int, links: int) -> str:
    """Check a fat tree of 64-port switches: devices, switches, links on the longest way."""
    refuse((devices != 64**3 // 4, f"not {devices} devices: pods, times edge switches in a pod, times ports that go down"))
    refuse((switches != 5 * 64**2 // 4, f"not {switches} switches: two stages in each pod, and those between the pods"))
    refuse((links != 6, f"not {links} links: how many stages does a message climb, and how does it come down?"))
    return "65,536 devices with switches that have 64 ports"
