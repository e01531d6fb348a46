"""Whose data every part of memory holds, as a run goes on.

Each byte of a buffer starts out as its own rank's, and is followed from there: a receive brings the sender's, a copy
another part's, a combine adds up both. What comes out is a count for each source, so that a contribution that an
algorithm forgot, or added twice, is plain to see. No payload is needed: this works for traces without any numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import NamedTuple

from d2lps.trace.replay import Event, Part
from d2lps.trace.trace import Trace

Sources = Counter[tuple[int, int]]  # (buffer, offset) of the first byte -> how often it was added up


class Piece(NamedTuple):
    """Bytes that share one history: `offset` in the buffer that holds them now, and where they come from."""

    offset: int
    length: int
    sources: Sources

    def between(self, begin: int, end: int) -> Piece:
        """`Piece(0, 8, Counter({(3, 4): 1})).between(2, 6) == Piece(2, 4, Counter({(3, 6): 1}))`"""
        cut = begin - self.offset
        moved = Counter({(buffer, offset + cut): count for (buffer, offset), count in self.sources.items()})
        return Piece(begin, end - begin, moved)

    @property
    def end(self) -> int:
        return self.offset + self.length


class Change(NamedTuple):
    """After `event`, the part `into` consists of these pieces."""

    event: Event
    into: Part
    pieces: list[Piece]


class Origins:
    """
    initial: (buffer, piece) of what was read before it was written, so that it held data of its rank's own
    changes: what each receive, copy and combine left behind, in a causal order
    carried: message -> the pieces that it carried
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.initial: list[tuple[int, Piece]] = []
        self.changes: list[Change] = []
        self.carried: dict[int, list[Piece]] = {}
        # Each buffer as a row of pieces without gaps; a piece without sources has not been touched yet.
        self._memory = [[Piece(0, buffer.nbytes, Counter())] for buffer in trace.buffers]
        for event in trace.replay.events:
            self._follow(event)

    def held(self, buffer: int) -> list[Piece]:
        """What a buffer holds at the end of the run."""
        return [piece for piece in self._memory[buffer] if piece.sources]

    def _follow(self, event: Event) -> None:
        if event.kind == "meet" or event.source is None or event.into is None:
            return
        if event.kind == "send":
            self.carried[event.index] = self._read(event.source)
            return
        pieces = self.carried[event.index] if event.kind == "recv" else self._read(event.source)
        if event.source.length != event.into.length:
            pieces = _as_one(pieces, event.source.offset, event.into.length)
        begin = event.into.offset - event.source.offset
        arriving = [piece._replace(offset=piece.offset + begin) for piece in pieces]
        if event.kind == "combine":
            arriving = _added(self._read(event.into), arriving)
        self._memory[event.into.buffer][self._where(event.into)] = arriving
        self.changes.append(Change(event, event.into, arriving))

    def _read(self, part: Part) -> list[Piece]:
        """What a part holds: its rank's own data, if it has not been touched yet."""
        row, where = self._memory[part.buffer], self._where(part)
        for index, piece in enumerate(row[where], where.start):
            if not piece.sources:
                row[index] = piece._replace(sources=Counter({(part.buffer, piece.offset): 1}))
                self.initial.append((part.buffer, row[index]))
        return row[where]

    def _where(self, part: Part) -> slice:
        """The pieces of a part among those of its buffer, cut at its two ends."""
        row = self._memory[part.buffer]
        return slice(_cut(row, part.offset), _cut(row, part.offset + part.length)) if part.length else slice(0, 0)


def _as_one(pieces: list[Piece], offset: int, length: int) -> list[Piece]:
    """What a strided tensor carried, packed into fewer bytes: of all its sources, without telling element by element."""
    sources: Sources = Counter()
    for piece in pieces:
        ranks = {buffer for buffer, _ in sources}
        sources += Counter({source: n for source, n in piece.sources.items() if source[0] not in ranks})
    return [Piece(offset, length, sources)] if length and sources else []


def _cut(row: list[Piece], offset: int) -> int:
    """Make a piece begin at `offset`; return its index."""
    index = bisect_right(row, offset, key=lambda piece: piece.offset) - 1
    piece = row[index]
    if piece.offset < offset < piece.end:
        row[index : index + 1] = [piece.between(piece.offset, offset), piece.between(offset, piece.end)]
    return index + (piece.offset < offset)


def _added(mine: list[Piece], arriving: list[Piece]) -> list[Piece]:
    """Two rows of pieces over the same bytes, their sources added up, cut wherever either is."""
    for row, other in ((mine, arriving), (arriving, mine)):
        for piece in other:
            _cut(row, piece.offset)
    return [Piece(one.offset, one.length, one.sources + other.sources) for one, other in zip(mine, arriving, strict=True)]
