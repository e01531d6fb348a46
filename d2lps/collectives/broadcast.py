"""Broadcast: one rank's tensor, on every rank."""

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.arguments import check_rank, check_tensor, collective, doublings
from d2lps.comm import Communicator, flat


@collective("tensor", "src", "algorithm")
def broadcast(comm: Communicator, tensor: Tensor, src: int = 0, algorithm: str = "tree") -> None:
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
        named("algorithm", algorithm, {"flat": _flat, "tree": _tree})(comm, data, src)


def _flat(comm: Communicator, data: Tensor, src: int) -> None:
    """The source sends to one rank after another."""
    if comm.rank != src:
        comm.recv(data, src)
        return
    for dst in range(comm.size):
        if dst != src:
            comm.step("broadcast to {}", dst)
            comm.send(data, dst)


def _tree(comm: Communicator, data: Tensor, src: int) -> None:
    """Every rank that has the data sends it on: 1, 2, 4, 8, ... ranks have it.

    Ranks are counted from the source: position 0 is src. In the step of distance d, positions below d send to d + own.
    """
    position = (comm.rank - src) % comm.size
    for step, distance in enumerate(doublings(comm.size), 1):
        comm.step("broadcast {}", step)
        if position < distance and position + distance < comm.size:
            comm.send(data, (comm.rank + distance) % comm.size)
        elif distance <= position < 2 * distance:
            comm.recv(data, (comm.rank - distance) % comm.size)
