"""Reduce-scatter: the sum of all ranks' lists, each rank left with one part of it."""

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.arguments import Tensors, check_apart, check_fits, check_list, check_parts, collective, divide, is_part
from d2lps.collectives.ring import Ring, play, reduce_scatter_steps
from d2lps.comm import Communicator, ReduceOp, flat
from d2lps.comm.ops import check_op
from d2lps.comm.staging import stage


@collective("input_list", "op", "algorithm")
def reduce_scatter(
    comm: Communicator, output: Tensor, input_list: Tensors, op: ReduceOp = ReduceOp.SUM, algorithm: str = "ring"
) -> None:
    """Combine `input_list[r]` of all ranks by `op` into `output` of rank r; the inputs stay as they were, unless it is one.

    >>> parts = [torch.tensor([1.0]), torch.tensor([10.0])]         # on both of 2 ranks     # doctest: +SKIP
    >>> reduce_scatter(comm, output, parts)             # [2.], [20.]         # doctest: +SKIP

    input_list: p tensors, n bytes together, of any sizes, the same on every rank. algorithm: "ring" (p - 1 steps, to
    the neighbor only) or "pairwise" (p - 1 steps, to every rank once). Each rank sends (p - 1)/p n bytes in both.
    Errors: AVG of integers is a ValueError; sums may overflow before they are divided: see `all_reduce`. Source: Thakur,
    Rabenseifner, Gropp 2005.
    """
    check_list(comm, "input_list", input_list)
    check_fits("output", output, f"input_list[{comm.rank}]", input_list[comm.rank])
    check_op(op, output.dtype)
    check_apart("output", output, "input_list", input_list)
    _reduce_scatter(comm, output, [stage(part) for part in input_list], op, algorithm)


@collective("input", "op", "algorithm")
def reduce_scatter_tensor(
    comm: Communicator, output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, algorithm: str = "ring"
) -> None:
    """Reduce-scatter of one tensor that is cut into p equal parts; steps and bytes as in `reduce_scatter`.

    >>> reduce_scatter_tensor(comm, output, torch.tensor([1.0, 10.0]))      # [2.], [20.] on 2 ranks    # doctest: +SKIP
    """
    check_parts(comm, "input", input, "output", output, "take")
    check_op(op, output.dtype)
    check_apart("output", output, "input", input, lambda part, whole: is_part(whole, part, comm.size))
    _reduce_scatter(comm, output, stage(input).tensor_split(comm.size), op, algorithm)


def _reduce_scatter(comm: Communicator, output: Tensor, parts: Tensors, op: ReduceOp, algorithm: str) -> None:
    with flat(output) as data:
        named("algorithm", algorithm, {"ring": _ring, "pairwise": _pairwise})(comm, data, parts, op)
        divide(data, op, comm.size)


def _ring(comm: Communicator, data: Tensor, parts: Tensors, op: ReduceOp) -> None:
    """Each part travels once round the ring and is added to on its way; it ends at the rank that it belongs to."""
    chunks = [parts[-1], *parts[:-1]]  # a ring leaves chunk r + 1 with rank r: let that be part r
    ring = Ring.of(comm.rank, range(comm.size), chunks)
    play(comm, "reduce-scatter", comm.size, reduce_scatter_steps(comm, ring, op, keep=True))
    comm.copy(data, ring.passing[-1])  # not earlier: `data` may be part of the input, as in torch


def _pairwise(comm: Communicator, data: Tensor, parts: Tensors, op: ReduceOp) -> None:
    """Each rank hands every other one its share directly: in step k, to the rank k to the right."""
    total = parts[comm.rank]
    for step in range(1, comm.size):
        comm.step("reduce-scatter {}/{}", step, comm.size - 1)
        dst, src = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.sendrecv(parts[dst], dst, incoming := data.new_empty(data.shape), src)
        comm.combine(incoming, total, op)
        total = incoming
    comm.copy(data, total)  # not earlier, as above
