"""Parts cut anew: what a server has of a tensor under another placement, put together from what was here and there before."""

from __future__ import annotations

from collections.abc import Iterable
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

    The optimizer's tensors are cut as the value is, where they have its shape; others are those of the first piece. What comes
    shares no memory with the pieces. Cost: the bytes of what is cut.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.by_key: dict[str, list[tuple[int, Entry]]] = {}  # with the first row of each
        for entry in entries:
            key, first, _ = key_of(entry.key)
            self.by_key.setdefault(key, []).append((first, entry))

    def cut(self, name: str) -> Plain:
        """A part, by its name; ValueError if some of its rows are nowhere."""
        key, first, last = key_of(name)
        found, reached = list[tuple[Entry, slice]](), first
        for begin, entry in sorted(self.by_key.get(key, ()), key=lambda piece: piece[0]):
            end = begin + max([1, *entry.like.shape[:1]])
            if begin <= reached < end and (last is None or reached < last):
                found.append((entry, slice(reached - begin, None if last is None else last - begin)))
                reached = end
        if not found or (last is not None and reached < last):
            raise ValueError(f"rows from {reached} of {name!r} are in none of {[e.key for _, e in self.by_key.get(key, ())]}")
        rows = [_rows(entry, part) for entry, part in found]
        whole = {field: torch.cat([row[field] for row in rows]) if len(rows) > 1 else rows[0][field].clone() for field in rows[0]}
        value, entry = whole.pop(""), found[0][0]
        rest = {field: moment.clone() for field, moment in entry.peeked()[1].items() if field not in whole}
        return [value, whole | rest, max(entry.version for entry, _ in found), entry.owner]


def _rows(entry: Entry, rows: slice) -> dict[str, torch.Tensor]:
    """These rows of an entry's tensors, by name, the value's being empty; of those alone that have rows."""
    value, moments = entry.peeked()
    shaped = {"": value} | {name: moment for name, moment in moments.items() if moment.shape == value.shape}
    return {name: tensor[rows] if tensor.dim() else tensor for name, tensor in shaped.items()}
