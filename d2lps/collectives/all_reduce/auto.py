"""All-reduce by whichever algorithm the formulas find cheapest."""

from typing import Any

from d2lps import cost
from d2lps.collectives.all_reduce.placement import by_machine, link, nodes_of, slowest
from d2lps.comm import Communicator
from d2lps.cost.choice import CANDIDATES

Given = float | None


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
    known: dict[str, Any] = {"inner": [(len(one), *slowest(comm.topology, tuple(one)))]}
    ways = [set(comm.topology.route(*ends).links) for ends in zip(one[:2], other[:2], strict=True)]
    candidates = list(CANDIDATES)
    if ways[0] & ways[1]:  # they leave by one port, which others than these would crowd
        known["ports"], candidates = "node", ["ring", "halving_doubling"]
    in_order = [rank for group in groups for rank in group] == list(range(comm.size))
    if not in_order or ("ports" in known and comm.size.bit_count() > 1):
        candidates.remove("halving_doubling")  # its nearest ranks would not be in its own machine
    return known | {"candidates": candidates}
