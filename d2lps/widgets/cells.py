"""Memory as a player shows it: each rank's buffers as rows, each row cut wherever any message or sum ever cut it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from d2lps.trace import Origins, Piece, Trace

_MOST_ROWS = 3  # a card with more is not read


@dataclass
class Row:
    """One variable of one rank: a tensor, or a list of tensors one after another. Positions count bytes from its start."""

    rank: int
    name: str
    places: dict[int, int] = field(default_factory=dict)  # buffer -> where it starts in the row
    nbytes: int = 0
    cuts: list[int] = field(default_factory=list)  # cell i lies between cuts[i] and cuts[i + 1]
    first_cell: int = 0  # the number of cell 0 among all cells of the scene


class Cells:
    """The rows to draw, their cells, and what pieces of memory mean in them."""

    def __init__(self, trace: Trace, origins: Origins, show: Sequence[str] | None, once: bool = True) -> None:
        self.trace, self.once = trace, once
        names = _inputs_first(trace, origins) if show is None else show
        self.rows = _rows(trace, names, chosen=show is not None)
        self.left_out = _keep_few(self.rows)
        self._row_of = {buffer: row for row in self.rows for buffer in row.places}
        self._cut(origins)
        count = 0
        for row in self.rows:
            row.first_cell = count
            count += len(row.cuts) - 1
        self.count = count

    def covered(self, buffer: int, pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
        """The cells that pieces of a buffer lie in; none if the buffer is not drawn."""
        found: dict[int, list[Piece]] = defaultdict(list)
        row = self._row_of.get(buffer)
        if row is not None:
            for piece in pieces:
                begin = row.places[buffer] + piece.offset
                for index in range(bisect_right(row.cuts, begin) - 1, len(row.cuts) - 1):
                    if row.cuts[index] >= begin + piece.length:
                        break
                    found[row.first_cell + index].append(piece)
        return found

    def content(self, pieces: Iterable[Piece]) -> dict[str, object] | None:
        """Whose contributions pieces hold, as ranks with repeats, and the label of the cells where they began."""
        ranks: list[int] = []
        labels: list[str] = []
        for piece in pieces:
            # A rank counts as often as the one of its tensors that counts most: what it gave in two tensors is two things.
            counts = Counter[int]()
            for (buffer, _), count in piece.sources.items():
                counts |= Counter({self.trace.buffers[buffer].rank: count})
            here = list(counts.elements())
            ranks = here if len(here) > len(ranks) else ranks
            labels += [self._label(*source) for source in piece.sources]
        distinct = sorted(set(labels) - {""}, key=lambda label: (len(label), label))
        label = "+".join(distinct) if len(distinct) <= 2 else f"{distinct[0]}…{distinct[-1]}"
        return {"label": label, "from": sorted(ranks if self.once else set(ranks))} if ranks else None

    def _label(self, buffer: int, offset: int) -> str:
        """The number of the cell in its row, "" where the row has but one."""
        row = self._row_of.get(buffer)
        if row is None or len(row.cuts) <= 2:
            return ""
        return str(bisect_right(row.cuts, row.places[buffer] + offset) - 1)

    def _cut(self, origins: Origins) -> None:
        """Rows of one name are cut alike on all ranks, so that cell 2 is the same chunk everywhere."""
        cuts: dict[str, set[int]] = defaultdict(set)
        for buffer, offset, length in _touched(origins):
            row = self._row_of.get(buffer)
            if row is not None and length:
                cuts[row.name] |= {row.places[buffer] + offset, row.places[buffer] + offset + length}
        for row in self.rows:
            edges = {edge for edge in cuts[row.name] if edge <= row.nbytes}
            row.cuts = sorted(edges | ({0, row.nbytes} if len(edges) < 2 else set()))


def _touched(origins: Origins) -> Iterable[tuple[int, int, int]]:
    for part in origins.initial:
        yield part.buffer, part.offset, part.length
    for change in origins.changes:
        assert change.event.into is not None
        for piece in change.pieces:
            yield change.event.into.buffer, piece.offset, piece.length
            # Where a piece came from is cut like the piece, so that a label names all of it.
            for buffer, offset in piece.sources:
                yield buffer, offset, piece.length


def _inputs_first(trace: Trace, origins: Origins) -> list[str]:
    """The names of all buffers: those that held data at the start, then those that only received some."""
    names = [buffer.name.partition("[")[0] for buffer in trace.buffers]
    return list(dict.fromkeys([names[part.buffer] for part in sorted(origins.initial, key=lambda part: part.buffer)] + names))


def _rows(trace: Trace, show: Sequence[str], chosen: bool) -> list[Row]:
    """One row for each of these variables of each rank; list items join into one row. Not chosen, scratch stays out."""
    names = [buffer.name.partition("[")[0] for buffer in trace.buffers]
    if unknown := set(show) - set(names):
        raise ValueError(f"show={list(show)!r}: no rank had a tensor named {sorted(unknown)}, only {sorted(set(names) - {''})}")
    hidden = [buffer.scratch or name == "scratch" for buffer, name in zip(trace.buffers, names, strict=True)]
    wanted = [name in show and (chosen or not hide) for name, hide in zip(names, hidden, strict=True)]
    rows: dict[tuple[int, str], Row] = {}
    items: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for index, buffer in enumerate(trace.buffers):
        if (wanted[index] or not any(wanted)) and buffer.nbytes:
            key = (buffer.rank, names[index])
            rows.setdefault(key, Row(*key))
            item = buffer.name.partition("[")[2].rstrip("]")
            items[key].append((int(item) if item else 0, index))
    for key, row in rows.items():
        for _, index in sorted(items[key]):
            row.places[index] = row.nbytes
            row.nbytes += trace.buffers[index].nbytes
    order = {name: place for place, name in enumerate(show)}
    return sorted(rows.values(), key=lambda row: (row.rank, order[row.name]))


def _keep_few(rows: list[Row]) -> list[str]:
    """Take out what would not fit into a card; return the names."""
    left_out: dict[str, None] = {}
    for rank in {row.rank for row in rows}:
        for row in [row for row in rows if row.rank == rank][_MOST_ROWS:]:
            rows.remove(row)
            left_out[row.name] = None
    return list(left_out)
