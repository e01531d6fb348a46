"""Where the ranks of a group live, and what the links between them cost: known in a simulation, asked in the world."""

import hashlib
from collections.abc import Hashable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from d2lps import cost
from d2lps.collectives.all_gather import all_gather_into_tensor
from d2lps.comm import Communicator

_asked: WeakKeyDictionary[Communicator, list[list[int]]] = WeakKeyDictionary()


def by_machine(comm: Communicator) -> list[list[int]]:
    """The ranks of each machine: `[[0, 1], [2, 3]]`.

    In a simulation "node3/gpu1" is on the machine "node3", and names without a slash are all on one machine. Real ranks
    tell each other the names of their machines, once for each communicator: 8 bytes a rank, which a trace shows.
    """
    if comm not in _asked:
        nodes = nodes_of(comm)
        _asked[comm] = _grouped([str(node).rpartition("/")[0] for node in nodes] if nodes else _ask(comm))
    return _asked[comm]


def nodes_of(comm: Communicator) -> tuple[Hashable, ...]:
    """The node of the topology that each rank lives on; empty outside simulations."""
    nodes = getattr(comm, "nodes", None)
    return tuple(nodes[member] for member in comm.members) if comm.topology is not None and nodes else ()


def link(comm: Communicator) -> tuple[float, float]:
    """(alpha, beta) of the slowest route from a rank to the next; the constants of `cost` outside simulations."""
    nodes = nodes_of(comm)
    return slowest(comm.topology, nodes) if nodes else (cost.ALPHA, cost.BETA)


@lru_cache(maxsize=16)
def slowest(topology: Any, nodes: tuple[Hashable, ...]) -> tuple[float, float]:
    """(alpha, beta) of the slowest route from a node to the next, and from the last to the first.

    All ranks of a simulation ask the same: a thousand of them should not look up a thousand routes each.
    """
    routes = [topology.route(here, there) for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
    return max(route.latency for route in routes), 1 / min(route.bandwidth for route in routes)


def _ask(comm: Communicator) -> list[int]:
    """A number for each rank's machine, made from its name."""
    comm.step("which machine?")
    digest = hashlib.sha1(str(comm.node).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device=comm.device)
    machines = mine.new_empty(comm.size)
    all_gather_into_tensor(comm, machines, mine, algorithm="bruck")
    return machines.tolist()


def _grouped(machines: list[str] | list[int]) -> list[list[int]]:
    """`_grouped(["a", "b", "a"]) == [[0, 2], [1]]`: machines in the order of their first ranks."""
    groups: dict[object, list[int]] = {}
    for rank, machine in enumerate(machines):
        groups.setdefault(machine, []).append(rank)
    return list(groups.values())
