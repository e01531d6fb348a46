"""How much torch computes in a block: the operations, and the bytes that they read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Attention in one operation on a CPU, of which torch counts nothing: products of all queries with as many keys, two of them
# forward, and backward five, as the scores are computed again; half of each is masked where it is causal, and counted as well.
_FUSED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda query, key, *rest, **more: 4 * query.numel() * key.shape[-2],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda gradient, query, key, *rest, **more: 10 * query.numel() * key.shape[-2],
}  # fmt: skip
_FORMULAS = {**flop_registry, **_FUSED}

_known: dict[tuple[Any, ...], tuple[float, float]] = {}  # an operation of given shapes -> its FLOP and bytes


class Counting(TorchDispatchMode):
    """Sums up over all operations in the block, each distinct one (by shapes and dtypes) counted once.

    >>> one, other = torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    >>> with Counting() as counting:
    ...     product = one @ other
    >>> counting.flops, counting.bytes          # 2 x 2 x 3 x 4; 6 + 12 + 8 floats
    (48.0, 104.0)

    FLOP of matrix products, convolutions and attention are by torch's own formulas; all else counts one for each element that it
    makes. A view costs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0.0
        self._taken = (0.0, 0.0, 0)
        self._operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            flops, nbytes = _cost(func, args, kwargs or {}, out)
            self.flops, self.bytes, self._operations = self.flops + flops, self.bytes + nbytes, self._operations + 1
        return out

    def take(self) -> tuple[float, float, int]:
        """FLOP, bytes and operations since it was last asked."""
        before, self._taken = self._taken, (self.flops, self.bytes, self._operations)
        return self.flops - before[0], self.bytes - before[1], self._operations - before[2]


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
    plain = tuple(leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor | torch.Generator))
    key = (func, tuple((tensor.shape, tensor.dtype) for tensor in tensors), str(plain))
    if key not in _known:
        made = sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        formula: Callable[..., Any] = _FORMULAS.get(func._overloadpacket, lambda *args, **kwargs: made)
        _known[key] = float(formula(*args, **kwargs, out_val=out)), float(sum(tensor.nbytes for tensor in tensors))
    return _known[key]
