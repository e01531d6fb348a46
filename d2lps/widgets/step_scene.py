"""A step of parallel training as a picture, from its trace alone: what ranks compute, send along which axis, and hold.

A message's axis is that of its group (see `Mesh`), what it carries and in which shape is the beginning of its step's name (see
`Communicator.about`), what is held are the spans of `allocate`; nothing here knows of a plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from d2lps.trace import Trace
from d2lps.trace.tables import Columns
from d2lps.widgets.texts import STEPS

AXES = ("dp", "tp", "pp", "cp", "ep")  # in the order of their colours; behind them all others
HELD = ("weights", "gradients", "optimizer", "gathered", "activations", "other")
_COMPUTE = [re.compile(r"(?P<stage>\d*)(?P<kind>[FBW])(?P<k>\d+)")]
_COMPUTE += [re.compile(r"(?P<kind>forward|backward|weights)(?: (?P<k>\d+))?(?: stage (?P<stage>\d+))?")]
_SHAPE = re.compile(r"((?:grad )?[\w.]+)?\[([^\]]*)\](?:\{(\w+)\})?")
_MOST_STOPS = 60


class Group(NamedTuple):
    """Ranks that sent each other messages, by their numbers in the whole run, along an axis."""

    axis: str
    members: tuple[int, ...]


class Block(NamedTuple):
    """What a rank computes: kind is "F", "B", "W" of the micro-batch k; "" for all else, of which there is only the label."""

    rank: int
    start: float
    end: float
    kind: str
    stage: str
    k: str
    label: str

    @property
    def text(self) -> str:
        """What stands in its bar."""
        return f"{self.stage}{self.kind}{self.k}" if self.kind else self.label


class Episode(NamedTuple):
    """One collective of a group, or messages that belong together."""

    group: Group
    about: str
    start: float
    end: float


def groups(trace: Trace) -> list[Group]:
    """Of each entry of `trace.groups`; what was started on a group has the same members."""
    m, members = trace.messages, dict[str, set[int]]()
    base = [re.sub(r"/start\d+.*", "", name) for name in trace.groups]
    for group, src, dst in zip(m["group"].tolist(), m["src"].tolist(), m["dst"].tolist(), strict=True):
        members.setdefault(base[group], set()).update((src, dst))
    return [Group(axis, tuple(sorted(members.get(name, ())))) for axis, name in zip(trace.axes, base, strict=True)]


def mesh(trace: Trace, found: Sequence[Group]) -> dict[str, list[tuple[int, ...]]]:
    """{axis: its groups}, the innermost axis first; of those along which messages went, the largest groups."""
    axes: dict[str, set[tuple[int, ...]]] = {}
    for axis, members in found:
        if axis and len(members) > 1:
            axes.setdefault(axis, set()).add(members)
    largest = {axis: max(map(len, several)) for axis, several in axes.items()}
    kept = {axis: sorted(members for members in several if len(members) == largest[axis]) for axis, several in axes.items()}
    return dict(sorted(kept.items(), key=lambda item: item[1][0][1] - item[1][0][0]))


# ---- what happens -------------------------------------------------------------------------------------------------------


def blocks(trace: Trace) -> list[Block]:
    """All that was computed, in the order of time; a number before F, B or W where ranks have several stages."""
    spans = trace.spans
    chosen = (spans["kind"] == trace.kinds.index("compute")) & ~np.isnan(spans["end"])
    rows = sorted(zip(*(spans[column][chosen].tolist() for column in ("start", "end", "rank", "label")), strict=True))
    found = [Block(rank, start, end, *_read(trace.labels[label]), trace.labels[label]) for start, end, rank, label in rows]
    stages = {(block.rank, block.stage) for block in found if block.kind}
    several = len(stages) > len({rank for rank, _ in stages})
    return found if several else [block._replace(stage="") for block in found]


def _read(label: str) -> tuple[str, str, str]:
    """Kind, stage and micro-batch: `_read("1F0") == _read("forward 0 stage 1") == ("F", "1", "0")`."""
    found = _COMPUTE[0].fullmatch(label) or _COMPUTE[1].fullmatch(label)
    return (found["kind"][0].upper(), found["stage"] or "", found["k"] or "") if found else ("", "", "")


def episodes(trace: Trace, found: Sequence[Group]) -> list[Episode]:
    """Messages of one group about one thing, until there is a pause."""
    m, made, last = trace.messages, list[Episode](), dict[tuple[int, str], int]()
    least = 1e-9 * float(np.nanmax(m["end"], initial=0.0))
    for row in np.lexsort((m["end"], m["start"])).tolist():
        if not np.isnan(m["end"][row]):
            about = _about(trace.steps[m["step"][row]])
            start, end = float(m["start"][row]), float(m["end"][row])
            key = int(m["group"][row]), about
            at = last.get(key)
            if at is not None and start <= made[at].end + least:
                made[at] = made[at]._replace(end=max(end, made[at].end))
            else:
                last[key] = len(made)
                made.append(Episode(found[key[0]], about, start, end))
    return made


def _about(step: str) -> str:
    """What the messages of a step are about: `_about("x[B, T]{tp} → x[B, T]: all-gather 1/3") == "x[B, T]{tp} → x[B, T]"`."""
    return step.rpartition(": ")[0] or step.rstrip("0123456789/ ")


def held(trace: Trace) -> list[dict[str, list[tuple[float, float]]]]:
    """Of each rank, by kind: (from then on, so many bytes)."""
    spans, changes = trace.spans, [dict[str, list[tuple[float, float]]]() for _ in range(trace.ranks)]
    for row in np.flatnonzero(spans["kind"] == trace.kinds.index("memory")).tolist():
        word = trace.labels[spans["label"][row]].partition(" ")[0]
        mine = changes[spans["rank"][row]].setdefault(word if word in HELD else "other", [])
        mine.append((float(spans["start"][row]), float(spans["nbytes"][row])))
        if not np.isnan(spans["end"][row]):
            mine.append((float(spans["end"][row]), -float(spans["nbytes"][row])))
    return [{kind: _summed(mine[kind]) for kind in HELD if kind in mine} for mine in changes]


def _summed(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """`_summed([(0, 8), (2, -8), (1, 4)]) == [(0, 8), (1, 12), (2, 4)]`"""
    found = dict[float, float]()
    total = 0.0
    for t, nbytes in sorted(changes):
        total += nbytes
        found[t] = total
    return list(found.items())


# ---- shapes -------------------------------------------------------------------------------------------------------------


class Shapes:
    """What of a tensor each rank has, as a grid of cells: a cell for each piece into which it is cut."""

    def __init__(self, axes: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        self.axes = axes

    def of(self, episode: Episode) -> list[dict[str, Any]]:
        """Those before and after: {"name", "text", "grid": [rows, columns], "own": of each rank of the group its cell, or -1 for
        all, "partial": whether that is a summand}."""
        return [self._shape(episode.group, *found) for found in _SHAPE.findall(episode.about)[:2]]

    def _shape(self, group: Group, name: str, dims: str, partial: str) -> dict[str, Any]:
        letters = [self._cut(dim.strip(), group.axis) for dim in dims.split(",") if dim.strip()]
        text = f"{name}[{', '.join(letters)}]" + (f"{{U_{partial}}}" if partial else "")
        cuts = [axis for letter in letters if (axis := letter.partition("_")[2])]
        places = [[self._place(axis, rank, group) for axis in cuts] for rank in group.members]
        sizes = [size for _, size in places[0]] if places else []
        grid = [1, 1] if not sizes else [1, sizes[0]] if len(sizes) == 1 else [sizes[0], prod(sizes[1:])]
        own = [int(np.ravel_multi_index([at for at, _ in mine], sizes)) if mine else -1 for mine in places]
        return {"text": text, "grid": grid, "own": own, "partial": bool(partial)}

    def _cut(self, dim: str, axis: str) -> str:
        """The batch is cut along dp and tokens along cp, where there are those, whoever else cuts what."""
        along = {"B": "dp", "T": "cp"}.get(dim)
        return f"{dim}_{along}" if along in self.axes and along != axis else dim

    def _place(self, axis: str, rank: int, group: Group) -> tuple[int, int]:
        """Which piece along an axis a rank has, and of how many."""
        several = [group.members] if axis == group.axis else self.axes.get(axis, [])
        mine = next((members for members in several if rank in members), (rank,))
        return mine.index(rank), len(mine)


def name(episode: Episode) -> str:
    """What is done, as the shapes tell it: "all-gather"."""
    found = _SHAPE.findall(episode.about)
    if len(found) < 2:
        return STEPS["send"] if found or _read(episode.about)[0] else episode.about
    (before, partial), (after, still) = ((dims, partial) for _, dims, partial in found[:2])
    cut, left = (f"_{episode.group.axis}" in dims for dims in (before, after))
    if partial:
        return STEPS["partly"] if still else STEPS["reduce_scatter"] if left else STEPS["all_reduce"]
    return STEPS["all_to_all"] if cut and left else STEPS["all_gather"] if cut else STEPS["scatter"] if left else STEPS["send"]


# ---- the scene ----------------------------------------------------------------------------------------------------------


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
        "messages": [[src, dst, _short(t), _short(until), nbytes, styles[group]] for src, dst, t, until, nbytes, group in rows],
        "episodes": [_episode(episode, known, drawn) for episode, drawn in zip(done, shapes, strict=True)],
        "blocks": [[b.rank, _short(b.start), _short(b.end), b.kind, b.text, b.label] for b in computed],
        "waits": _waits(trace), "talks": _talks(trace, styles),
        "held": [{kind: [x for t, now in steps for x in (_short(t), now)] for kind, steps in mine.items()} for mine in memory],
        "stops": _stops(computed, list(zip(done, shapes, strict=True)), end),
    }  # fmt: skip


def _episode(episode: Episode, known: Sequence[str], shapes: list[dict[str, Any]]) -> dict[str, Any]:
    told = {"start": _short(episode.start), "end": _short(episode.end), "ranks": list(episode.group.members), "shapes": shapes}
    return told | {"style": known.index(episode.group.axis), "about": _free(episode.about)}


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


def _short(t: float) -> float:
    return float(f"{t:.7g}")


def _free(about: str) -> str:
    """The words before the shape: `_free("block0 weights[P_dp] → weights[P]") == "block0"`."""
    found = _SHAPE.search(about)
    return about[: found.start()].strip(" :") if found else about


def _ranks(count: int, axes: Mapping[str, Sequence[tuple[int, ...]]]) -> list[dict[str, Any]]:
    """Each with its place in a grid: to the right goes a pipeline, else the innermost axis, and the third where there is one."""
    order = sorted(axes, key=lambda axis: axis != "pp")
    across, down = order[:1] + order[2:], order[1:2]
    sizes = {axis: len(several[0]) for axis, several in axes.items()}
    places = [{axis: _index(axes[axis], rank) for axis in order} for rank in range(count)]
    if len({tuple(place.values()) for place in places}) != count or (not down and count > 4):
        return [{"name": str(rank), "x": rank % 4, "y": rank // 4} for rank in range(count)]

    def at(place: Mapping[str, int], along: Sequence[str]) -> int:
        return sum(place[axis] * prod(sizes[inner] for inner in along[:k]) for k, axis in enumerate(along))

    return [{"name": str(rank), "x": at(place, across), "y": at(place, down)} for rank, place in enumerate(places)]


def _index(several: Sequence[tuple[int, ...]], rank: int) -> int:
    return next((members.index(rank) for members in several if rank in members), 0)


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
        found.append([each, *(_short(t) for pair in pairs for t in pair)])
    return found


Drawn = Sequence[tuple[Episode, list[dict[str, Any]]]]  # with their shapes


def _stops(computed: Sequence[Block], done: Drawn, end: float) -> list[dict[str, Any]]:
    """A step leads to where a block ends or a collective begins or ends; what is almost together is one."""
    times = sorted({*(block.end for block in computed), *(t for episode, _ in done for t in (episode.start, episode.end)), end})
    apart, kept = end / 500, list[float]()
    while not kept or len(kept) > _MOST_STOPS:
        kept, apart = _apart(times, apart), 1.25 * apart
    stops = [{"t": 0.0, "label": STEPS["start"], "say": STEPS["before"]}]
    ranks = len({block.rank for block in computed})
    return stops + [{"t": _short(t), **_said(computed, done, (before, t), ranks)} for before, t in pairwise([0.0, *kept])]


def _apart(times: Sequence[float], least: float) -> list[float]:
    """`_apart([1, 2, 2.1, 2.6, 5], 0.5) == [1, 2.1, 2.6, 5]`: of those that are so near to each other, the last."""
    kept, first = list[float](), 0.0
    for t in times:
        if kept and t - first <= least:
            kept[-1] = t
        elif t > least:
            kept.append(t)
            first = t
    return kept


def _said(computed: Sequence[Block], done: Drawn, between: tuple[float, float], ranks: int) -> dict[str, str]:
    """What is sent between two stops, the longest first, and who computes what for a good part of the time."""

    def share(start: float, end: float) -> float:
        return (min(end, between[1]) - max(start, between[0])) / (between[1] - between[0])

    sent: dict[str, float] = {}
    for episode, shapes in done:
        if (part := share(episode.start, episode.end)) > 0.01:
            over = STEPS["over"].format(what=name(episode), axis=episode.group.axis) if episode.group.axis else name(episode)
            what = [_free(episode.about) if shapes else "", " → ".join(shape["text"] for shape in shapes)]
            said = ": ".join(filter(None, [over, " ".join(filter(None, what))]))
            sent[said] = max(part, sent.get(said, 0.0))
    busy: dict[str, set[int]] = {}
    for block in computed:
        if share(block.start, block.end) > 0.2:
            busy.setdefault(STEPS[block.kind].format(k=block.k) if block.kind else block.label, set()).add(block.rank)
    if not sent and len(busy) == 1 and len(*busy.values()) == ranks:
        return {"label": next(iter(busy)), "say": STEPS["on_all"]}
    first, *others = sorted(sent, key=lambda said: -sent[said]) or [STEPS["busy" if busy else "idle"]]
    told = (_computes(words, sorted(who), ranks) for words, who in sorted(busy.items(), key=lambda item: min(item[1])))
    return {"label": first, "say": " ".join([*(f"{other}." for other in others[:2]), *told])}


def _computes(words: str, who: Sequence[int], ranks: int) -> str:
    form = "all" if len(who) == ranks else "some" if len(who) > 1 else "one"
    return STEPS[f"computes_{form}"].format(what=words, ranks=", ".join(map(str, who)))
