"""Several messages at once."""

from collections.abc import Iterable

import torch

from d2lps.comm import Communicator

Addressed = tuple[torch.Tensor, int]  # a tensor, and the rank that it goes to or comes from


def exchange(comm: Communicator, sends: Iterable[Addressed], recvs: Iterable[Addressed]) -> None:
    """Post all messages, then wait for all: none waits for another, and they share the links.

    >>> exchange(comm, sends=[(mine, 1), (mine, 2)], recvs=[(room[1], 1), (room[2], 2)])       # doctest: +SKIP

    Two messages to one rank must stand in the order in which that rank receives them.
    """
    comm.exchange(sends, recvs)
