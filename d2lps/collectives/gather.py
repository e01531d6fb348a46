"""Gather: every rank's tensor, in a list on one of them."""

from collections.abc import Sequence

import torch

from d2lps.collectives.arguments import check_root_list, choose, collective
from d2lps.comm import Communicator
from d2lps.comm.staging import stage


@collective("tensor", "dst", "algorithm")
def gather(
    comm: Communicator,
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    algorithm: str = "tree",
) -> None:
    """Copy `tensor` of rank r into `gather_list[r]` of rank `dst`.

    >>> room = [torch.empty(1) for _ in range(3)] if comm.rank == 0 else None       # doctest: +SKIP
    >>> gather(comm, torch.tensor([float(comm.rank)]), room, dst=0)                 # doctest: +SKIP
    >>> room                                            # [0.], [1.], [2.] on rank 0     # doctest: +SKIP

    tensor: n / p bytes, the same shape on every rank; gather_list: p such tensors on dst, None elsewhere.
    algorithm: "linear" (p - 1 steps) or "tree" (ceil(log2 p) steps). Rank dst receives (p - 1)/p n bytes either way; in
    the tree the others pass on what is not theirs. Source: Thakur, Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_root_list(comm, "gather_list", gather_list, "dst", dst, tensor)
    choose(algorithm, {"linear": _linear, "tree": _tree})(comm, tensor, gather_list or [], dst)


def _linear(comm: Communicator, tensor: torch.Tensor, room: Sequence[torch.Tensor], dst: int) -> None:
    """The destination takes in one rank after another."""
    if comm.rank != dst:
        comm.send(tensor, dst)
        return
    for src in range(comm.size):
        comm.step(f"gather from {src}")
        if src == dst:
            comm.copy(room[src], tensor)
        else:
            comm.recv(room[src], src)


def _tree(comm: Communicator, tensor: torch.Tensor, room: Sequence[torch.Tensor], dst: int) -> None:
    """Scatter's tree run backwards: neighbours join what they hold, then neighbours of neighbours.

    Ranks are counted from the destination. A rank holds the parts of positions own .. own + count - 1.
    """
    position, length = (comm.rank - dst) % comm.size, tensor.numel()
    reach = 1  # how many positions, from its own on, a rank will ever hold
    while position % (2 * reach) == 0 and reach < comm.size:
        reach *= 2
    held = tensor.new_empty(min(reach, comm.size - position) * length)
    comm.copy(held[:length], stage(tensor))
    half, step = 1, 1
    while half < comm.size:
        comm.step(f"gather {step}")
        if position % (2 * half) == half:
            comm.send(held, (position - half + dst) % comm.size)
        elif position % (2 * half) == 0 and position + half < comm.size:
            count = min(half, comm.size - position - half)
            comm.recv(held[half * length : (half + count) * length], (position + half + dst) % comm.size)
        half, step = 2 * half, step + 1
    for index, part in enumerate(room):
        place = (index - dst) % comm.size
        comm.copy(part, held[place * length : (place + 1) * length])
