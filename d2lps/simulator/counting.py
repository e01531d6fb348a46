"""How much torch computes in a block: the operations, and the bytes that they read and write."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _recurrent(products: int) -> Callable[..., int]:
    """One layer of an LSTM, in one direction: so many products of each time step's rows with both of its matrices."""

    def formula(rows: Any, own: Any, before: Any, *rest: Any, **more: Any) -> int:
        return 2 * products * rows.numel() // rows.shape[-1] * (own.numel() + before.numel())

    return formula


def _grouped(one: Any, other: Any, *rest: Any, **more: Any) -> int:
    """Products by groups; which of them share a matrix is in `rest`, and changes nothing."""
    return 2 * one.numel() * other.shape[-1] // (len(one) if one.dim() > other.dim() else 1)


def _attention(query: Any, key: Any, value: Any, width: int, heads: int, *rest: Any, **more: Any) -> int:
    """`rest`: the matrix of all three, its bias, and the matrix behind the heads."""
    return 2 * query.numel() * (len(rest[0]) + len(rest[2])) + 4 * query.numel() * key.shape[1]


def _encoder(x: Any, width: int, heads: int, *rest: Any, **more: Any) -> int:
    """`rest`: as above, a bias, three settings, two norms of two vectors, and the MLP's first matrix, as large as its other."""
    return _attention(x, x, x, width, heads, *rest) + 4 * x.numel() * len(rest[11])


# Products of which torch counts nothing. Attention in one operation on a CPU: products of all queries with as many keys, two of
# them forward, and backward five, as the scores are computed again; half of each is masked where it is causal, and counted too.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, *rest, **more: 4 * query.numel() * key.shape[-2],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda gradient, query, key, *rest, **more: 10 * query.numel() * key.shape[-2],
    _aten._native_multi_head_attention: _attention,
    _aten._transformer_encoder_layer_fwd: _encoder,
    _aten.mkldnn_rnn_layer: _recurrent(1),
    _aten.mkldnn_rnn_layer_backward: _recurrent(2),
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
    _aten.addbmm: lambda given, one, other, **more: 2 * one.numel() * other.shape[-1],
    _aten.addbmm_: lambda given, one, other, **more: 2 * one.numel() * other.shape[-1],
    _aten.mv: lambda matrix, vector, **more: 2 * matrix.numel(),
    _aten.addmv: lambda given, matrix, vector, **more: 2 * matrix.numel(),
    _aten.addmv_: lambda given, matrix, vector, **more: 2 * matrix.numel(),
    _aten.dot: lambda one, other, **more: 2 * one.numel(),
    _aten.vdot: lambda one, other, **more: 2 * one.numel(),
}  # fmt: skip
if hasattr(_aten, "_grouped_mm"):  # not every torch has it
    _FORMULAS[_aten._grouped_mm] = _grouped

_FREE = {  # besides views: room is made, and nothing is read or written
    _aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_}  # what was there before
_LOOKS_UP = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}  # of its first tensor as much as comes out

_known: dict[tuple[Any, ...], tuple[float, float]] = {}  # an operation of given shapes -> its FLOP and bytes


class Counting(TorchDispatchMode):
    """Sums up over all operations in the block, each distinct one (by shapes and dtypes) counted once.

    >>> one, other = torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    >>> with Counting() as counting:
    ...     product = one @ other
    >>> counting.flops, counting.bytes          # 2 x 2 x 3 x 4; 6 + 12 + 8 floats
    (48.0, 104.0)

    FLOP of matrix products, convolutions and attention are by formula, mostly torch's own; all else counts one for each element
    that it makes. A view costs nothing, and of a table in which it looks up, an operation reads what it finds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0.0
        self._taken = (0.0, 0.0, 0)
        self._operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _made_of_others(func):  # in the inference mode these come whole
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if not func.is_view and func._overloadpacket not in _FREE and func.namespace != "profiler":
            flops, nbytes = _cost(func, args, kwargs, out)
            self.flops, self.bytes, self._operations = self.flops + flops, self.bytes + nbytes, self._operations + 1
        return out

    def take(self) -> tuple[float, float, int]:
        """FLOP, bytes and operations since it was last asked."""
        before, self._taken = self._taken, (self.flops, self.bytes, self._operations)
        return self.flops - before[0], self.bytes - before[1], self._operations - before[2]


@cache
def _made_of_others(func: Any) -> bool:
    """Answered once for each operation: to try it every time made counting take half as long again."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return func._overloadpacket not in _FORMULAS and func.has_kernel_for_dispatch_key(composite)


def _cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    leaves = tree_leaves((args, kwargs))
    plain = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | torch.Generator))
    sizes = tuple((tensor.shape, tensor.dtype, _nbytes(tensor)) for tensor in _tensors([leaves, out]))
    if (key := (func, sizes, str(plain))) not in _known:
        made = _tensors(out) or _changed(func, args)
        elements = sum(tensor.numel() for tensor in made)
        formula: Callable[..., Any] = _FORMULAS.get(func._overloadpacket, lambda *args, **kwargs: elements)
        nbytes = sum(map(_nbytes, _read(func, args, kwargs, made))) + sum(map(_nbytes, made))
        _known[key] = float(formula(*args, **kwargs, out_val=out)), float(nbytes)
    return _known[key]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _changed(func: Any, args: Any) -> list[torch.Tensor]:
    """What an operation writes that returns nothing, such as an optimizer's step of a list of tensors."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    return _tensors([value for value, changed in zip(args, written, strict=False) if changed])


def _read(func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> list[torch.Tensor]:
    places = {argument.name for argument in func._schema.arguments if argument.is_out}
    given = _tensors([args, [value for name, value in kwargs.items() if name not in places]])
    if func._overloadpacket in _LOOKS_UP:
        return [*given[1:], *made]
    return given[1:] if func._overloadpacket in _OVERWRITES else given


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes
