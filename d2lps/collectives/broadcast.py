"""Broadcast: one rank's tensor, on every rank."""

import torch

from d2lps.collectives.arguments import check_rank, check_tensor, choose, collective
from d2lps.comm import Communicator, flat


@collective("tensor", "src", "algorithm")
def broadcast(comm: Communicator, tensor: torch.Tensor, src: int = 0, algorithm: str = "tree") -> None:
    """Copy `tensor` of rank `src` into `tensor` of every other rank.

    >>> tensor = torch.tensor([float(comm.rank)])       # [0.], [1.], [2.]     # doctest: +SKIP
    >>> broadcast(comm, tensor, src=1)                  # [1.], [1.], [1.]     # doctest: +SKIP

    tensor: any shape, the same on every rank. algorithm: "flat" (p - 1 steps; src sends (p - 1) n bytes) or "tree"
    (ceil(log2 p) steps; src sends ceil(log2 p) n bytes). In total (p - 1) n bytes either way.
    Source: Thakur, Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_tensor("tensor", tensor)
    check_rank(comm, "src", src)
    with flat(tensor) as data:
        choose(algorithm, {"flat": _flat, "tree": _tree})(comm, data, src)


def _flat(comm: Communicator, data: torch.Tensor, src: int) -> None:
    """The source sends to one rank after another."""
    if comm.rank != src:
        comm.recv(data, src)
        return
    for dst in range(comm.size):
        if dst != src:
            comm.step(f"broadcast to {dst}")
            comm.send(data, dst)


def _tree(comm: Communicator, data: torch.Tensor, src: int) -> None:
    """Every rank that has the data sends it on: 1, 2, 4, 8, ... ranks have it.

    Ranks are counted from the source: position 0 is src. In the step of distance d, positions below d send to d + own.
    """
    position = (comm.rank - src) % comm.size
    distance, step = 1, 1
    while distance < comm.size:
        comm.step(f"broadcast {step}")
        partner = position + distance if position < distance else position - distance
        peer = (partner + src) % comm.size
        if position < distance and partner < comm.size:
            comm.send(data, peer)
        elif distance <= position < 2 * distance:
            comm.recv(data, peer)
        distance, step = 2 * distance, step + 1
