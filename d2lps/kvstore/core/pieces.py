"""Parts cut anew: what a server has of a tensor under another placement, put together from what was here and there before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.placement import key_of

Plain = list[Any]  # an Entry without its place: value, the optimizer's tensors, version, owner


class Pieces:
    """Parts of any size, from which others are cut.

    >>> pieces = Pieces([Entry("w[0:2]", torch.tensor([0., 1.])), Entry("w[2:4]", torch.tensor([2., 3.]), version=7)])
    >>> pieces.cut("w[1:3]")
    [tensor([1., 2.]), {}, 7, ()]
    >>> pieces.cut("w")[0]
    tensor([0., 1., 2., 3.])

    The optimizer's tensors are cut as the value is, where they have its shape, and begin with zeros where there are none yet;
    of others, such as a count of steps, the largest goes on. Nothing shares memory with the pieces. Cost: the bytes of the part.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.by_key: dict[str, list[tuple[int, Entry]]] = {}  # with the first row of each
        for entry in entries:
            key, first, _ = key_of(entry.key)
            self.by_key.setdefault(key, []).append((first, entry))

    def cut(self, name: str) -> Plain:
        """A part, by its name; ValueError if some of its rows are nowhere."""
        found = list(self._found(name))
        tensors = [(*entry.peeked(), rows) for entry, rows in found]
        moments: dict[str, torch.Tensor] = {}
        for field in dict.fromkeys(field for _, state, _ in tensors for field in state):
            there = [state[field] for _, state, _ in tensors if field in state]
            if any(state[field].shape == value.shape for value, state, _ in tensors if field in state):
                moments[field] = _join(state.get(field, torch.zeros_like(value))[rows] for value, state, rows in tensors)
            else:
                moments[field] = torch.stack(there).amax(0)
        value = _join(value[rows] for value, _, rows in tensors)
        return [value, moments, max(entry.version for entry, _ in found), found[0][0].owner]

    def _found(self, name: str) -> Iterator[tuple[Entry, Any]]:
        """The pieces that a part is made of, in order, and which rows of each; of a scalar all that there is."""
        key, first, last = key_of(name)
        pieces, reached = sorted(self.by_key.get(key, ()), key=lambda piece: piece[0]), first
        for begin, entry in pieces:
            end = begin + max([1, *entry.like.shape[:1]])
            if begin <= reached < end and (last is None or reached < last):
                yield entry, slice(reached - begin, None if last is None else last - begin) if entry.like.dim() else ...
                reached = end
        if reached == first or (last is not None and reached < last):
            raise ValueError(f"rows from {reached} of {name!r} are in none of {[entry.key for _, entry in pieces]}")


def _join(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    tensors = list(rows)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()
