"""All-reduce: the sum (or product, minimum, ...) of all ranks' tensors, on every rank. What data-parallel training lives on.

One algorithm a file. Each is a function of (communicator, flat tensor, op) that leaves the result in the tensor; an average
is a sum that is divided once, where it is complete, before it is handed on.
"""

import inspect
from typing import Any

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.all_reduce.blockwise import blockwise
from d2lps.collectives.all_reduce.double_tree import double_tree
from d2lps.collectives.all_reduce.halving_doubling import halving_doubling
from d2lps.collectives.all_reduce.hierarchical import hierarchical
from d2lps.collectives.all_reduce.placement import Given, pick
from d2lps.collectives.all_reduce.rings import ring, two_rings
from d2lps.collectives.all_reduce.rooted import flat, tree
from d2lps.collectives.arguments import check_tensor, collective, divide
from d2lps.comm import Communicator, ReduceOp
from d2lps.comm import flat as flattened
from d2lps.comm.ops import check_op

__all__ = ["all_reduce"]


@collective("tensor", "op", "algorithm")
def all_reduce(comm: Communicator, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, algorithm: str = "ring", **options: Any) -> None:
    """Combine the `tensor` of all ranks by `op`; every rank's `tensor` holds the result.

    >>> tensor = torch.tensor([1.0, 2.0]) * (comm.rank + 1)         # on 3 ranks   # doctest: +SKIP
    >>> all_reduce(comm, tensor)                        # tensor([6., 12.]) everywhere    # doctest: +SKIP

    tensor: any shape, the same on every rank. algorithm, with L = ceil(log2 p), and its options:
    "flat"              reduce to rank 0, one after another, and broadcast so: 2(p - 1) steps, rank 0 sends (p - 1) n bytes
    "tree"              the same by binomial trees: 2L steps, rank 0 sends L n bytes
    "double_tree"       two trees, half of the data each, in `chunks`: at most 2(chunks + L - 1) steps, 2n bytes
    "ring"              chunks of n/p bytes round a ring: 2(p - 1) steps, each rank sends 2(p - 1)/p n bytes, the least there is
    "two_rings"         as much each way round, or several `rings` with `shares` of the data: the same steps and bytes
    "blockwise"         every rank adds up one block, all messages at once: 2 steps, 2(p - 1)/p n bytes
    "halving_doubling"  exchanges of n/2, n/4, ... bytes: 2L steps, 2(p - 1)/p n bytes for a power of two
    "hierarchical"      rings inside `groups`, then across them: few bytes on the slow links between machines
    "native"            the world's own, shared memory's, gloo's or NCCL's: no trace sees what it moves
    "auto"              the one that `d2lps.cost.choose` finds cheapest, for links of `alpha` and `beta`, and `overhead`
    The result is the same on all ranks to the bit; sums of floats differ in the last digits from algorithm to algorithm.
    AVG divides once, when all is added: a float16 sum beyond 65,504 is inf, even if the average would fit (NCCL divides first).
    Where that may be, divide by comm.size before, and add.
    Errors: AVG of integers is a ValueError; so are sums of bools and of what torch cannot add (uint16, float8), and an option
    that the algorithm does not have. Sources: in each file.
    """
    check_tensor("tensor", tensor)
    check_op(op, tensor.dtype)
    chosen = named("algorithm", algorithm, _ALGORITHMS)
    for name in options:
        _check_option(algorithm, name)
    with flattened(tensor) as data:
        chosen(comm, data, op, **options)


def native(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """Shared memory's, gloo's or NCCL's own; a simulated cluster has none. No trace sees what it moves."""
    comm.native_all_reduce(data, ReduceOp.SUM if op == ReduceOp.AVG else op)  # gloo has no AVG
    divide(data, op, comm.size)


def auto(
    comm: Communicator, data: Tensor, op: ReduceOp, *, alpha: Given = None, beta: Given = None, overhead: Given = None
) -> None:
    """Ask the formulas, and do as they say."""
    _ALGORITHMS[pick(comm, data.nbytes, alpha, beta, overhead).algorithm](comm, data, op)


_FUNCTIONS: Any = (flat, tree, ring, native, double_tree, two_rings, blockwise, halving_doubling, hierarchical, auto)
_ALGORITHMS = {function.__name__: function for function in _FUNCTIONS}
_OPTIONS = {name: list(inspect.signature(function).parameters)[3:] for name, function in _ALGORITHMS.items()}


def _check_option(algorithm: str, name: str) -> None:
    if name not in (known := _OPTIONS[algorithm]):
        takers = [repr(other) for other, names in _OPTIONS.items() if name in names]
        hint = f"algorithm={' or '.join(takers)} has it" if takers else "no algorithm has it"
        raise TypeError(f"algorithm={algorithm!r} has no option {name!r} (it has {', '.join(known) or 'none'}); {hint}")
