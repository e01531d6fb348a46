"""A trace as what a player draws: ranks with rows of cells, messages between them, and how the cells change.

Everything is computed here, from the trace alone; the JavaScript only draws it. Time runs in rounds (messages that
could travel at the same time do), which are the same in every run, or in the seconds that were measured or simulated.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from d2lps.trace import Origins, Trace
from d2lps.widgets import captions
from d2lps.widgets.cells import Cells, seconds, variables
from d2lps.widgets.code import Code
from d2lps.widgets.texts import PLAYER

_MOST_MESSAGES = 3000
_FINEST = 1 / 1000  # of the whole time: what is shorter in a strip is joined to its neighbor


class Scene:
    """What of a player's scene comes from the trace, as plain values; see `Player` for the arguments."""

    def __init__(
        self, trace: Trace, show: Sequence[str] | None, clock: str, names: Sequence[str], once: bool, code: Code | None = None
    ) -> None:  # fmt: skip
        if clock not in ("rounds", "time"):
            raise ValueError(f"clock={clock!r} is unknown: choose 'rounds' or 'time'")
        self.trace, self.names, self.timed, self.origins, self.code = trace, names, clock == "time", Origins(trace), code
        rows, self.left_out = variables(trace, self.origins, show)
        self.cells = Cells(trace, self.origins, rows, once=once)
        m, rounds = trace.messages, trace.replay.round_of
        self.rounds = rounds
        self.starts: np.ndarray = m["start"] if self.timed else rounds - 1
        self.ends: np.ndarray = m["end"] if self.timed else rounds
        # Whole rounds are drawn, from the first on, as many as a browser can hold.
        totals = np.cumsum(np.bincount(rounds, minlength=1))
        self.last_round = max(1, int(np.searchsorted(totals, _MOST_MESSAGES, side="right")) - 1)
        # What was started has a group, and stops, of its own.
        self.calls: np.ndarray = np.where(m["src_lane"] * self.timed > 0, m["group"], -1)
        # Not in the order of the clock, which differs from run to run.
        order = np.lexsort((m["src_seq"], m["src_thread"], m["src"], rounds))
        self.shown = order[rounds[order] <= self.last_round]

    def note(self) -> str:
        """What is not drawn, in words."""
        shown, all = len(self.shown), len(self.trace)
        shortened = PLAYER["shortened"].format(shown=shown, all=all) if shown < all else ""
        left_out = PLAYER["rows_left_out"].format(names=", ".join(self.left_out)) if self.left_out else ""
        return " ".join(filter(None, [shortened, left_out]))

    def memory(self) -> dict[str, Any]:
        """The rows, their cells, what each cell held before the run, and how many contributions make it complete."""
        cells: list[dict[str, Any]] = []
        for row, cuts in enumerate(self.cells.cuts):
            edges = [round((cut - cuts[0]) / max(1, cuts[-1] - cuts[0]), 5) for cut in cuts]  # of what is drawn of the row
            cells += ({"row": row, "start": start, "stop": stop} for start, stop in pairwise(edges))
        held: list[dict[str, Any] | None] = [None] * len(cells)
        for buffer, own in self.origins.initial:  # a rank's own data, in what was ever read before it was written
            for cell, pieces in self.cells.covered(buffer, [own]).items():
                held[cell] = self.cells.content(pieces)
        summed = any(change.event.kind == "combine" for change in self.origins.changes)
        rows = [{"rank": row.rank, "name": row.name} for row in self.cells.rows]
        return {"rows": rows, "cells": cells, "initial": held, "whole": self.trace.ranks if summed else 0}

    # ---- what happens, and when -------------------------------------------------------------------------------------

    def moments(self) -> dict[str, Any]:
        """Where a step of the clock leads, the messages and the changes, up to the end of the clock."""
        stops, changes = self._stops(), self._changes()
        end = max([stops[-1]["t"], *(change["t"] for change in changes)])  # the last sum may follow the last message
        found = {"unit": "s" if self.timed else "round", "end": end, "stops": stops, "changes": changes}
        found["messages"] = [self._message(rows) for rows in self._bundles()]
        # A round takes no certain time, so what is computed meanwhile has no place in it.
        return found | (strip(self.trace, end, whole=len(self.shown) == len(self.trace)) if self.timed else {})

    def _stops(self) -> list[dict[str, Any]]:
        """One for each round; on a real clock, what ran beside has stops of its own, since it may begin at any time."""
        rounds, calls = self.rounds, self.calls
        stops: list[dict[str, Any]] = [{"t": 0, "label": PLAYER["start"], "say": PLAYER["before"], "text": ""}]
        happened = defaultdict(set)  # in each round
        for change in self.origins.changes:
            happened[change.event.round].add(change.event.kind)
        for call, round in sorted(set(zip(calls[self.shown].tolist(), rounds[self.shown].tolist(), strict=True))):
            messages = self.shown[(rounds[self.shown] == round) & (calls[self.shown] == call)]
            labels = list(dict.fromkeys(self.trace.steps[step] for step in self.trace.messages["step"][messages]))
            label = " · ".join(filter(None, labels[:3])) or PLAYER["round"].format(k=round)
            t = np.nanmax(self.ends[(rounds <= round) & (calls == call)], initial=0).item()
            say = captions.reason(self.trace, messages, self.names, happened[round])
            stops.append({"t": t, "label": label, "say": say, "text": self._listed(messages)})
        return sorted(stops, key=lambda stop: stop["t"])

    def _listed(self, messages: np.ndarray) -> str:
        parts = {index: [str(part["label"]) for part in self._parts(index) if part["label"]] for index in messages.tolist()}
        return captions.listed(self.trace, messages, self.names, parts)

    def _bundles(self) -> list[list[int]]:
        """Messages that go the same way in the same round, and are on their way together: they are drawn as one."""
        m, bundles = self.trace.messages, dict[tuple[int, ...], list[list[int]]]()
        ways = zip(self.calls.tolist(), self.rounds.tolist(), m["src"].tolist(), m["dst"].tolist(), strict=True)
        keys = list(ways)
        for index in self.shown.tolist():
            mine = bundles.setdefault(keys[index], [])
            if mine and self.starts[index] < max(self.ends[mine[-1]]):
                mine[-1].append(index)
            else:
                mine.append([index])
        return [bundle for mine in bundles.values() for bundle in mine]

    def _message(self, bundle: list[int]) -> dict[str, Any]:
        """A bundle as one: from the first start to the last end; `first`, the first end, tells where its parts land."""
        m, index = self.trace.messages, bundle[0]
        found = {"src": m["src"][index].item(), "dst": m["dst"][index].item(), "start": min(self.starts[bundle]).item()}
        found |= {"end": max(self.ends[bundle]).item(), "bytes": m["nbytes"][bundle].sum().item(), "tag": m["tag"][index].item()}
        if len(bundle) > 1:
            found |= {"n": len(bundle), "first": min(self.ends[bundle]).item()}
        if self.code is not None:
            found |= self.code.lines(bundle)
        return found | {"parts": [part for row in bundle for part in self._parts(row)]}

    def _parts(self, index: int) -> list[dict[str, Any]]:
        """What a message carries, one part for each cell of where it came from (neighbors alike are one)."""
        contents = (self.cells.content([piece]) for piece in self.origins.carried.get(index, []))
        return [content for content, _ in groupby(filter(None, contents))]

    def _changes(self) -> list[dict[str, Any]]:
        changes = []
        for change in self.origins.changes:
            event = change.event
            if event.round > self.last_round:
                continue
            t = seconds(self.trace, change) if self.timed else event.round
            op = self.trace.ops[self.trace.locals["op"][event.index]].lower() if event.kind == "combine" else ""
            for cell, pieces in self.cells.covered(change.into.buffer, change.pieces).items():
                changes.append({"t": t, "cell": cell, "how": event.kind, "op": op, **(self.cells.content(pieces) or {})})
        return sorted(changes, key=lambda change: change["t"])


def strip(trace: Trace, end: float, whole: bool = True) -> dict[str, Any]:
    """What every lane of every rank does over time, as a player shows it under its picture:
    {"strip": [of each lane {"rank", "bars": [{"kind", "label", "times": "start end start end ..."}]}], "end": s}.

    whole: until the last bar ends, however late; else until `end`.
    """
    drawn, used = trace.bars(), trace.lanes()
    if whole:
        end = float(max([end, *(table["end"].max(initial=0.0) for table in drawn.values())]))
    found: list[dict[str, Any]] = [{"rank": rank, "bars": []} for rank in range(trace.ranks) for _ in range(used[rank])]
    first = np.cumsum(used) - used  # the number of each rank's lane 0 among all lanes
    for kind, table in drawn.items():
        times: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        columns = first[table["rank"]] + table["lane"], table["label"], table["start"], np.minimum(table["end"], end)
        for lane, label, start, until in zip(*(column.tolist() for column in columns), strict=True):
            if start < until:
                times[lane, label].append((start, until))
        for (lane, label), pairs in times.items():
            text = " ".join(f"{t:.6g}" for pair in _joined(sorted(pairs), end * _FINEST) for t in pair)
            found[lane]["bars"].append({"kind": kind, "label": label, "times": text})
    return {"strip": found, "end": end}


def _joined(pairs: list[tuple[float, float]], least: float) -> list[list[float]]:
    """`_joined([(0, 4), (2, 5), (5, 7), (7.1, 7.2)], 1) == [[0, 5], [5, 7.2]]`: what overlaps, and what is short and near."""
    out: list[list[float]] = []
    for start, end in pairs:
        if out and (start < out[-1][1] or max(end - start, start - out[-1][1]) < least):
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out
