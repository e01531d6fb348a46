"""What a rank holds of a tensor that many ranks share, and what two that cut it otherwise have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from d2lps.comm.rank import describe
from d2lps.parallel.shard import here, shard_of

Box = tuple[tuple[int, int], ...]  # of a tensor: where it begins and ends in each dimension
Cut = tuple[Box, int, int]  # elements from, to, of a box


@dataclass(frozen=True)
class Piece:
    """Elements start:stop of a box, laid out row by row, of a whole tensor of this shape.

    >>> half = Piece(torch.zeros(4), shape=(2, 4), box=((0, 2), (2, 4)))                    # its columns 2 and 3
    >>> Piece(torch.zeros(2), half.shape, half.box, 1, 3).boxes()       # of these, the second element and the third
    [((0, 1), (3, 4)), ((1, 2), (2, 3))]

    Tensor parallelism cuts boxes; ZeRO cuts ranges, of the whole or of a box. tensor: those elements, in any shape; a load
    writes into it. ValueError, with the numbers, for a tensor, a box or a range that do not fit.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    box: Box | None = None  # all of it
    start: int = 0
    stop: int | None = None  # to the box's end

    def __post_init__(self) -> None:
        box = tuple((0, size) for size in self.shape) if self.box is None else self.box
        stop = size_of(box) if self.stop is None else self.stop
        object.__setattr__(self, "box", box)
        object.__setattr__(self, "stop", stop)
        inside = len(box) == len(self.shape) and all(0 <= b <= e <= n for (b, e), n in zip(box, self.shape, strict=True))
        if not inside or not 0 <= self.start <= stop <= size_of(box):
            raise ValueError(f"elements {self.start}:{stop} of the box {box} do not lie in a tensor of shape {self.shape}")
        if self.tensor.numel() != stop - self.start:
            raise ValueError(f"{describe(self.tensor)} can't be elements {self.start}:{stop} of the box {box} of {self.shape}")

    @property
    def cut(self) -> Cut:
        """Which elements of the whole these are, in their order."""
        return self.box, self.start, self.stop  # type: ignore[return-value]

    def empty(self) -> Tensor:
        """Room for a copy in the CPU's memory: of the box's shape if these are all of it, else flat."""
        box, start, stop = self.cut
        shape = [stop - start] if stop - start < size_of(box) else _sizes(box)
        return torch.empty(shape, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda)

    def boxes(self) -> list[Box]:
        """The boxes that these elements are, one after another."""
        return list(_boxes(*self.cut))


def dtype_of(tensor: Tensor) -> str:
    """`dtype_of(torch.zeros(2)) == "float32"`"""
    return str(tensor.dtype).removeprefix("torch.")


def tuples(box: Iterable[Iterable[int]]) -> Box:
    """A box that comes from JSON."""
    return tuple((begin, end) for begin, end in box)


def size_of(box: Box) -> int:
    return prod(end - begin for begin, end in box)


def _boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """A range is the end of a row, whole rows, and the beginning of one; so is what it has of a row."""
    if start == stop:
        return
    if (start, stop) == (0, size_of(box)):
        yield box
        return
    (first, _), *rest = box
    length = size_of(inner := tuple(rest))
    while start < stop:
        row, left = divmod(start, length)
        rows = 0 if left else (stop - start) // length
        if rows:
            yield (first + row, first + row + rows), *inner
            start += rows * length
        else:
            end = min(stop, start - left + length)
            yield from (((first + row, first + row + 1), *part) for part in _boxes(inner, left, left + end - start))
            start = end


def copy_common(into: Piece, source: Piece) -> int:
    """Copy the elements that both pieces hold of one whole, however each is cut; how many they are.

    >>> columns = Piece(torch.zeros(4), (2, 4), ((0, 2), (2, 4)))
    >>> copy_common(columns, Piece(torch.arange(3.0) + 2, (2, 4), None, 2, 5)), columns.tensor      # elements 2, 3 and 4
    (2, tensor([2., 3., 0., 0.]))
    """
    count, at, room, gives = 0, 0, into.tensor.detach().view(-1), source.tensor.detach().view(-1)
    for box in into.boxes():
        place, behind = room[at : at + size_of(box)].view(_sizes(box)), 0
        at += size_of(box)
        for other in source.boxes():
            given = gives[behind : behind + size_of(other)].view(_sizes(other))
            behind += size_of(other)
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
            if all(begin < end for begin, end in both):
                place[_within(both, box)] = given[_within(both, other)]
                count += size_of(both)
    return count


def _sizes(box: Box) -> list[int]:
    return [end - begin for begin, end in box]


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(part, box, strict=True))


def overlap(one: Cut, other: Cut) -> bool:
    """Whether two cuts may have an element in common."""
    if one[0] == other[0]:
        return max(one[1], other[1]) < min(one[2], other[2])
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one[0], other[0], strict=True))


def flaw(shape: Iterable[int], cuts: list[Cut]) -> str:
    """What is wrong with pieces that should make up a whole, each element once; nothing if they do.

    >>> flaw((4,), [(((0, 4),), 0, 1), (((0, 4),), 2, 4)])
    '3 of 4 elements are there'
    """
    cuts = sorted(cut for cut in cuts if cut[1] < cut[2])
    have, all_of_it = sum(stop - start for _, start, stop in cuts), prod(shape)
    if have != all_of_it:
        return f"{have} of {all_of_it} elements are there"
    boxes = sorted({box for box, _, _ in cuts})
    near = [*pairwise(cuts), *(((a, 0, 1), (b, 0, 1)) for i, a in enumerate(boxes) for b in boxes[:i])]
    twice = next((pair for pair in near if overlap(*pair)), None)
    return f"{twice[0]} and {twice[1]} overlap" if twice else ""


# ---- of a module and its optimizer -----------------------------------------------------------------------------------------


def whole_of(parameter: Tensor, shape: Iterable[int]) -> tuple[tuple[int, ...], Box]:
    """Of a parameter that has this shape: that of the whole, and the box that its Shard says it is."""
    sizes, shard = list(shape), shard_of(parameter)
    box = [(0, size) for size in sizes]
    if shard is not None:
        size = sizes[shard.dim]
        sizes[shard.dim] = size * shard.comm.size
        box[shard.dim] = (size * shard.comm.rank, size * (shard.comm.rank + 1))
    return tuple(sizes), tuple(box)


def piece_of(parameter: Tensor) -> Piece:
    """A parameter, or a buffer, as what it is of the whole model's."""
    return Piece(parameter.detach(), *whole_of(parameter, parameter.shape))


def module_pieces(module: nn.Module) -> dict[str, Piece]:
    """A module's parameters and lasting buffers, by the names that they have in it.

    >>> module_pieces(nn.Linear(3, 2))["weight"].shape
    (2, 3)

    ValueError, with the name, for a parameter that is not there: those of `Zero(stage=3)` are in `Zero.pieces()`.
    """
    return {name: piece_of(here(name, tensor)) for name, tensor in lasting(module)}


def lasting(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of what a module is: parameters, each once, and the buffers that a `state_dict` has."""
    yield from module.named_parameters()
    kept = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


Held = Mapping[Any, Mapping[str, Piece]]  # of what an optimizer steps on: the pieces of parameters that lie in it, by name


def optimizer_pieces(
    optimizer: torch.optim.Optimizer, held: Held, saved: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Piece]:
    """The optimizer's tensors, cut like the parameters that they belong to: `block0.norm1.weight/exp_avg`.

    >>> layer = nn.Linear(3, 2, bias=False)
    >>> adam = torch.optim.Adam(layer.parameters())
    >>> layer(torch.ones(3)).sum().backward(); adam.step()
    >>> list(optimizer_pieces(adam, {layer.weight: module_pieces(layer)}))
    ['weight/step', 'weight/exp_avg', 'weight/exp_avg_sq']

    held: of each tensor that it steps on, what lies in it: a parameter as a whole, or ranges of several as in ZeRO, which are
    views of it. What has the parameter's shape is cut like it; a number alone, as Adam's count of steps, is whole. saved: the
    tensors of a manifest, to be loaded from: an optimizer that has not stepped yet gets room for what it had then.
    ValueError, with the name, for what an optimizer keeps and is no tensor.
    """
    found, numbers = {}, _numbers(saved or {})
    for flat, pieces in held.items():
        state = optimizer.state[flat] if saved else optimizer.state.get(flat, {})
        for full, about in (saved or {}).items():
            name, _, key = full.rpartition("/")
            if name in pieces and key not in state:
                alike = about["shape"] == list(pieces[name].shape) and key not in numbers
                room = torch.zeros(flat.shape if alike else about["shape"], dtype=getattr(torch, about["dtype"]))
                state[key] = room.to(flat.device) if alike else room
        for key, value in state_tensors(optimizer, state).items():
            for name, piece in pieces.items():
                found[f"{name}/{key}"] = _like(piece, flat, value)
    return found


def state_tensors(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of what an optimizer knows of one parameter, all that there is; ValueError where some is no tensor: it would be lost."""
    known = {key: value for key, value in state.items() if value is not None}
    for key, value in known.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{type(optimizer).__name__} keeps {key}={value!r}, and only tensors can be saved or moved")
    return known


def _numbers(saved: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Keys of what is one number for a whole parameter, as a count of steps, and not one for each of a scalar's: its only one.

    Parameters of other shapes tell them apart; where all are scalars, they are those of torch's own optimizers.
    """
    owners = {full: full.rpartition("/") for full, about in saved.items() if about["shape"] == []}
    found = {key for name, _, key in owners.values() if name in saved and saved[name]["shape"] != []}
    return found or {"step", "eta", "mu", "mu_product"}


def _like(piece: Piece, flat: Tensor, value: Tensor) -> Piece:
    if value.shape != flat.shape:
        return Piece(value, tuple(value.shape))
    at = piece.tensor.storage_offset() - flat.storage_offset()
    return Piece(value.view(-1)[at : at + piece.tensor.numel()], piece.shape, *piece.cut)
