"""All-reduce: the sum (or product, minimum, ...) of all ranks' tensors, on every rank. What data-parallel training lives on."""

import torch

from d2lps.collectives.arguments import check_reduction, check_tensor, choose, collective, divide
from d2lps.collectives.broadcast import broadcast
from d2lps.collectives.reduce import reduce
from d2lps.comm import Communicator, ReduceOp, flat


@collective("tensor", "op", "algorithm")
def all_reduce(
    comm: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, algorithm: str = "ring"
) -> None:
    """Combine the `tensor` of all ranks by `op`; every rank's `tensor` holds the result.

    >>> tensor = torch.tensor([1.0, 2.0]) * (comm.rank + 1)         # on 3 ranks   # doctest: +SKIP
    >>> all_reduce(comm, tensor)                        # tensor([6., 12.]) everywhere    # doctest: +SKIP

    tensor: any shape, the same on every rank. algorithm:
    "flat"    reduce to rank 0, one after another, and broadcast so: 2(p - 1) steps, rank 0 sends (p - 1) n bytes
    "tree"    the same by binomial trees: 2 ceil(log2 p) steps, rank 0 sends ceil(log2 p) n bytes
    "ring"    chunks of n/p bytes round a ring: 2(p - 1) steps, each rank sends 2(p - 1)/p n bytes, the least there is
    "native"  the world's own, gloo's or NCCL's, whose messages no trace sees
    The result is the same on all ranks to the bit; sums of floats differ in the last digits from algorithm to algorithm.
    Errors: AVG of integers is a ValueError. Source: Patarasuk, Yuan 2009 (ring); Thakur et al. 2005 (trees).
    """
    check_tensor("tensor", tensor)
    check_reduction(tensor, op)
    with flat(tensor) as data:
        choose(algorithm, {"flat": _flat, "tree": _tree, "ring": _ring, "native": _native})(comm, data, op)


def _flat(comm: Communicator, data: torch.Tensor, op: ReduceOp) -> None:
    reduce(comm, data, 0, op, algorithm="flat")
    broadcast(comm, data, 0, algorithm="flat")


def _tree(comm: Communicator, data: torch.Tensor, op: ReduceOp) -> None:
    reduce(comm, data, 0, op, algorithm="tree")
    broadcast(comm, data, 0, algorithm="tree")


def _ring(comm: Communicator, data: torch.Tensor, op: ReduceOp) -> None:
    """Two times round: first every chunk collects all ranks' contributions, then every chunk's sum is passed to all.

    In step s of the first round, rank r sends chunk r - s to its right and adds what comes from its left to chunk
    r - s - 1; after p - 1 steps it holds the whole sum of chunk r + 1.
    """
    size, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunks = data.tensor_split(size)
    scratch = torch.empty_like(chunks[0])  # the first chunk is never smaller than another
    for step in range(size - 1):
        comm.step(f"reduce-scatter {step + 1}/{size - 1}")
        outgoing, mine = chunks[(comm.rank - step) % size], chunks[(comm.rank - step - 1) % size]
        incoming = scratch[: mine.numel()]
        comm.sendrecv(outgoing, right, incoming, left)
        comm.combine(mine, incoming, op)
    divide(chunks[(comm.rank + 1) % size], op, size)
    for step in range(size - 1):
        comm.step(f"all-gather {step + 1}/{size - 1}")
        outgoing, incoming = chunks[(comm.rank - step + 1) % size], chunks[(comm.rank - step) % size]
        comm.sendrecv(outgoing, right, incoming, left)


def _native(comm: Communicator, data: torch.Tensor, op: ReduceOp) -> None:
    comm.native_all_reduce(data, ReduceOp.SUM if op == ReduceOp.AVG else op)
    divide(data, op, comm.size)
