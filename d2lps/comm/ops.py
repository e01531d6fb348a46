"""The reductions of torch.distributed, as arithmetic on two tensors."""

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # torch's own type hints give the members another class than their parent's
    ReduceOp = Enum("ReduceOp", "SUM AVG PRODUCT MIN MAX BAND BOR BXOR")
else:
    from torch.distributed import ReduceOp

Kernel = Callable[..., torch.Tensor]
# By name: a ReduceOp is not a dictionary's key in every version of torch. AVG adds: an average is a sum that is divided once,
# at the end, by the algorithm that knows how many it added.
KERNELS: dict[str, Kernel] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def op_name(op: ReduceOp) -> str:
    """`op_name(ReduceOp.SUM) == "SUM"`; a value that is no ReduceOp is a TypeError that shows it."""
    for name in KERNELS:
        if isinstance(op, ReduceOp) and op == getattr(ReduceOp, name):
            return name
    raise TypeError(f"op must be a torch.distributed.ReduceOp ({', '.join(KERNELS)}), not {op!r}")


def check_op(op: ReduceOp, dtype: torch.dtype) -> None:
    """Refuse what has no meaning, or what torch cannot do, before anything is sent: an average of integers is not an integer.

    >>> check_op(ReduceOp.SUM, torch.uint16)
    Traceback (most recent call last):
    ValueError: op=SUM of torch.uint16 tensors: torch has no such operation; convert them to a dtype that has one
    """
    name = op_name(op)
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if name == "AVG" and exact:
        raise ValueError(f"op=AVG of {dtype} tensors: an average of integers is not an integer; use SUM, or a floating dtype")
    if name in ("BAND", "BOR", "BXOR") and not exact:
        raise ValueError(f"op={name} works on the bits of integers, not on {dtype} tensors")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"op={name}: complex numbers have no order")
    if name == "SUM" and dtype == torch.bool:  # torch would or them, gloo add their bytes
        raise ValueError(f"op=SUM of {dtype} tensors: a sum of truth values is not a truth value; use BOR, or count in integers")
    if not _is_there(name, dtype):
        raise ValueError(f"op={name} of {dtype} tensors: torch has no such operation; convert them to a dtype that has one")


@cache
def _is_there(name: str, dtype: torch.dtype) -> bool:
    """Whether torch can do it on a CPU, tried: which of its many dtypes can be added differs from version to version."""
    try:
        one = torch.empty(1, dtype=dtype, device="cpu")
        KERNELS[name](one, one, out=one)
    except RuntimeError:
        return False
    return True


def apply(op: ReduceOp, into: torch.Tensor, other: torch.Tensor) -> None:
    """`into = op(into, other)`, element by element, rounded in the tensors' own dtype."""
    KERNELS[op_name(op)](into, other, out=into)
