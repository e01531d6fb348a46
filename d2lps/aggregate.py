"""Adding up gradients on one machine, in the three ways of Dive into Deep Learning, "Parameter Servers".

Every rank ends with the sum. With 4 devices, 16 GB/s and 160 MB they take 60, 80 and 15 ms:

>>> import torch
>>> from d2lps.simulator import simulate
>>> from d2lps.topology import pcie_tree
>>> machine = pcie_tree(4, 16e9, latency=0)
>>> def work(comm):
...     on_device(comm, torch.empty(40_000_000, device=comm.device))
>>> round(simulate(work, machine, device="meta").time, 9)
0.06
"""

from torch import Tensor

from d2lps.collectives.all_reduce import all_reduce
from d2lps.collectives.arguments import check_rank, check_tensor, collective
from d2lps.comm import Communicator, ReduceOp, flat


@collective("tensor", "root")
def on_device(comm: Communicator, tensor: Tensor, root: int = 0) -> None:
    """All send to `root` at once, which adds up and sends the sum to all at once.

    2 steps; root receives and sends (p - 1) n bytes, and needs room for as much. Time: 2 alpha + 2(p - 1) n beta.
    """
    _by_one(comm, tensor, "root", root, own=True)


@collective("tensor", "host")
def on_host(comm: Communicator, tensor: Tensor, host: int) -> None:
    """The same by a rank that lives on the CPU and has no gradient of its own: what its tensor holds does not count.

    2 steps; for p devices, host receives and sends p n bytes. Time: 2 alpha + 2 p n beta.

    >>> simulate(work, machine, ranks=machine.devices + machine.hosts)      # host=4    # doctest: +SKIP
    """
    _by_one(comm, tensor, "host", host, own=False)


def blockwise(comm: Communicator, tensor: Tensor) -> None:
    """Each rank adds up one block: 2 steps, each rank sends 2(p - 1)/p n bytes. Time: 2 alpha + 2(p - 1)/p n beta."""
    all_reduce(comm, tensor, algorithm="blockwise")


def _by_one(comm: Communicator, tensor: Tensor, name: str, root: int, own: bool) -> None:
    """Root takes in all, adds, and hands out; `own`: whether its own tensor is part of the sum."""
    check_tensor("tensor", tensor)
    check_rank(comm, name, root)
    others = [rank for rank in range(comm.size) if rank != root]
    with flat(tensor) as data:
        comm.step("to the one that adds")
        if comm.rank == root:
            # Without a part of its own, the first to come in is what the others are added to.
            incoming = [data.new_empty(data.shape) if own or rank != others[0] else data for rank in others]
            comm.exchange([], zip(incoming, others, strict=True))
            for part in incoming[0 if own else 1 :]:
                comm.combine(data, part, ReduceOp.SUM)
        else:
            comm.send(data, root)
        comm.step("back")
        if comm.rank == root:
            comm.exchange([(data, rank) for rank in others], [])
        else:
            comm.recv(data, root)
