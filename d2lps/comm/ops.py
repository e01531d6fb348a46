"""The reductions of torch.distributed, as arithmetic on two tensors."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:

    class ReduceOp:
        """As torch.distributed's, whose own type hints give the members another class than their parent's."""

        SUM: "ReduceOp"
        AVG: "ReduceOp"
        PRODUCT: "ReduceOp"
        MIN: "ReduceOp"
        MAX: "ReduceOp"
        BAND: "ReduceOp"
        BOR: "ReduceOp"
        BXOR: "ReduceOp"
else:
    from torch.distributed import ReduceOp

# Not a dictionary's key in every version of torch, a ReduceOp is compared instead; hence pairs.
_KERNELS: list[tuple[ReduceOp, Callable[..., torch.Tensor]]] = [
    (ReduceOp.SUM, torch.add),
    (ReduceOp.PRODUCT, torch.mul),
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
]
_NAMES = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "PRODUCT": ReduceOp.PRODUCT, "MIN": ReduceOp.MIN}
_NAMES |= {"MAX": ReduceOp.MAX, "BAND": ReduceOp.BAND, "BOR": ReduceOp.BOR, "BXOR": ReduceOp.BXOR}


def op_name(op: ReduceOp) -> str:
    """`op_name(ReduceOp.SUM) == "SUM"`; a value that is no ReduceOp is a TypeError that shows it."""
    for name, known in _NAMES.items():
        if isinstance(op, ReduceOp) and op == known:
            return name
    raise TypeError(f"op must be a torch.distributed.ReduceOp (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR), not {op!r}")


def check_op(op: ReduceOp, dtype: torch.dtype) -> None:
    """Refuse what has no meaning before anything is sent: an average of integers is not an integer."""
    name = op_name(op)
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if name == "AVG" and exact:
        raise ValueError(f"op=AVG of {dtype} tensors: an average of integers is not an integer; use SUM, or a floating dtype")
    if name in ("BAND", "BOR", "BXOR") and not exact:
        raise ValueError(f"op={name} works on the bits of integers, not on {dtype} tensors")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"op={name}: complex numbers have no order")


def apply(op: ReduceOp, into: torch.Tensor, other: torch.Tensor) -> None:
    """`into = op(into, other)`, element by element, rounded in the tensors' own dtype.

    AVG adds: an average is a sum that is divided once, at the end, by the algorithm that knows how many it added.
    """
    kernel(op)(into, other, out=into)


def kernel(op: ReduceOp) -> Callable[..., torch.Tensor]:
    """`kernel(ReduceOp.SUM) is torch.add`."""
    if op == ReduceOp.AVG:
        op = ReduceOp.SUM
    for known, function in _KERNELS:
        if op == known:
            return function
    raise TypeError(f"combine cannot apply op={op!r}")
