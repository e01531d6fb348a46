"""What the tests compare with: collectives in numpy and in torch.distributed, and traces told line by line.

The ranks of a run import this file too, so it needs nothing that they have not loaded already (no pytest).
"""

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from d2lps import Communicator, Trace, collectives
from d2lps.trace import Recorder, merge

# ---- a case: one call of one collective, the same on all ranks --------------------------------------------------------

LAYOUTS = ("flat", "shaped", "transposed", "column")
SHAPES = {0: (0, 3), 1: (), 2: (2, 1), 7: (7, 1), 64: (4, 2, 8), 1001: (7, 11, 13)}  # other sizes stay flat
GAP = 77  # what lies between the elements of a column


@dataclass(frozen=True)
class Case:
    """`n` elements from each rank or for each rank; `uneven`: lists hold more and fewer; `layout`: of rank 0's first tensor."""

    collective: str
    algorithm: str
    op: str = "SUM"
    dtype: torch.dtype = torch.float32
    root: int = 0
    n: int = 7
    uneven: bool = False
    layout: int = 0

    def __str__(self) -> str:
        name = f"{self.collective}({self.algorithm}, {self.op}, {str(self.dtype)[6:]}, root {self.root}, n={self.n})"
        return f"{name}, layout {self.layout}" + (", uneven" if self.uneven else "")


IN_PLACE = ("broadcast", "reduce", "all_reduce")  # these write into the tensor that they read
REDUCING = ("reduce", "all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def part_sizes(case: Case, rank: int, ranks: int) -> list[int]:
    """How many elements each tensor has that `rank` brings."""

    def size(k: int) -> int:
        return case.n if not case.uneven else case.n // 2 if k % 2 == 0 else case.n + k

    return {
        "scatter": [case.n] * ranks if rank == case.root else [],
        "all_gather": [size(rank)],
        "reduce_scatter": [size(k) for k in range(ranks)],
        "reduce_scatter_tensor": [case.n * ranks],
        "all_to_all": [size(rank + 2 * k) for k in range(ranks)],
    }.get(case.collective, [case.n])


def inputs(case: Case, rank: int, ranks: int) -> list[torch.Tensor]:
    """The flat tensors that `rank` brings, from the case alone: integers of all sizes, floats of 0.5 to 2, either sign."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{case} {rank}".encode()))
    sizes = part_sizes(case, rank, ranks)
    if not case.dtype.is_floating_point:
        return [torch.randint(-(2**62), 2**62, (n,), generator=random).to(case.dtype) for n in sizes]
    signs = [torch.randint(0, 2, (n,), generator=random) * 2 - 1 for n in sizes]
    return [(sign * (0.5 + 1.5 * torch.rand(len(sign), generator=random))).to(case.dtype) for sign in signs]


# ---- numpy: from the inputs of all ranks at once ----------------------------------------------------------------------

Answer = tuple[np.ndarray, np.ndarray | float]  # the values, and how far from them a result may be

UFUNCS = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
UFUNCS |= {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


def exact(tensor: torch.Tensor) -> np.ndarray:
    """Integers as they are, floats as numpy's widest, in which every dtype of torch is exact."""
    return tensor.double().numpy().astype(np.longdouble) if tensor.is_floating_point() else tensor.numpy()


def reduced(op: str, dtype: torch.dtype, arrays: Sequence[np.ndarray]) -> Answer:
    """The reduction, and its tolerance: 0 for integers, MIN and MAX; else each rounding may be off by half an eps.

    A sum of p numbers is rounded p - 1 times, each time by at most eps/2 of what is not more than the sum of all
    absolute values; an average once more; a product by eps/2 of itself, and a little for errors of errors.
    Numbers of 0.5 and more keep this finer than one forgotten number, even for 8 ranks and bfloat16.
    """
    value = functools.reduce(UFUNCS[op], arrays)
    if not dtype.is_floating_point or op in ("MIN", "MAX"):
        return value, 0.0
    half = torch.finfo(dtype).eps / 2
    p, total = len(arrays), sum(abs(array) for array in arrays)
    if op == "PRODUCT":
        return value, 1.1 * (p - 1) * half * abs(value)
    return (value / p, half * total) if op == "AVG" else (value, (p - 1) * half * total)


def answers(case: Case, ranks: int) -> list[list[Answer]]:
    """What every rank must end with."""
    given = [[exact(tensor) for tensor in inputs(case, rank, ranks)] for rank in range(ranks)]

    def moved(arrays: Sequence[np.ndarray]) -> list[Answer]:
        return [(array, 0.0) for array in arrays]

    def combined(k: int = 0) -> Answer:
        return reduced(case.op, case.dtype, [theirs[k] for theirs in given])

    everyones = [theirs[0] for theirs in given if theirs]
    return {
        "broadcast": lambda r: moved(given[case.root]),
        "reduce": lambda r: [combined()] if r == case.root else moved(given[r]),
        "all_reduce": lambda r: [combined()],
        "scatter": lambda r: moved([given[case.root][r]]),
        "gather": lambda r: moved(everyones) if r == case.root else [],
        "all_gather": lambda r: moved(everyones),
        "all_gather_into_tensor": lambda r: moved([np.concatenate(everyones)]),
        "reduce_scatter": lambda r: [combined(r)],
        "reduce_scatter_tensor": lambda r: [tuple(_share(a, r, ranks) for a in combined())],
        "all_to_all": lambda r: moved([theirs[r] for theirs in given]),
    }[case.collective] and [_all(case, r, moved, combined, given, everyones, ranks) for r in range(ranks)]
