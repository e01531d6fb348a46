"""All-reduce by blocks: each rank is the server of one block, and all talk to all at once."""

from torch import Tensor

from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator, ReduceOp


def blockwise(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """Rank r adds up block r of all ranks, then hands the sum to all.

    2 steps; each rank sends 2(p - 1)/p n bytes, in 2(p - 1) messages, and needs room for n(p - 1)/p more. Time where no
    link is shared by more than one rank: 2 alpha + 2(p - 1)/p n beta. With 4 ranks and n beta = 10 ms: 15 ms.
    Source: Zhang et al., Dive into Deep Learning, "Parameter Servers".
    """
    blocks = comm.chunks(data, comm.size)
    mine = blocks[comm.rank]
    others = [(comm.rank + k) % comm.size for k in range(1, comm.size)]  # everyone begins with another one
    incoming = [mine.new_empty(mine.shape) for _ in others]
    comm.step("reduce-scatter")
    comm.exchange([(blocks[dst], dst) for dst in others], zip(incoming, others, strict=True))
    for block in incoming:
        comm.combine(mine, block, op)
    divide(mine, op, comm.size)
    comm.step("all-gather")
    comm.exchange([(mine, dst) for dst in others], [(blocks[src], src) for src in others])
