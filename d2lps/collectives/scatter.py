"""Scatter: one rank's list of tensors, one to each rank."""

from collections.abc import Sequence

import torch

from d2lps.collectives.arguments import check_root_list, choose, collective
from d2lps.comm import Communicator, flat


@collective("tensor", "src", "algorithm")
def scatter(
    comm: Communicator,
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    algorithm: str = "tree",
) -> None:
    """Copy `scatter_list[r]` of rank `src` into `tensor` of rank r.

    >>> parts = [torch.tensor([10.0 * r]) for r in range(3)] if comm.rank == 0 else None        # doctest: +SKIP
    >>> scatter(comm, tensor, parts, src=0)             # [0.], [10.], [20.]   # doctest: +SKIP

    tensor: n / p bytes, the same shape on every rank; scatter_list: p such tensors on src, None elsewhere.
    algorithm: "linear" (p - 1 steps) or "tree" (ceil(log2 p) steps). Rank src sends (p - 1)/p n bytes either way; in the
    tree the others pass on what is not theirs. Source: Thakur, Rabenseifner, Gropp 2005 (binomial tree).
    """
    check_root_list(comm, "scatter_list", scatter_list, "src", src, tensor)
    with flat(tensor) as data:
        choose(algorithm, {"linear": _linear, "tree": _tree})(comm, data, scatter_list or [], src)


def _linear(comm: Communicator, data: torch.Tensor, parts: Sequence[torch.Tensor], src: int) -> None:
    """The source sends to one rank after another."""
    if comm.rank != src:
        comm.recv(data, src)
        return
    for dst in range(comm.size):
        comm.step(f"scatter to {dst}")
        if dst == src:
            comm.copy(data, parts[dst])
        else:
            comm.send(parts[dst], dst)


def _tree(comm: Communicator, data: torch.Tensor, parts: Sequence[torch.Tensor], src: int) -> None:
    """The source gives half of the parts to a rank half way round, and both go on with their halves.

    Ranks are counted from the source. A rank that holds `count` parts holds those of positions own .. own + count - 1.
    """
    position, length = (comm.rank - src) % comm.size, data.numel()
    span = 1
    while span < comm.size:
        span *= 2
    held, step = data.new_empty(0), 0
    if position == 0:
        held = data.new_empty(comm.size * length)
        for index in range(comm.size):
            comm.copy(held[index * length : (index + 1) * length], parts[(index + src) % comm.size])
    while span > 1:
        half, step = span // 2, step + 1
        comm.step(f"scatter {step}")
        if position % span == 0 and position + half < comm.size:
            comm.send(held[half * length :], (position + half + src) % comm.size)
            held = held[: half * length]
        elif position % span == half:
            held = data.new_empty(min(half, comm.size - position) * length)
            comm.recv(held, (position - half + src) % comm.size)
        span = half
    comm.copy(data, held[:length])
