"""Reduce: the sum (or product, minimum, ...) of all ranks' tensors, on one of them."""

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.arguments import check_rank, check_tensor, collective, divide, doublings
from d2lps.comm import Communicator, ReduceOp, flat
from d2lps.comm.ops import check_op


@collective("tensor", "dst", "op", "algorithm")
def reduce(comm: Communicator, tensor: Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM, algorithm: str = "tree") -> None:
    """Combine the `tensor` of all ranks by `op` into that of rank `dst`; the others' stay as they were.

    >>> tensor = torch.tensor([float(comm.rank)])       # [0.], [1.], [2.]     # doctest: +SKIP
    >>> reduce(comm, tensor, dst=2)                     # [0.], [1.], [3.]     # doctest: +SKIP

    tensor: any shape, the same on every rank. algorithm: "flat" (p - 1 steps; dst receives (p - 1) n bytes) or "tree"
    (ceil(log2 p) steps; dst receives ceil(log2 p) n bytes). Each other rank sends n bytes.
    Errors: AVG of integers is a ValueError; sums may overflow before they are divided: see `all_reduce`. Source: Thakur,
    Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_tensor("tensor", tensor)
    check_rank(comm, "dst", dst)
    check_op(op, tensor.dtype)
    with flat(tensor) as data:
        named("algorithm", algorithm, {"flat": _flat, "tree": _tree})(comm, data, dst, op)
        if comm.rank == dst:
            divide(data, op, comm.size)


def _flat(comm: Communicator, data: Tensor, dst: int, op: ReduceOp) -> None:
    """The destination takes in one rank after another."""
    if comm.rank != dst:
        comm.send(data, dst)
        return
    scratch = data.new_empty(data.shape)
    for src in range(comm.size):
        if src != dst:
            comm.step("reduce from {}", src)
            comm.recv(scratch, src)
            comm.combine(data, scratch, op)


def _tree(comm: Communicator, data: Tensor, dst: int, op: ReduceOp) -> None:
    """Broadcast's tree run backwards: in each step half of the ranks that are left give what they have to the other half.

    Ranks are counted from the destination: position 0 is dst. In the step of distance d, position d + k sends to k.
    """
    position = (comm.rank - dst) % comm.size
    total, incoming = data, None
    for step, distance in enumerate(reversed(doublings(comm.size)), 1):
        comm.step("reduce {}", step)
        if position >= distance:
            comm.send(total, (comm.rank - distance) % comm.size)
            return
        if position + distance < comm.size:
            if incoming is None:
                incoming = data.new_empty(data.shape)
                if position:  # its tensor stays as it was
                    total = data.new_empty(data.shape)
                    comm.copy(total, data)
            comm.recv(incoming, (comm.rank + distance) % comm.size)
            comm.combine(total, incoming, op)
