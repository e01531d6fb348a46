"""How far an all-reduce has come, over time, from the origins of what every rank's memory holds."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from d2lps.trace import Change, Origins, Piece, Trace

Curve = list[tuple[float, float]]  # (t, share): the share from t on


def progress(trace: Trace) -> tuple[Curve, Curve]:
    """Two shares of the tensors that the ranks started with, whenever one of them changes: (complete, gathered).

    complete: of their bytes, those that hold the sum of all p ranks, each counted once. gathered: of the p summands that
    belong into each byte, those that are there, on average: 1/p at the start. A ring of 2 ranks, 4 s without latency:
    ([(0, 0), (2, 0.5), (4, 1)], [(0, 0.5), (2, 0.75), (4, 1)]).
    """
    origins = Origins(trace)
    memory = _Memory(trace, origins)
    changes = sorted(origins.changes, key=lambda change: _time(trace, change))
    complete, gathered = [(0.0, memory.complete())], [(0.0, memory.gathered())]
    for index, change in enumerate(changes):
        memory.write(change)
        t = _time(trace, change)
        if index + 1 == len(changes) or _time(trace, changes[index + 1]) > t:
            _note(complete, t, memory.complete())
            _note(gathered, t, memory.gathered())
    return complete, gathered


def _note(curve: Curve, t: float, share: float) -> None:
    if abs(share - curve[-1][1]) > 1e-9:
        curve.append((t, share))


def _time(trace: Trace, change: Change) -> float:
    table = trace.messages if change.event.kind == "recv" else trace.locals
    return float(table["end"][change.event.index])


class _Memory:
    """The ranks' input tensors, cut wherever a message or a sum ever cut them: how many summands each part holds."""

    def __init__(self, trace: Trace, origins: Origins) -> None:
        self.trace = trace
        self.edges = _edges(trace, origins)
        self.sizes = {buffer: np.diff(edges) for buffer, edges in self.edges.items()}
        self.summands = {buffer: np.ones(len(sizes)) for buffer, sizes in self.sizes.items()}
        self.right = {buffer: np.full(len(sizes), trace.ranks == 1) for buffer, sizes in self.sizes.items()}
        self.total = sum(int(sizes.sum()) for sizes in self.sizes.values())

    def write(self, change: Change) -> None:
        assert change.event.into is not None
        buffer = change.event.into.buffer
        for piece in change.pieces if buffer in self.edges else []:
            edges = self.edges[buffer]
            here = slice(bisect_left(edges, piece.offset), bisect_left(edges, piece.offset + piece.length))
            self.summands[buffer][here], self.right[buffer][here] = self._content(piece)

    def _content(self, piece: Piece) -> tuple[int, bool]:
        """How many ranks' data a piece holds, and whether it is that of all, each counted once."""
        ranks = {self.trace.buffers[buffer].rank for buffer, _ in piece.sources}
        return len(ranks), len(ranks) == self.trace.ranks == sum(piece.sources.values())

    def complete(self) -> float:
        return self._mean(self.right) if self.total else 1.0

    def gathered(self) -> float:
        return self._mean(self.summands) / self.trace.ranks if self.total else 1.0

    def _mean(self, values: dict[int, np.ndarray]) -> float:
        return sum(float(sizes @ values[buffer]) for buffer, sizes in self.sizes.items()) / self.total


def _edges(trace: Trace, origins: Origins) -> dict[int, list[int]]:
    """For the tensor that each rank started with (its largest buffer with data of its own): where it is ever cut."""
    inputs: dict[int, int] = {}
    for part in origins.initial:
        rank = trace.buffers[part.buffer].rank
        other = inputs.get(rank, part.buffer)
        inputs[rank] = max(part.buffer, other, key=lambda buffer: (trace.buffers[buffer].nbytes, -buffer))
    cuts = {buffer: {0, trace.buffers[buffer].nbytes} for buffer in inputs.values()}
    for change in origins.changes:
        assert change.event.into is not None
        for piece in change.pieces:
            if change.event.into.buffer in cuts:
                cuts[change.event.into.buffer] |= {piece.offset, piece.offset + piece.length}
    return {buffer: sorted(edges) for buffer, edges in cuts.items()}
