"""Reduce: the sum (or product, minimum, ...) of all ranks' tensors, on one of them."""

import torch

from d2lps.collectives.arguments import check_rank, check_reduction, check_tensor, choose, collective, divide
from d2lps.comm import Communicator, ReduceOp, flat


@collective("tensor", "dst", "op", "algorithm")
def reduce(
    comm: Communicator, tensor: torch.Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM, algorithm: str = "tree"
) -> None:
    """Combine the `tensor` of all ranks by `op` into that of rank `dst`; the others' stay as they were.

    >>> tensor = torch.tensor([float(comm.rank)])       # [0.], [1.], [2.]     # doctest: +SKIP
    >>> reduce(comm, tensor, dst=2)                     # [0.], [1.], [3.]     # doctest: +SKIP

    tensor: any shape, the same on every rank. algorithm: "flat" (p - 1 steps; dst receives (p - 1) n bytes) or "tree"
    (ceil(log2 p) steps; dst receives ceil(log2 p) n bytes). Each other rank sends n bytes.
    Errors: AVG of integers is a ValueError. Source: Thakur, Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_tensor("tensor", tensor)
    check_rank(comm, "dst", dst)
    check_reduction(tensor, op)
    with flat(tensor) as data:
        choose(algorithm, {"flat": _flat, "tree": _tree})(comm, data, dst, op)
        if comm.rank == dst:
            divide(data, op, comm.size)


def _flat(comm: Communicator, data: torch.Tensor, dst: int, op: ReduceOp) -> None:
    """The destination takes in one rank after another."""
    if comm.rank != dst:
        comm.send(data, dst)
        return
    scratch = torch.empty_like(data)
    for src in range(comm.size):
        if src != dst:
            comm.step(f"reduce from {src}")
            comm.recv(scratch, src)
            comm.combine(data, scratch, op)


def _tree(comm: Communicator, data: torch.Tensor, dst: int, op: ReduceOp) -> None:
    """Broadcast's tree run backwards: in each step half of the ranks that are left give what they have to the other half.

    Ranks are counted from the destination: position 0 is dst. In the step of distance d, position d + k sends to k.
    """
    position = (comm.rank - dst) % comm.size
    total = data if comm.rank == dst else None  # the others collect in a copy, so that their tensor stays as it was
    scratch = None
    distance = 1
    while distance < comm.size:
        distance *= 2
    step = 1
    while distance > 1:
        distance, step = distance // 2, step + 1
        comm.step(f"reduce {step - 1}")
        if distance <= position < 2 * distance:
            comm.send(data if total is None else total, (position - distance + dst) % comm.size)
        elif position < distance and position + distance < comm.size:
            if total is None:
                total = torch.empty_like(data)
                comm.copy(total, data)
            scratch = torch.empty_like(data) if scratch is None else scratch
            comm.recv(scratch, (position + distance + dst) % comm.size)
            comm.combine(total, scratch, op)
