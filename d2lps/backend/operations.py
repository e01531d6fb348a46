"""torch.distributed's calls, each in terms of the book's eight collectives."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from d2lps.backend.choice import all_reduce, call
from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator

Tensors = list[Tensor]
_DEFAULTS = SimpleNamespace(rootRank=0, reduceOp=ReduceOp.SUM)  # of torch's many kinds of options


class Operations:
    """A call gives lists where a process may have several GPUs, of which nobody makes use any more: `[tensor]`, `[[...]]`."""

    _run: Callable[..., Any]
    transports: Any

    def _call(self, name: str, results: Tensors, inputs: Tensors, opts: Any, *arguments: Any) -> Any:
        """One of the book's collectives as it is."""
        return self._run(name, results, inputs, lambda comm: call(name, comm, *arguments), opts)

    # ---- one to all, all to one -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULTS) -> Any:
        return self._call("broadcast", tensors, [], opts, tensors[0], opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULTS) -> Any:
        parts = inputs[0] if inputs else None
        return self._call("scatter", outputs, parts or [], opts, outputs[0], parts, opts.rootRank)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULTS) -> Any:
        room = outputs[0] if outputs else None
        return self._call("gather", room or [], inputs, opts, inputs[0], room, opts.rootRank)

    def reduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> Any:
        def work(comm: Communicator) -> None:
            (data,), op = scaled(tensors, opts.reduceOp)
            call("reduce", comm, data, opts.rootRank, op)
            put(tensors[0], data)

        return self._run("reduce", tensors, [], work, opts)

    # ---- all to all -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> Any:
        return self._run("all_reduce", tensors, [], lambda comm: self._all_reduce(comm, tensors[0], opts.reduceOp), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _DEFAULTS) -> Any:
        def work(comm: Communicator) -> None:
            data = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self._all_reduce(comm, data, opts.reduceOp)
            for tensor, part in zip(tensors, data.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

        return self._run("all_reduce_coalesced", tensors, [], work, opts)

    def _all_reduce(self, comm: Communicator, tensor: Tensor, op: Any) -> None:
        (data,), op = scaled([tensor], op)
        if data.layout is torch.strided:
            all_reduce(comm, data, op, self.transports.default)
        else:
            all_reduce_sparse(comm, data, op)
        put(tensor, data)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        return self._call("all_gather", outputs[0], inputs, opts, outputs[0], inputs[0])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        def work(comm: Communicator) -> None:
            for index, tensor in enumerate(inputs):
                call("all_gather", comm, [theirs[index] for theirs in outputs], tensor)  # a list of all tensors for each rank

        return self._run("all_gather_coalesced", [each for theirs in outputs for each in theirs], inputs, work, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        def work(comm: Communicator) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                call("all_gather_into_tensor", comm, output, tensor)

        return self._run("all_gather_into_tensor", outputs, inputs, work, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULTS) -> Any:
        def work(comm: Communicator) -> None:
            call("reduce_scatter", comm, outputs[0], *scaled(inputs[0], opts.reduceOp))

        return self._run("reduce_scatter", outputs, inputs[0], work, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _DEFAULTS) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULTS) -> Any:
        def work(comm: Communicator) -> None:
            parts, op = scaled(inputs, opts.reduceOp)
            for output, tensor in zip(outputs, parts, strict=True):
                call("reduce_scatter_tensor", comm, output, tensor, op)

        return self._run("reduce_scatter_tensor", outputs, inputs, work, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._call("all_to_all", outputs, inputs, opts, outputs, inputs)

    def all_to_all_single(self, output: Tensor, input: Tensor, out_rows: list[int], in_rows: list[int], opts: Any = None) -> Any:
        def work(comm: Communicator) -> None:
            room = output.contiguous()  # of which rows can be written
            call("all_to_all", comm, rows(room, out_rows, comm.size), rows(input, in_rows, comm.size))
            put(output, room)

        return self._run("all_to_all_single", [output], [input], work, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._run("barrier", [], [], lambda comm: comm.barrier(), opts)

    # ---- as older versions of torch call them ---------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- what there is not ----------------------------------------------------------------------------------------

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> NoReturn:
        raise NotImplementedError("d2lps: recv from any source; say from which rank, messages match by their sender")

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("d2lps: split_group; new_group makes smaller groups")


def scaled(tensors: Sequence[Tensor], op: Any) -> tuple[list[Tensor], Any]:
    """A sum of tensors that are multiplied before (PREMUL_SUM) as a plain sum of such copies; any other op as it is."""
    if op != ReduceOp.PREMUL_SUM:
        return list(tensors), op
    factor = op.__getstate__()[1]
    return [tensor * factor for tensor in tensors], ReduceOp.SUM


def put(into: Tensor, data: Tensor) -> None:
    """Where the result belongs, if it was worked out elsewhere."""
    if data is not into:
        into.copy_(data)


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
