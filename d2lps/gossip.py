"""Gossip: nobody adds up for all. Each rank mixes its tensor with a few others', again and again, and all approach the mean.

Ranks stand in a circle. A graph is the list of hops that a rank's messages make round it, the same list for every rank: so each
rank hears from as many as it tells, and all get equal shares of it. Whatever such a graph is, its mixing matrix is doubly
stochastic: rows sum to 1, or the ranks would not end with a mean; columns sum to 1, or some would count more than others.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from d2lps.arguments import named, whole
from d2lps.collectives.arguments import check_tensor, collective, doublings
from d2lps.comm import Communicator, RankDied
from d2lps.comm.aliasing import check_writable

# By name, the hops of a step among so many ranks; each distinct one but 0 counts, round the circle.
GRAPHS: dict[str, Callable[[int, int], Iterable[int]]] = {
    "ring": lambda size, step: (1, -1),
    "exponential": lambda size, step: doublings(size),
    "one_peer": lambda size, step: [1 << step % len(doublings(size))] if size > 1 else [],
}


def hops(graph: str, size: int, step: int = 0) -> list[int]:
    """How many places further round the circle of `size` ranks this step's messages go.

    >>> hops("ring", 8), hops("exponential", 8), [hops("one_peer", 8, step) for step in range(4)]
    ([1, 7], [1, 2, 4], [[1], [2], [4], [1]])

    Source: Lian et al. 2017 (ring); Assran et al. 2019, Ying et al. 2021 (exponential, and one peer of it a step).
    """
    lengths = named("graph", graph, GRAPHS)(whole("size", size), step)
    return sorted({hop % size for hop in lengths} - {0})


def neighbors(graph: str, rank: int, size: int, step: int = 0) -> tuple[list[int], list[int]]:
    """The ranks that `rank` sends to, and those that it receives from.

    >>> neighbors("exponential", 0, 8)
    ([1, 2, 4], [7, 6, 4])
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank!r} is not one of {size} ranks (0 to {size - 1})")
    far = hops(graph, size, step)
    return [(rank + hop) % size for hop in far], [(rank - hop) % size for hop in far]


def mixing_matrix(graph: str, size: int, step: int = 0) -> np.ndarray:
    """The matrix that one step multiplies the ranks' tensors by: [r, s] is how much of rank s is in rank r afterwards.

    >>> mixing_matrix("one_peer", 2)
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    far = [0, *hops(graph, size, step)]
    return np.mean([np.roll(np.eye(size), hop, axis=0) for hop in far], axis=0)


def spectral_gap(graph: str, size: int) -> float:
    """What share of the distance to the mean a step takes away, of that part of it which lasts longest.

    >>> round(spectral_gap("ring", 8), 3), spectral_gap("exponential", 8), spectral_gap("one_peer", 8)
    (0.195, 0.5, 1.0)

    After k steps (1 - gap)^k of the distance is left in the worst case. Where graphs alternate it is the geometric mean of their
    round; 1.0: after a round nothing is left, as of one peer if size is a power of two.
    """
    period = max(1, len(doublings(size))) if graph == "one_peer" else 1
    matrices = [mixing_matrix(graph, size, step) for step in range(period)]
    left = float(np.linalg.norm(reduce(np.matmul, matrices) - 1 / size, ord=2))
    return 1 - (left if left > 1e-12 else 0.0) ** (1 / period)  # what is smaller comes of rounding


@collective("tensor", "graph", "step")
def mix(comm: Communicator, tensor: Tensor, graph: str = "exponential", step: int = 0) -> None:
    """One step: `tensor` becomes the mean of this rank's and those that it receives.

    >>> mix(comm, tensor, "ring")                   # of [0.], [3.], [9.] on three ranks, [4.] on each      # doctest: +SKIP

    tensor: floating, the same shape on every rank. Each rank sends, and receives, n bytes for each hop, all at once: the step
    takes one latency. graph: "ring" (2 hops), "exponential" (ceil(log2 p)) or "one_peer" (1, another one in each step).
    """
    to, source = _checked(comm, tensor, graph, step)
    tensor.detach().mul_(1 / (1 + len(to)))
    arrived = [torch.empty_like(tensor) for _ in source]
    comm.step("mix {}", step)
    comm.exchange([(tensor, dst) for dst in to], zip(arrived, source, strict=True))
    for other in arrived:
        comm.combine(tensor, other)


def push_sum(comm: Communicator, tensor: Tensor, graph: str, step: int, gone: set[int]) -> None:
    """One step of `mix` among ranks that may die: a share that nobody takes stays here. Who is found dead is put into `gone`.

    >>> carried = torch.cat([value, torch.ones(1)])                                     # doctest: +SKIP
    >>> push_sum(comm, carried, "exponential", step, gone)                              # doctest: +SKIP
    >>> value = carried[:-1] / carried[-1]              # approaches the mean           # doctest: +SKIP

    Whoever hears from fewer than it tells, or from more, comes to hold too little or too much; a last element that was 1 on every
    rank is mixed in the same way, and what is divided by it is a mean. Costs what `mix` does. A simulation tells of a death
    at once; d2lps.run ends the whole run when a rank dies. Source: Kempe et al. 2003; Assran et al. 2019.
    """
    to, source = _checked(comm, tensor, graph, step)
    tensor.detach().mul_(1 / (1 + len(to)))
    share, arrived = tensor.clone(), {src: torch.empty_like(tensor) for src in source}
    comm.step("mix {}", step)
    receiving = {src: _tried(gone, src, comm.irecv, arrived[src], src) for src in source}
    sending = {dst: _tried(gone, dst, comm.isend, share, dst) for dst in to}
    for src, work in receiving.items():
        if work and _tried(gone, src, work.wait):
            comm.combine(tensor, arrived[src])
    for dst, work in sending.items():
        if not (work and _tried(gone, dst, work.wait)):
            comm.combine(tensor, share)


def _tried(gone: set[int], peer: int, act: Callable[..., Any], *args: Any) -> Any:
    """What `act(*args)` returns, or True; False if the peer is known to be dead, or is found dead now."""
    if peer in gone:
        return False
    try:
        return act(*args) or True
    except RankDied:
        gone.add(peer)
        return False


def _checked(comm: Communicator, tensor: Tensor, graph: str, step: int) -> tuple[list[int], list[int]]:
    """Whom this rank sends to, and receives from; the first look at what it was given."""
    check_tensor("tensor", tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"mixing needs a tensor of floating numbers, which have means, not of {tensor.dtype}")
    check_writable(tensor, "tensor")
    return neighbors(graph, comm.rank, comm.size, step)
