"""A step of parallel training as a picture, from its trace alone: what ranks compute, send along which axis, and hold.

A message's axis is that of its group (see `Mesh`), what it carries and in which shape is the beginning of its step's name (see
`Communicator.about`), what is held are the spans of `allocate`; nothing here knows of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import prod
from typing import Any

import numpy as np

from d2lps.trace import Trace
from d2lps.trace.tables import Columns
from d2lps.widgets.step_events import Episode, blocks, episodes, groups, held, mesh, short
from d2lps.widgets.step_story import Shapes, free, stops

AXES = ("dp", "tp", "pp", "cp", "ep")  # in the order of their colors; behind them all others


def scene(trace: Trace, since: float = 0.0) -> dict[str, Any]:
    """All of it from `since` on, as plain values; what ends before that is left out, but for what is held then."""
    trace = _later(trace, since) if since else trace
    found = groups(trace)
    axes, done, computed, memory = mesh(trace, found), episodes(trace, found), blocks(trace), held(trace)
    known = list(dict.fromkeys([*AXES, *axes, ""]))
    shapes, m = [Shapes(axes).of(episode) for episode in done], trace.messages
    end = max([0.0, *(block.end for block in computed), *(episode.end for episode in done)])
    if not end:
        raise ValueError("nothing is computed and nothing sent in this trace: there is no step to show")
    went = np.flatnonzero(~np.isnan(m["end"]))
    rows = zip(*(m[column][went].tolist() for column in ("src", "dst", "start", "end", "nbytes", "group")), strict=True)
    styles = [known.index(group.axis) for group in found]
    return {
        "end": end, "unit": "s", "ranks": _ranks(trace.ranks, axes),
        "axes": [{"name": axis, "style": known.index(axis), "size": len(several[0])} for axis, several in axes.items()],
        "messages": [[src, dst, short(t), short(until), nbytes, styles[group]] for src, dst, t, until, nbytes, group in rows],
        "episodes": [_episode(episode, known, drawn) for episode, drawn in zip(done, shapes, strict=True)],
        "blocks": [[b.rank, short(b.start), short(b.end), b.kind, b.text, b.label] for b in computed],
        "waits": _waits(trace), "talks": _talks(trace, styles),
        "held": [{kind: [x for t, now in steps for x in (short(t), now)] for kind, steps in mine.items()} for mine in memory],
        "stops": stops(computed, list(zip(done, shapes, strict=True)), end),
    }  # fmt: skip


def _episode(episode: Episode, known: Sequence[str], shapes: list[dict[str, Any]]) -> dict[str, Any]:
    told = {"start": short(episode.start), "end": short(episode.end), "ranks": list(episode.group.members), "shapes": shapes}
    return told | {"style": known.index(episode.group.axis), "about": free(episode.about)}


def _later(trace: Trace, since: float) -> Trace:
    """The trace with `since` as its beginning, in those of its tables that are drawn here."""
    rest = copy(trace)

    def cut(table: Columns) -> Columns:
        kept = {name: column[np.isnan(table["end"]) | (table["end"] > since)] for name, column in table.items()}
        return kept | {name: _clipped(kept[name] - since) for name in ("start", "end")}

    rest.messages = cut(trace.messages)
    rest._tables = {name: cut(getattr(trace, name)) for name in ("spans", "waits")}
    return rest


def _clipped(times: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(times), times, np.maximum(times, 0.0))


def _ranks(count: int, axes: Mapping[str, Sequence[tuple[int, ...]]]) -> list[dict[str, Any]]:
    """Each with its place in a grid: to the right goes a pipeline, else the innermost axis, and the third where there is one."""
    places = _places(count, axes)
    sizes = {axis: 1 + max(place[axis] for place in places) for axis in axes}
    order = sorted((axis for axis in axes if sizes[axis] > 1), key=lambda axis: axis != "pp")
    across, down = order[:1] + order[2:], order[1:2]
    if len({tuple(place.values()) for place in places}) != count or (not down and count > 4):
        return [{"name": str(rank), "x": rank % 4, "y": rank // 4} for rank in range(count)]

    def at(place: Mapping[str, int], along: Sequence[str]) -> int:
        return sum(place[axis] * prod(sizes[inner] for inner in along[:k]) for k, axis in enumerate(along))

    return [{"name": str(rank), "x": at(place, across), "y": at(place, down)} for rank, place in enumerate(places)]


def _places(count: int, axes: Mapping[str, Sequence[tuple[int, ...]]]) -> list[dict[str, int]]:
    """Each rank's place along each axis: in its group, among those that stand alike along all axes with smaller groups.

    So where those that share experts also share the batch, dp counts the copies of the experts.
    """
    places: list[dict[str, int]] = [{} for _ in range(count)]
    for axis in sorted(axes, key=lambda axis: len(axes[axis][0])):
        before = [tuple(place.values()) for place in places]
        for rank, place in enumerate(places):
            group = next((members for members in axes[axis] if rank in members), (rank,))
            place[axis] = [other for other in group if before[other] == before[rank]].index(rank)
    return places


def _waits(trace: Trace) -> list[list[float]]:
    """[rank, start, end, ...]: while a rank's own thread waits, it computes nothing."""
    table = {name: column[trace.waits["lane"] == 0] for name, column in trace.waits.items()}
    return _flat(table, table["rank"])


def _talks(trace: Trace, styles: Sequence[int]) -> list[list[float]]:
    """[rank, style, start, end, ...] of each rank and axis along which it sends or receives, in any lane."""
    m = trace.messages
    ends = [{"rank": m[end], "start": m["start"], "end": m["end"]} for end in ("src", "dst")]
    table = {name: np.concatenate([end[name] for end in ends]) for name in ends[0]}
    style = np.array(styles, dtype=int)[np.tile(m["group"], 2)]
    return [[row[0] // 100, row[0] % 100, *row[1:]] for row in _flat(table, table["rank"] * 100 + style)]


def _flat(table: Columns, key: np.ndarray) -> list[list[float]]:
    """[key, start, end, start, end, ...]: what overlaps or touches is one."""
    found = []
    for each in np.unique(key).tolist():
        chosen = (key == each) & ~np.isnan(table["end"])
        pairs: list[list[float]] = []
        for start, end in sorted(zip(table["start"][chosen].tolist(), table["end"][chosen].tolist(), strict=True)):
            if pairs and start <= pairs[-1][1]:
                pairs[-1][1] = max(pairs[-1][1], end)
            elif end > start:
                pairs.append([start, end])
        found.append([each, *(short(t) for pair in pairs for t in pair)])
    return found
