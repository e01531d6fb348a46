"""Scatter: one rank's list of tensors, one to each rank."""

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.arguments import Tensors, check_apart, check_root_list, collective, doublings, only
from d2lps.comm import Communicator, flat


@collective("tensor", "src", "algorithm")
def scatter(
    comm: Communicator, tensor: Tensor, scatter_list: Tensors | None = None, src: int = 0, algorithm: str = "tree"
) -> None:
    """Copy `scatter_list[r]` of rank `src` into `tensor` of rank r.

    >>> parts = [torch.tensor([10.0 * r]) for r in range(3)] if comm.rank == 0 else None        # doctest: +SKIP
    >>> scatter(comm, tensor, parts, src=0)             # [0.], [10.], [20.]   # doctest: +SKIP

    tensor: n / p bytes, the same shape on every rank; scatter_list: p such tensors on src, of which `tensor` may be that of src,
    and shares memory with no other; None elsewhere.
    algorithm: "linear" (p - 1 steps) or "tree" (ceil(log2 p) steps). Rank src sends (p - 1)/p n bytes either way; in the
    tree the others pass on what is not theirs. Source: Thakur, Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_root_list(comm, "scatter_list", scatter_list, "src", src, tensor)
    if scatter_list:
        check_apart("tensor", tensor, "scatter_list", scatter_list, only(tensor, scatter_list[src]))
    with flat(tensor) as data:
        named("algorithm", algorithm, {"linear": _linear, "tree": _tree})(comm, data, scatter_list or [], src)


def _linear(comm: Communicator, data: Tensor, parts: Tensors, src: int) -> None:
    """The source sends to one rank after another."""
    if comm.rank != src:
        comm.recv(data, src)
        return
    for dst in range(comm.size):
        comm.step("scatter to {}", dst)
        if dst == src:
            comm.copy(data, parts[dst])
        else:
            comm.send(parts[dst], dst)


def _tree(comm: Communicator, data: Tensor, parts: Tensors, src: int) -> None:
    """The source gives half of the parts to a rank half way round, and both go on with their halves.

    Ranks are counted from the source. A rank that holds `count` parts holds those of positions own .. own + count - 1.
    """
    position, length = (comm.rank - src) % comm.size, data.numel()
    if position == 0:
        held = data.new_empty(comm.size * length)
        for index, part in enumerate(parts):
            begin = (index - src) % comm.size * length
            comm.copy(held[begin : begin + length], part)
    for step, half in enumerate(reversed(doublings(comm.size)), 1):
        comm.step("scatter {}", step)
        if position % (2 * half) == half:
            held = data.new_empty(min(half, comm.size - position) * length)
            comm.recv(held, (comm.rank - half) % comm.size)
        elif position % (2 * half) == 0 and position + half < comm.size:
            comm.send(held[half * length :], (comm.rank + half) % comm.size)
            held = held[: half * length]
    comm.copy(data, held[:length])
