"""An all-reduce of tensors of which each rank has few rows, such as the gradient of an embedding."""

from __future__ import annotations

import torch

from d2lps.backend.choice import call
from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator, ReduceOp


def all_reduce_sparse(comm: Communicator, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Sum sparse tensors: every rank gathers what all have, and adds up what belongs to one place.

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
    indices = _gathered(comm, mine.indices().t().contiguous(), counts.tolist())
    values = _gathered(comm, mine.values(), counts.tolist())
    total = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=True).coalesce()
    divide(total, op, comm.size)
    tensor.copy_(total)


def _gathered(comm: Communicator, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """All ranks' rows, one after another; rank r has `counts[r]` of them."""
    everyone = rows.new_empty(sum(counts), *rows.shape[1:])
    call("all_gather", comm, list(everyone.split(counts)), rows)
    return everyone
