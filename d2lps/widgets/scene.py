"""A trace as what a player draws: ranks with rows of cells, messages between them, and how the cells change.

Everything is computed here, from the trace alone; the JavaScript only draws it. Time runs in rounds (messages that
could travel at the same time do), which are the same in every run, or in the seconds that were measured or simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from d2lps.trace import Origins, Piece, Trace
from d2lps.trace.origins import Sources
from d2lps.widgets.cells import Cells
from d2lps.widgets.texts import TEXTS

_MOST_MESSAGES = 3000
_NAMED = 6  # messages that a caption names one by one


def scene(
    trace: Trace,
    title: str = "",
    show: Sequence[str] | None = None,
    layout: Sequence[tuple[float, float]] | None = None,
    clock: str = "rounds",
    names: Sequence[str] | None = None,
    once: bool = True,
) -> dict[str, Any]:
    """The scene of a trace, a dictionary of plain values; see `Player` for the arguments."""
    if clock not in ("rounds", "time"):
        raise ValueError(f"clock={clock!r} is unknown: choose 'rounds' or 'time'")
    for what, given in (("layout", layout), ("names", names)):
        if given is not None and len(given) != trace.ranks:
            raise ValueError(f"{what} has {len(given)} entries, but the trace has {trace.ranks} ranks")
    origins, called = Origins(trace), names or [str(rank) for rank in range(trace.ranks)]
    return _Scene(trace, origins, Cells(trace, origins, show, once), clock).as_dict(title, layout or circle(trace.ranks), called)


def circle(ranks: int) -> list[tuple[float, float]]:
    """Places on a circle in the unit square, the first at the top, then clockwise."""
    angles = [2 * math.pi * rank / ranks for rank in range(ranks)]
    return [(0.5 + 0.5 * math.sin(a), 0.5 - 0.5 * math.cos(a)) for a in angles]


class _Scene:
    def __init__(self, trace: Trace, origins: Origins, cells: Cells, clock: str) -> None:
        self.trace, self.origins, self.cells, self.clock = trace, origins, cells, clock
        self.rounds = trace.replay.round_of
        self.last_round = self._last_round()
        # Not in the order of the clock, which differs from run to run.
        self.order = np.lexsort((trace.messages["src_seq"], trace.messages["src"], self.rounds))
        self.shown = self.order[self.rounds[self.order] <= self.last_round]

    def _last_round(self) -> int:
        """Whole rounds are drawn, from the first on, as many as a browser can hold."""
        totals = np.cumsum(np.bincount(self.rounds, minlength=1))
        return max(1, int(np.searchsorted(totals, _MOST_MESSAGES, side="right")) - 1)

    def as_dict(self, title: str, layout: Sequence[tuple[float, float]], names: Sequence[str]) -> dict[str, Any]:
        stops, changes = self._stops(names), self._changes()
        numbers = {id(row): index for index, row in enumerate(self.cells.rows)}
        return {
            "title": title,
            "unit": "round" if self.clock == "rounds" else "s",
            "end": max([stops[-1]["t"], *(change["t"] for change in changes)]),  # the last sum may follow the last message
            "stops": stops,
            "ranks": [{"name": name, "x": round(x, 4), "y": round(y, 4)} for name, (x, y) in zip(names, layout, strict=True)],
            "rows": [{"rank": row.rank, "name": row.name} for row in self.cells.rows],
            "cells": [
                {"row": numbers[id(row)], "start": _share(row.cuts, left), "stop": _share(row.cuts, right)}
                for row in self.cells.rows
                for left, right in zip(row.cuts, row.cuts[1:], strict=False)
            ],
            "initial": self._initial(),
            "messages": [self._message(int(index)) for index in self.shown],
            "changes": changes,
            "whole": self.trace.ranks if any(change.event.kind == "combine" for change in self.origins.changes) else 0,
            "note": self._note(),
            "texts": TEXTS,
        }

    # ---- when -----------------------------------------------------------------------------------------------------

    def _stop_time(self, round: int) -> float:
        if self.clock == "rounds":
            return round
        return float(np.nanmax(self.trace.messages["end"][self.rounds <= round], initial=0.0))

    def _change_time(self, kind: str, index: int, round: int) -> float:
        if self.clock == "rounds":
            return round
        return float((self.trace.messages if kind == "recv" else self.trace.locals)["end"][index])

    def _stops(self, names: Sequence[str]) -> list[dict[str, Any]]:
        stops: list[dict[str, Any]] = [{"t": 0, "label": TEXTS["start"], "text": TEXTS["before"]}]
        for round in range(1, min(self.last_round, int(self.rounds.max(initial=0))) + 1):
            messages = self.order[self.rounds[self.order] == round]
            labels = list(dict.fromkeys(self.trace.steps[step] for step in self.trace.messages["step"][messages]))
            label = " · ".join(filter(None, labels[:3])) or TEXTS["round"].format(k=round)
            stops.append({"t": self._stop_time(round), "label": label, "text": self._caption(messages, names)})
        return stops

    def _caption(self, messages: np.ndarray, names: Sequence[str]) -> str:
        m = self.trace.messages
        named = []
        for index in messages[:_NAMED]:
            labels = [str(part["label"]) for part in self._parts(int(index)) if part["label"]]
            what = TEXTS["part"].format(label=", ".join(labels)) if 0 < len(labels) <= 3 else ""
            words = {"src": names[m["src"][index]], "dst": names[m["dst"][index]], "what": what}
            named.append(TEXTS["sends"].format(bytes=f"{m['nbytes'][index]:,} B", **words))
        if len(messages) > _NAMED:
            named.append(TEXTS["more"].format(n=len(messages) - _NAMED))
        return "; ".join(named)

    # ---- what -----------------------------------------------------------------------------------------------------

    def _initial(self) -> list[dict[str, Any] | None]:
        """What each cell held before the run: its rank's own data if it was ever read before it was written."""
        held: list[dict[str, Any] | None] = [None] * self.cells.count
        for part in self.origins.initial:
            own = Piece(part.offset, part.length, Sources({(part.buffer, part.offset): 1}))
            for cell, pieces in self.cells.covered(part.buffer, [own]).items():
                held[cell] = self.cells.content(pieces)
        return held

    def _message(self, index: int) -> dict[str, Any]:
        m = self.trace.messages
        round = int(self.rounds[index])
        start, end = (round - 1, round) if self.clock == "rounds" else (float(m["start"][index]), float(m["end"][index]))
        ends = {"src": int(m["src"][index]), "dst": int(m["dst"][index]), "start": start, "end": end}
        return {**ends, "bytes": int(m["nbytes"][index]), "tag": int(m["tag"][index]), "parts": self._parts(index)}

    def _parts(self, index: int) -> list[dict[str, Any]]:
        """What a message carries, one part for each cell of where it came from (neighbours alike are one)."""
        parts: list[dict[str, Any]] = []
        for piece in self.origins.carried.get(index, []):
            content = self.cells.content([piece])
            if content and (not parts or parts[-1] != content):
                parts.append(content)
        return parts

    def _changes(self) -> list[dict[str, Any]]:
        changes = []
        for change in self.origins.changes:
            event = change.event
            round = int(self.rounds[event.index]) if event.kind == "recv" else event.round
            if event.into is None or round > self.last_round:
                continue
            op = self.trace.ops[self.trace.locals["op"][event.index]].lower() if event.kind == "combine" else ""
            for cell, pieces in self.cells.covered(event.into.buffer, change.pieces).items():
                when = self._change_time(event.kind, event.index, round)
                changes.append({"t": when, "cell": cell, "how": event.kind, "op": op, **(self.cells.content(pieces) or {})})
        return sorted(changes, key=lambda change: change["t"])

    def _note(self) -> str:
        notes = []
        if len(self.shown) < len(self.trace):
            notes.append(TEXTS["shortened"].format(shown=len(self.shown), all=len(self.trace)))
        if self.cells.left_out:
            notes.append(TEXTS["rows_left_out"].format(names=", ".join(self.cells.left_out)))
        return " ".join(notes)


def _share(cuts: list[int], edge: int) -> float:
    """A position as a fraction of what is drawn of its row."""
    return round((edge - cuts[0]) / max(1, cuts[-1] - cuts[0]), 5)
