"""The checks of *The machines*: each refuses, in words, what readers hand in."""

import networkx as nx
from solutions import refusing, tried

from d2lps import topology

EDGE, RATES = "bandwidth=bandwidth, latency=latency -> ", "while None in rates: -> {}\n    while None in rates:"
LONG = "row * columns + column + {}) % len(chips), columns)"

test_refused = refusing({
    "ex-machines-units units": [
        ("235 / 600, 0.92, 100", "Is 600 GB/s one direction, or both"), ("0.783, 23 / 200, 100", "How many bytes are 200 Gb"),
        ("0.783, 0.92, 12.5", "turn bytes into bits"), ("78.3, 92, 100", "a share from 0 to 1: not 78.3."),
        ("'78%', 0.92, 100", "a share from 0 to 1: not '78%'"),
    ],
    "ex-machines-fair max_min": [
        ("shortcut", "message 0 gets 10 and could have more"),
        (RATES.format("for _ in range(50):\n        for i, more in enumerate(shortcut(routes, left)):\n"
                      "            rates[i] = (rates[i] or 0) + more\n"
                      "            left.update({link: left[link] - more for link in routes[i]})"),
         "message 1 gets 8; on each full link of its way somebody gets more, at its cost"),
        (RATES.format("for i, route in enumerate(routes):\n        rates[i] = min(left[link] for link in route)\n"
                      "        left.update({link: left[link] - rates[i] for link in route})"),  # first come, first served
         "gets 0; on each full link of its way somebody gets more"),
        (lambda routes, capacity: [min(capacity[link] for link in route) for route in routes], "on link 0, which carries 20"),
        (lambda routes, capacity: [1e-3] * len(routes), "could have more"),
        (lambda routes, capacity: [1.0], "1 rates for 4 routes"),
    ],
    "ex-machines-spine spine": [
        ("60", "not twice the old time"), ("30", "ms: not 30. What leaves a rack"),
        ("0.048", "ms: not 0.048, which is a thousand times too small: in which unit is it asked?"),
    ],
    "ex-machines-ports ports": [
        ("0.25, 8", "a port each, ms: not 0.25"),
        ("0.002, 0.008", "a port each, ms: not 0.002, which is a thousand times too small"),
        ("2, 2", "one port, ms: not 2. How many messages share it"), ("8, 2", "a port each, ms: not 8"),
    ],
    "ex-machines-torus torus": [
        (f"{EDGE}bandwidth=bandwidth, latency=0", "has latency 0, not 1e-06"),
        (f"{EDGE}bandwidth=50e9, latency=1e-6", "3 x 5: the link"),
        ("lambda rows, columns, *link: torus(4, 4, *link)", "3 x 5: 16 devices, not 15"),
        ("graph.add_edge -> if all(abs(a - b) < 2 for a, b in zip(*link)): graph.add_edge",  # a grid with borders
         "2 links out and 2 in, not 4 and 4"),
        (lambda rows, columns, *link: topology.ring(rows * columns, *link), "2 links out"),
        ((f"row, (column + 1) % columns -> divmod(({LONG.format(1)}", f"(row + 1) % rows, column -> divmod(({LONG.format(2)}"),
         "links to the farthest chip"),  # four links each, but around one long ring
        (lambda rows, columns, *link: nx.DiGraph(), "a DiGraph, not a Topology"),
    ],
    "ex-machines-torus torus_times": [
        ("16, 1.6e12", "count the messages on the fullest link"), ("7.5, 1.6e12", "ms: not 7.5"),
        ("30, 0.8e12", "Each of the 16 rings is cut in two places"), ("30, 3.2e12", "One direction only"),
    ],
    "ex-machines-fat-tree fat_tree": [
        ("64**3, 5120, 6", "devices: pods, times edge switches"), ("65_536, 4096, 6", "those between the pods"),
        ("65_536, 5120, 3", "how does it come down"),
    ],
})  # fmt: skip


def test_rounded_answers_pass() -> None:
    for name, answer in ("units", "0.783, 0.92, 100"), ("spine", "48.005"), ("ports", "2, 8.01"):
        assert tried(f"ex-machines-{name} {name}", answer)
