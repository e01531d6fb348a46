"""torch.distributed's calls, each in terms of the book's eight collectives: a function of a communicator, as all the others.

They give lists where a process may have several GPUs, of which nobody makes use any more: `[tensor]`, `[[...]]`.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from d2lps.backend.choice import all_reduce_dense, call
from d2lps.collectives.arguments import check_apart, divide, is_part, only
from d2lps.comm import Communicator
from d2lps.comm.ops import check_op

Tensors = list[Tensor]
_DEFAULTS = SimpleNamespace(rootRank=0, reduceOp=ReduceOp.SUM)  # of torch's many kinds of options

# ---- one to all, all to one -------------------------------------------------------------------------------------------


def broadcast(comm: Communicator, tensors: Tensors, opts: Any = _DEFAULTS) -> None:
    call("broadcast", comm, tensors[0], opts.rootRank)


def scatter(comm: Communicator, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULTS) -> None:
    call("scatter", comm, outputs[0], inputs[0] if inputs else None, opts.rootRank)


def gather(comm: Communicator, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULTS) -> None:
    call("gather", comm, inputs[0], outputs[0] if outputs else None, opts.rootRank)


def reduce(comm: Communicator, tensors: Tensors, opts: Any = _DEFAULTS) -> None:
    (data,), op = scaled(tensors, opts.reduceOp)
    call("reduce", comm, data, opts.rootRank, op)
    if comm.rank == opts.rootRank:  # the others keep theirs, also where it was multiplied
        tensors[0].copy_(data)  # which costs nothing where the two are the same


# ---- all to all -------------------------------------------------------------------------------------------------------


def all_reduce(comm: Communicator, tensors: Tensors, opts: Any = _DEFAULTS) -> None:
    (data,), op = scaled(tensors, opts.reduceOp)
    add_up = all_reduce_dense if data.layout is torch.strided else all_reduce_sparse
    add_up(comm, data, op)
    tensors[0].copy_(data)


def all_reduce_coalesced(comm: Communicator, tensors: Tensors, opts: Any = _DEFAULTS) -> None:
    if len(dtypes := list(dict.fromkeys(tensor.dtype for tensor in tensors))) > 1:
        raise ValueError(f"all_reduce_coalesced: the tensors must all have one dtype, not {', '.join(map(str, dtypes))}")
    check_apart("tensors", tensors)
    data = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(comm, [data], opts)
    for tensor, part in zip(tensors, data.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def all_gather(comm: Communicator, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> None:
    call("all_gather", comm, outputs[0], inputs[0])


def all_gather_coalesced(comm: Communicator, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> None:
    check_apart("output_tensor_lists", leaves(outputs), "input_tensor_list", inputs)
    for index, tensor in enumerate(inputs):
        call("all_gather", comm, [theirs[index] for theirs in outputs], tensor)  # a list of all tensors for each rank


def all_gather_into_tensor(comm: Communicator, output: Any, input: Any, opts: Any = None) -> None:
    check_apart("output_tensor", output, "input_tensor", input, lambda whole, part: is_part(whole, part, comm.size))
    for whole, tensor in zip(leaves(output), leaves(input), strict=True):  # one of each, or lists
        call("all_gather_into_tensor", comm, whole, tensor)


def reduce_scatter(comm: Communicator, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULTS) -> None:
    call("reduce_scatter", comm, outputs[0], *scaled(inputs[0], opts.reduceOp))


def reduce_scatter_tensor(comm: Communicator, output: Any, input: Any, opts: Any = _DEFAULTS) -> None:
    check_apart("output", output, "input", input, lambda part, whole: is_part(whole, part, comm.size))
    wholes, op = scaled(leaves(input), opts.reduceOp)
    for part, tensor in zip(leaves(output), wholes, strict=True):  # one of each, or lists
        call("reduce_scatter_tensor", comm, part, tensor, op)


def all_to_all(comm: Communicator, outputs: Tensors, inputs: Tensors, opts: Any = None) -> None:
    stays = only(*(tensors[comm.rank] if comm.rank < len(tensors) else torch.empty(0) for tensors in (outputs, inputs)))
    check_apart("output_tensor_list", outputs, "input_tensor_list", inputs, stays)
    call("all_to_all", comm, outputs, inputs)


def all_to_all_single(
    comm: Communicator, output: Tensor, input: Tensor, out_rows: list[int], in_rows: list[int], opts: Any = None
) -> None:
    check_apart("output", output, "input", input, lambda *_: comm.size == 1)
    room = output.contiguous()  # of which rows can be written
    call("all_to_all", comm, rows(room, out_rows, comm.size), rows(input, in_rows, comm.size))
    output.copy_(room)


def barrier(comm: Communicator, opts: Any = None) -> None:
    comm.barrier()


# What torch calls them, and what older versions of it do.
CALLS: dict[str, Callable[..., None]] = {
    "broadcast": broadcast, "scatter": scatter, "gather": gather, "reduce": reduce, "barrier": barrier,
    "allreduce": all_reduce, "allreduce_coalesced": all_reduce_coalesced,
    "allgather": all_gather, "allgather_coalesced": all_gather_coalesced,
    "all_gather_single": all_gather_into_tensor, "all_gather_single_coalesced": all_gather_into_tensor,
    "_allgather_base": all_gather_into_tensor, "allgather_into_tensor_coalesced": all_gather_into_tensor,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_tensor, "reduce_scatter_single_coalesced": reduce_scatter_tensor,
    "_reduce_scatter_base": reduce_scatter_tensor, "reduce_scatter_tensor_coalesced": reduce_scatter_tensor,
    "alltoall": all_to_all, "all_to_all_single": all_to_all_single, "alltoall_base": all_to_all_single,
}  # fmt: skip

# ---- what they share --------------------------------------------------------------------------------------------------


def leaves(given: Any) -> Tensors:
    """`leaves([[a], [b, c], d])` is `[a, b, c, d]`; what is neither a tensor nor a list of some does not count."""
    if isinstance(given, Tensor):
        return [given]
    return [tensor for each in given for tensor in leaves(each)] if isinstance(given, list | tuple) else []


def scaled(tensors: Sequence[Tensor], op: Any) -> tuple[list[Tensor], Any]:
    """A sum of tensors that are multiplied before (PREMUL_SUM) as a plain sum of such copies; any other op as it is."""
    if op != ReduceOp.PREMUL_SUM:
        return list(tensors), op
    factor = op.__getstate__()[1]
    return [tensor * factor for tensor in tensors], ReduceOp.SUM


def rows(tensor: Tensor, sizes: Sequence[int], ranks: int) -> Sequence[Tensor]:
    """Those for each rank: `sizes` of them, or equally many; torch's `split` says what is wrong with other numbers."""
    return tensor.split(list(sizes) or [tensor.size(0) // ranks] * ranks)


def all_reduce_sparse(comm: Communicator, tensor: Tensor, op: Any) -> None:
    """Sum tensors of which each rank has few rows, such as an embedding's gradients: gather all, add what belongs together.

    >>> all_reduce_sparse(comm, tensor, ReduceOp.SUM)                               # doctest: +SKIP

    If rank 0 has 5 at row 2, and rank 1 has 1 at row 2 and 7 at row 4, both end with 6 at row 2 and 7 at row 4. The entries of
    all ranks reach every rank: with p ranks of n bytes each it sends (p - 1) n bytes, so it pays while few rows are touched.
    """
    if op != ReduceOp.SUM and op != ReduceOp.AVG:
        raise NotImplementedError(f"d2lps: all_reduce of a sparse tensor with op={op}; there are SUM and AVG")
    if tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(f"d2lps: all_reduce of a tensor of layout {tensor.layout}; make it sparse_coo, or dense")
    check_op(op, tensor.dtype)
    mine = tensor.coalesce()
    comm.agree(f"all_reduce of a sparse {list(mine.shape)} of {mine.dtype}, the first {mine.sparse_dim()} dimensions sparse")
    counts = torch.zeros(comm.size, dtype=torch.int64, device=mine.device)
    call("all_gather_into_tensor", comm, counts, counts.new_tensor([mine.values().size(0)]))
    indices, values = (_gathered(comm, rows, counts.tolist()) for rows in (mine.indices().t().contiguous(), mine.values()))
    total = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=True).coalesce()
    divide(total, op, comm.size)
    tensor.copy_(total)


def _gathered(comm: Communicator, rows: Tensor, counts: list[int]) -> Tensor:
    """All ranks' rows, one after another; rank r has `counts[r]` of them."""
    everyone = rows.new_empty(sum(counts), *rows.shape[1:])
    call("all_gather", comm, list(everyone.split(counts)), rows)
    return everyone
