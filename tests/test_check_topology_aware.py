"""The checks of *Topology-aware and dynamic*: wrong answers are refused in words."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from solutions import refused

from d2lps.collectives import all_reduce, broadcast
from d2lps_book.check import topology_aware as check


@pytest.mark.parametrize(
    ("answers", "word"),
    [((15, 8, 0.8, 139), "only one"), ((1.875, 1.875, 0.8, 139), "each of 8"), ((1.875, 8, 800, 139), "thousand times too large"),
     ((1.875, 8, 0.6, 139), "when is 30"), ((1.875, 8, 0.8, 400), "which age")],
)  # fmt: skip
def test_by_hand_refuses(answers, word):
    refused(check.by_hand(*answers), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda topology, nodes: nodes, "links"), (lambda topology, nodes: sorted(nodes), "links"),
     (lambda topology, nodes: nodes[:-1], "each of the nodes once"), (lambda topology, nodes: len(nodes), "a list of nodes"),
     (lambda topology, nodes: topology.devices[::2] + topology.devices[1::2], "links"),
     (lambda topology, nodes: topology.devices, "links"),
     (lambda topology, nodes: [node for node in topology.devices if node in nodes], "links"),
     (lambda topology, nodes: sorted(nodes, key=lambda node: int(node[3:])), "links")],
)  # fmt: skip
def test_place_refuses(wrong, word):
    refused(check.place(wrong), word)


def test_place_may_use_up_the_list_that_it_is_given():
    def place(topology, nodes):
        order = [nodes.pop(0)]
        while nodes:
            nearest = min(nodes, key=lambda node: len(topology.route(order[-1], node).links))
            order.append(nodes.pop(nodes.index(nearest)))
        return order

    assert check.place(place)


def plain(sizes, seconds, ages, patience):
    return np.polyfit(sizes, seconds, 1)[::-1]


def never_forgets(sizes, seconds, ages, patience):
    return np.polyfit(sizes, seconds, 1, w=1 / seconds)[::-1]


def forgets_too_slowly(sizes, seconds, ages, patience):
    return np.polyfit(sizes, seconds, 1, w=np.exp(-ages / patience / 2) / seconds)[::-1]


def patience_of_10(sizes, seconds, ages, patience):
    return np.polyfit(sizes, seconds, 1, w=np.exp(-ages / 10) / seconds)[::-1]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(plain, "weigh by 1 / seconds"), (never_forgets, "50 steps ago"), (forgets_too_slowly, "steps ago"),
     (patience_of_10, "patience of 3"),
     (lambda *_: 3, "a pair"), (lambda *args: never_forgets(*args)[::-1], "is fitted as")],
)  # fmt: skip
def test_fit_refuses(wrong, word):
    refused(check.fit(wrong), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda now, then, setup, gain, horizon: then < now, "so stay"), (lambda *_: False, "so change"),
     (lambda now, then, setup, gain, horizon: then < (1 - gain) * now, "so stay"),
     (lambda now, then, setup, gain, horizon: then * (1 + gain) < now and (now - then) * horizon > setup, "gain 50%"),
     (lambda now, then, setup, gain, horizon: now - then > gain and (now - then) * horizon > setup, "so change")],
)  # fmt: skip
def test_change_refuses(wrong, word):
    refused(check.change(wrong), word)


def free_changes(stages, change):
    return sum(min(stage.values()) for stage in stages)


def never(stages, change):
    return min(sum(stage[name] for stage in stages) for name in stages[0])


def greedy(stages, change):
    total, here = 0, None
    for stage in stages:
        best = min(stage, key=lambda name: stage[name] + change * (here not in (None, name)))
        total, here = total + stage[best] + change * (here not in (None, best)), best
    return total


@pytest.mark.parametrize("wrong", [free_changes, never, greedy])
def test_oracle_refuses(wrong):
    refused(check.oracle(wrong), "is possible and the least")


def gives_up_when_long(stages, change):
    if len(stages) > 5:
        return free_changes(stages, change)
    ways = product(stages[0], repeat=len(stages))
    paid = ((sum(s[n] for s, n in zip(stages, way, strict=True)), sum(a != b for a, b in pairwise(way))) for way in ways)
    return min(seconds + change * changes for seconds, changes in paid)


def test_oracle_tries_a_job_too_long_to_list_its_ways():
    refused(check.oracle(gives_up_when_long), "299.5 s are the least")


def rank_0_says(comm, mine):
    names = sorted(mine)
    number = torch.tensor([names.index(min(mine, key=mine.get))])
    broadcast(comm, number, 0)
    return names[number.item()]


def in_own_order(comm, mine):
    times = torch.tensor([*mine.values()], dtype=torch.float64)
    all_reduce(comm, times, algorithm="tree")
    return [*mine][int(times.argmin())]


def everything(comm, mine):
    names = sorted(mine)
    times = torch.tensor([mine[name] for name in names] * 50, dtype=torch.float64)
    all_reduce(comm, times, algorithm="tree")
    return names[int(times[: len(names)].argmin())]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda comm, mine: min(mine, key=mine.get), "they decide for"), (rank_0_says, "on the average"),
     (everything, "256 bytes"), (in_own_order, "they decide for"), (lambda comm, mine: "ring", "on the average")],
)  # fmt: skip
def test_decide_refuses(wrong, word):
    refused(check.decide(wrong), word)
