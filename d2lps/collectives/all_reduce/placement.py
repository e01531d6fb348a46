"""Where the ranks of a group live, what the links between them cost, and which algorithm is the cheapest there.

Known in a simulation; in the world, machines are asked for, and links are taken to be as `cost` has them.
"""

import hashlib
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from d2lps import cost
from d2lps.collectives.all_gather import all_gather_into_tensor
from d2lps.comm import Communicator
from d2lps.cost.choice import CANDIDATES

Given = float | None
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
    nodes = getattr(comm, "nodes", ())
    return tuple(nodes[member] for member in comm.members) if nodes else ()


def link(comm: Communicator) -> tuple[float, float]:
    """(alpha, beta) of the slowest route from a rank to the next; the constants of `cost` outside simulations."""
    nodes = nodes_of(comm)
    return slowest(comm.topology, nodes) if nodes else (cost.ALPHA, cost.BETA)


def slowest(topology: Any, nodes: tuple[Hashable, ...]) -> tuple[float, float]:
    """(alpha, beta) of the slowest route from a node to the next, and from the last to the first.

    All ranks of a simulation ask the same: a thousand of them should not look up a thousand routes each.
    """
    if (key := ("slowest", nodes)) not in topology.remembered:
        routes = [topology.route(here, there) for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
        topology.remembered[key] = max(route.latency for route in routes), 1 / min(route.bandwidth for route in routes)
    found: tuple[float, float] = topology.remembered[key]
    return found


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


# ---- the choice -------------------------------------------------------------------------------------------------------


def pick(comm: Communicator, nbytes: int, alpha: Given = None, beta: Given = None, overhead: Given = None) -> cost.Choice:
    """What `cost.choose` says for this group: the same on all ranks, since all know the same.

    alpha, beta: where not given, those of the slowest route from a rank to the next in the described cluster, or the
    constants of `cost` on real processes. On several machines of a described cluster "hierarchical" is a candidate too.
    """
    found = link(comm)
    alpha, beta = found[0] if alpha is None else alpha, found[1] if beta is None else beta
    return cost.choose(nbytes, comm.size, alpha, beta, overhead=overhead, **_machines(comm))


def _machines(comm: Communicator) -> dict[str, Any]:
    """What `cost.choose` should know of machines with equally many ranks each."""
    nodes = nodes_of(comm)
    groups = by_machine(comm) if nodes else []
    if len(groups) < 2 or len(groups[0]) < 2 or any(len(group) != len(groups[0]) for group in groups):
        return {}
    one, other = ([nodes[rank] for rank in group] for group in groups[:2])
    first, second = (set(comm.topology.route(*ends).links) for ends in zip(one[:2], other[:2], strict=True))
    one_port = bool(first & second)  # which others than these candidates would crowd
    candidates = ["ring", "halving_doubling"] if one_port else list(CANDIDATES)
    in_order = [rank for group in groups for rank in group] == list(range(comm.size))
    if not in_order or (one_port and comm.size.bit_count() > 1):
        candidates.remove("halving_doubling")  # its nearest ranks would not be in its own machine
    inner = [(len(one), *slowest(comm.topology, tuple(one)))]
    return {"inner": inner, "ports": "node" if one_port else "device", "candidates": candidates}
