"""Which collectives a product of sharded matrices needs: four rules, for the way forward and, applied again, for the way back.

A[B_X, T, D_Y] is a tensor with the dimensions B, T and D, of which B is cut among the ranks of the mesh's axis X, and D among
those of Y. Two tensors are multiplied, and added up over the dimensions that both have and the result has not.
"""

import re
from typing import NamedTuple

Dims = dict[str, str]  # of a tensor, in order: a dimension, and the axis that it is cut along, "" for none


class Move(NamedTuple):
    """A collective, on which tensor, over which axis of the mesh."""

    kind: str
    tensor: str
    axis: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor} over {self.axis}"


class Product(NamedTuple):
    left: tuple[str, Dims]
    right: tuple[str, Dims]
    out: tuple[str, Dims]

    @classmethod
    def of(cls, text: str) -> "Product":
        """Of "A[B_X, D] W[D, F_Y] -> C[B_X, F_Y]"."""
        tensors = []
        for name, inside in re.findall(r"(\w+)\[([\w, ]*)\]", text):
            dims = [dim.strip().partition("_") for dim in inside.split(",")]
            tensors.append((name, {dim: axis for dim, _, axis in dims}))
            axes = [axis for _, _, axis in dims if axis]
            if len(set(axes)) < len(axes):
                raise ValueError(f"{name}[{inside}] is cut twice along the same axis: a rank would have a diagonal of it")
        if len(tensors) != 3 or "->" not in text:
            raise ValueError(f"{text!r} is not a product like 'A[B_X, D] W[D, F_Y] -> C[B_X, F_Y]'")
        (_, left), (_, right), (name, out) = tensors
        if unknown := set(out) - set(left) - set(right):
            raise ValueError(f"{name} has the dimension {min(unknown)}, which neither of the factors has")
        return cls(*tensors)

    def __str__(self) -> str:
        inside = [", ".join(f"{dim}_{axis}" if axis else dim for dim, axis in dims.items()) for _, dims in self]
        left, right, out = (f"{name}[{dims}]" for (name, _), dims in zip(self, inside, strict=True))
        return f"{left} {right} -> {out}"


def collectives_of(product: str) -> list[Move]:
    """What must be sent so that every rank has its piece of the result.

    >>> collectives_of("A[B, D] W[D, F_Y] -> C[B, F_Y]")        # 1: what is added up over is whole: nothing
    []
    >>> collectives_of("A[B, D_X] W[D, F] -> C[B, F]")          # 2: it is cut in one factor: gather that
    [Move(kind='all-gather', tensor='A', axis='X')]
    >>> collectives_of("A[B, D_Y] W[D_Y, F] -> C[B, F]")        # 3: cut in both alike: the products are parts of a sum
    [Move(kind='all-reduce', tensor='C', axis='Y')]
    >>> collectives_of("A[B_X, D] W[D, F_X] -> C[B_X, F]")      # 4: both along one axis, elsewhere: gather one before
    [Move(kind='all-gather', tensor='W', axis='X')]

    A sum of which each rank shall have a piece is reduce-scattered. A result that is whole where a factor is cut is gathered
    afterwards, but for rule 4, by which the factor is gathered whose cut the result has not. To cut what is whole costs nothing.
    ValueError for a tensor that is cut twice along an axis, or a text that is not a product. Source: Austin et al. 2025, part 3.
    """
    left, right, out = Product.of(product)
    factors = [(name, dict(dims)) for name, dims in (left, right)]
    moves: list[Move] = []

    def whole(number: int, dim: str) -> None:
        name, dims = factors[number]
        moves.append(Move("all-gather", name, dims[dim]))
        dims[dim] = ""

    summed = [dim for dim in left[1] if dim in right[1] and dim not in out[1]]
    for dim in summed:
        if factors[0][1][dim] != factors[1][1][dim]:  # rule 2
            for number, (_, dims) in enumerate(factors):
                if dims[dim]:
                    whole(number, dim)
    for number, (_, dims) in enumerate(factors):  # rule 4
        for dim, axis in dims.items():
            clash = axis in factors[1 - number][1].values() and dim not in summed
            if axis and clash and out[1].get(dim) != axis:
                whole(number, dim)
    cut_along = {axis: dim for _, dims in factors for dim, axis in dims.items() if axis and dim not in summed}
    name, wanted = out
    for axis in dict.fromkeys(factors[0][1][dim] for dim in summed if factors[0][1][dim]):  # rule 3
        moves.append(Move("reduce-scatter" if axis in wanted.values() else "all-reduce", name, axis))
    moves += [Move("all-gather", name, axis) for axis, dim in cut_along.items() if wanted.get(dim) != axis]
    return moves


def backward_of(product: str) -> tuple[str, str]:
    """The two products of the way back: the gradient of the left factor and that of the right, each cut as the factor is.

    >>> backward_of("A[B, D] W[D, F_Y] -> C[B, F_Y]")
    ('dC[B, F_Y] W[D, F_Y] -> dA[B, D]', 'A[B, D] dC[B, F_Y] -> dW[D, F_Y]')
    """
    left, right, out = Product.of(product)
    d_left, d_right, d_out = ((f"d{name}", dims) for name, dims in (left, right, out))
    return str(Product(d_out, right, d_left)), str(Product(left, d_out, d_right))


def layer_collectives(product: str, keep: bool = True) -> tuple[list[Move], list[Move]]:
    """What a layer sends forward, and backward; keep: what was gathered forward stays until the way back.

    A result that is gathered is whole and alike on all ranks: of its gradient each takes the piece that it has made.

    >>> forward, backward = layer_collectives("A[B, D] W[D, F_Y] -> C[B, F_Y]")
    >>> *forward, *backward                             # of a column-parallel layer: Megatron's f
    (Move(kind='all-reduce', tensor='dA', axis='Y'),)
    """
    forward, (left, right, (name, dims)) = collectives_of(product), Product.of(product)
    gathered = {move.axis for move in forward if move.kind == "all-gather" and move.tensor == name}
    made = {dim: axis for factor in (left, right) for dim, axis in factor[1].items() if axis in gathered and dim in dims}
    backward = [move for way in backward_of(str(Product(left, right, (name, dims | made)))) for move in collectives_of(way)]
    return forward, [move for move in dict.fromkeys(backward) if not (keep and move in forward)]  # both ways may need the same
