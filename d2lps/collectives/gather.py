"""Gather: every rank's tensor, in a list on one of them."""

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.arguments import Tensors, check_apart, check_root_list, collective, doublings
from d2lps.comm import Communicator
from d2lps.comm.staging import stage


@collective("tensor", "dst", "algorithm")
def gather(comm: Communicator, tensor: Tensor, gather_list: Tensors | None = None, dst: int = 0, algorithm: str = "tree") -> None:
    """Copy `tensor` of rank r into `gather_list[r]` of rank `dst`.

    >>> room = [torch.empty(1) for _ in range(3)] if comm.rank == 0 else None       # doctest: +SKIP
    >>> gather(comm, torch.tensor([float(comm.rank)]), room, dst=0)                 # doctest: +SKIP
    >>> room                                            # [0.], [1.], [2.] on rank 0     # doctest: +SKIP

    tensor: n / p bytes, the same shape on every rank; gather_list: p such tensors on dst, None elsewhere. None of them shares
    memory with another, and `tensor` may be one of them, as a whole.
    algorithm: "linear" (p - 1 steps) or "tree" (ceil(log2 p) steps). Rank dst receives (p - 1)/p n bytes either way; in
    the tree the others pass on what is not theirs. Source: Thakur, Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_root_list(comm, "gather_list", gather_list, "dst", dst, tensor)
    check_apart("gather_list", gather_list or [], "tensor", tensor)
    named("algorithm", algorithm, {"linear": _linear, "tree": _tree})(comm, tensor, gather_list or [], dst)


def _linear(comm: Communicator, tensor: Tensor, room: Tensors, dst: int) -> None:
    """The destination takes in one rank after another."""
    if comm.rank != dst:
        comm.send(tensor, dst)
        return
    comm.step("gather from {}", dst)
    comm.copy(room[dst], tensor)  # first: `tensor` may be the room for another rank's
    for src in range(comm.size):
        if src != dst:
            comm.step("gather from {}", src)
            comm.recv(room[src], src)


def _tree(comm: Communicator, tensor: Tensor, room: Tensors, dst: int) -> None:
    """Scatter's tree run backwards: neighbors join what they hold, then neighbors of neighbors.

    Ranks are counted from the destination. A rank holds the parts of positions own .. own + count - 1.
    """
    position, length = (comm.rank - dst) % comm.size, tensor.numel()
    most = position & -position or comm.size  # how many it will ever hold: the lowest bit of a position is when it sends
    held = tensor.new_empty(min(most, comm.size - position) * length)
    comm.copy(held[:length], stage(tensor))
    for step, half in enumerate(doublings(comm.size), 1):
        comm.step("gather {}", step)
        if position & half:
            comm.send(held, (comm.rank - half) % comm.size)
            return
        if position + half < comm.size:
            comm.recv(held[half * length : 2 * half * length], (comm.rank + half) % comm.size)
    for index, part in enumerate(room):
        begin = (index - dst) % comm.size * length
        comm.copy(part, held[begin : begin + length])
