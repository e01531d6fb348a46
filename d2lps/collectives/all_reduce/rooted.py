"""All-reduce by way of one rank: a reduce to rank 0, then a broadcast from it. The plain way, and its tree."""

from torch import Tensor

from d2lps.collectives.broadcast import broadcast
from d2lps.collectives.reduce import reduce
from d2lps.comm import Communicator, ReduceOp


def flat(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """Rank 0 takes in one rank after another, and hands the result to one after another.

    2(p - 1) steps; rank 0 sends (p - 1) n bytes, each other rank n. Time: 2(p - 1)(alpha + n beta).
    With 4 ranks and transfers of 10 ms: 60 ms. Source: Zhang et al., Dive into Deep Learning, "Parameter Servers".
    """
    reduce(comm, data, 0, op, algorithm="flat")
    broadcast(comm, data, 0, algorithm="flat")


def tree(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """The ranks pair off: half of them hand over what they have and are done, until rank 0 has all; then back.

    2L steps with L = ceil(log2 p); rank 0 sends L n bytes. Time: 2L(alpha + n beta).
    With 4 ranks and transfers of 10 ms: 40 ms. Source: Thakur, Rabenseifner, Gropp 2005 (binomial trees).
    """
    reduce(comm, data, 0, op, algorithm="tree")
    broadcast(comm, data, 0, algorithm="tree")
