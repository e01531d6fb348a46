"""Memory as pictures show it: each rank's buffers as rows, each row cut wherever any message or sum ever cut it."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, islice
from typing import NamedTuple

from d2lps.trace import Change, Origins, Piece, Trace

_MOST_ROWS = 3  # a card with more is not read


class Row(NamedTuple):
    """One variable of one rank: a tensor, or a list of tensors one after another."""

    rank: int
    name: str
    buffers: Sequence[int]


class Cells:
    """The cells of all rows, numbered row by row, and what pieces of memory mean in them.

    Cell i of a row lies between its cuts i and i + 1, in bytes from the row's start. whole: also what nothing ever touched
    belongs to the cells. once: a contribution that is counted twice is told twice.
    """

    def __init__(self, trace: Trace, origins: Origins, rows: Sequence[Row], whole: bool = False, once: bool = True) -> None:
        self.trace, self.rows, self.once = trace, rows, once
        self._places: dict[int, tuple[int, int]] = {}  # buffer -> its row, and where it starts there
        edges: dict[str, set[int]] = defaultdict(set)  # alike on all ranks, so that cell 2 is the same chunk everywhere
        sizes = [0] * len(rows)
        for number, row in enumerate(rows):
            for buffer in row.buffers:
                self._places[buffer] = number, sizes[number]
                sizes[number] += trace.buffers[buffer].nbytes
        changed = [(change.into.buffer, piece) for change in origins.changes for piece in change.pieces]
        for holder, piece in origins.initial + changed:
            for buffer, offset in ((holder, piece.offset), *piece.sources):  # also where it came from: a label names all of it
                if buffer in self._places:
                    number, start = self._places[buffer]
                    edges[rows[number].name] |= {start + offset, start + offset + piece.length}
        self.cuts: list[list[int]] = []
        for row, size in zip(rows, sizes, strict=True):
            cuts = {edge for edge in edges[row.name] if edge <= size}
            self.cuts.append(sorted(cuts if len(cuts) > 1 and not whole else cuts | {0, size}))
        self._first = [0, *accumulate(len(cuts) - 1 for cuts in self.cuts)]
        self.count = self._first[-1]

    def covered(self, buffer: int, pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
        """The cells that pieces of a buffer lie in; none if the buffer is in no row."""
        found: dict[int, list[Piece]] = defaultdict(list)
        row, start = self._places.get(buffer, (-1, 0))
        for piece in pieces if row >= 0 else ():
            begin, end = start + piece.offset, start + piece.offset + piece.length
            for index in range(bisect_right(self.cuts[row], begin) - 1, bisect_left(self.cuts[row], end)):
                found[self._first[row] + index].append(piece)
        return found

    def content(self, pieces: Sequence[Piece]) -> dict[str, object] | None:
        """Whose contributions pieces hold, as ranks with repeats, and the label of the cells where they began."""
        labels = {self._label(*source) for piece in pieces for source in piece.sources} - {""}
        distinct = sorted(labels, key=lambda label: (len(label), label))
        label = "+".join(distinct) if len(distinct) <= 2 else f"{distinct[0]}…{distinct[-1]}"
        ranks = self.ranks(pieces)
        return {"label": label, "from": ranks if self.once else sorted(set(ranks))} if ranks else None

    def ranks(self, pieces: Iterable[Piece]) -> list[int]:
        """Whose contributions the fullest of pieces holds: [0, 1, 1] counts rank 1's twice.

        A rank counts as often as the one of its tensors that counts most: what it gave in two tensors is two things.
        """
        fullest: list[int] = []
        for piece in pieces:
            counts = Counter[int]()
            for (buffer, _), count in piece.sources.items():
                rank = self.trace.buffers[buffer].rank
                counts[rank] = max(counts[rank], count)
            fullest = max(fullest, sorted(counts.elements()), key=len)
        return fullest

    def _label(self, buffer: int, offset: int) -> str:
        """The number of the cell in its row, "" where the row has but one."""
        row, start = self._places.get(buffer, (-1, 0))
        return str(bisect_right(self.cuts[row], start + offset) - 1) if row >= 0 and len(self.cuts[row]) > 2 else ""


def seconds(trace: Trace, change: Change) -> float:
    """When what changed was there."""
    return float((trace.messages if change.event.kind == "recv" else trace.locals)["end"][change.event.index])


# ---- which rows -----------------------------------------------------------------------------------------------------


def inputs(trace: Trace, origins: Origins) -> list[Row]:
    """For each rank the tensor that it started with: its largest buffer with data of its own."""
    own = sorted({buffer for buffer, _ in origins.initial}, key=lambda buffer: (trace.buffers[buffer].nbytes, -buffer))
    largest = {trace.buffers[buffer].rank: buffer for buffer in own}  # of each rank the last one stays
    return [Row(rank, trace.buffers[buffer].name, [buffer]) for rank, buffer in largest.items()]


def variables(trace: Trace, origins: Origins, show: Sequence[str] | None) -> tuple[list[Row], list[str]]:
    """(rows of these variables, names of those beyond three a rank). By default what held data at the start comes first, then
    what only received some, without scratch unless there is nothing else. ValueError for a name that no rank had."""
    names = [buffer.name.partition("[")[0] for buffer in trace.buffers]
    started = [names[buffer] for buffer in sorted({buffer for buffer, _ in origins.initial})]
    order = list(dict.fromkeys(started + names if show is None else show))
    if unknown := set(order) - set(names):
        raise ValueError(f"show={order!r}: no rank had a tensor named {sorted(unknown)}, only {sorted(set(names) - {''})}")
    hidden = [show is None and (buffer.scratch or name == "scratch") for buffer, name in zip(trace.buffers, names, strict=True)]
    wanted = [b for b, name in enumerate(names) if name in order and not hidden[b]] or range(len(names))

    def place(b: int) -> tuple[int, int]:
        return trace.buffers[b].rank, order.index(names[b])

    def item(b: int) -> int:  # "parts[3]" is number 3 of its list
        return int(trace.buffers[b].name.partition("[")[2].rstrip("]") or 0)

    filled = sorted((b for b in wanted if trace.buffers[b].nbytes), key=lambda b: (place(b), item(b), b))
    rows = [Row(rank, order[k], list(buffers)) for (rank, k), buffers in groupby(filled, place)]
    kept = [row for _, mine in groupby(rows, lambda row: row.rank) for row in islice(mine, _MOST_ROWS)]
    return kept, list(dict.fromkeys(row.name for row in rows if row not in kept))
