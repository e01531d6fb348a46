"""What happened in a step of parallel training, read from its trace: blocks of computing, collectives of groups, memory held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from d2lps.trace import About, Trace

HELD = ("weights", "gradients", "optimizer", "gathered", "activations", "other")
_COMPUTE = [re.compile(r"(?P<stage>\d*)(?P<kind>[FBW])(?P<k>\d+)")]
_COMPUTE += [re.compile(r"(?P<kind>forward|backward|weights)(?: (?P<k>\d+))?(?: stage (?P<stage>\d+))?")]


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
    about: About
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
    found = [Block(rank, start, end, *read(trace.labels[label]), trace.labels[label]) for start, end, rank, label in rows]
    stages = {(block.rank, block.stage) for block in found if block.kind}
    several = len(stages) > len({rank for rank, _ in stages})
    return found if several else [block._replace(stage="") for block in found]


def read(label: str) -> tuple[str, str, str]:
    """Kind, stage and micro-batch: `read("1F0") == read("forward 0 stage 1") == ("F", "1", "0")`."""
    found = _COMPUTE[0].fullmatch(label) or _COMPUTE[1].fullmatch(label)
    return (found["kind"][0].upper(), found["stage"] or "", found["k"] or "") if found else ("", "", "")


def episodes(trace: Trace, found: Sequence[Group]) -> list[Episode]:
    """Messages of one group about one thing, until there is a pause."""
    m, made, last = trace.messages, list[Episode](), dict[tuple[int, About], int]()
    least = 1e-9 * float(np.nanmax(m["end"], initial=0.0))
    for row in np.lexsort((m["end"], m["start"])).tolist():
        if not np.isnan(m["end"][row]):
            step = m["step"][row]
            about = trace.about[step] or About(trace.steps[step].rstrip("0123456789/ "), "")  # nobody has said more of it
            start, end = float(m["start"][row]), float(m["end"][row])
            key = int(m["group"][row]), about
            at = last.get(key)
            if at is not None and start <= made[at].end + least:
                made[at] = made[at]._replace(end=max(end, made[at].end))
            else:
                last[key] = len(made)
                made.append(Episode(found[key[0]], about, start, end))
    return made


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


def short(t: float) -> float:
    """As precise as a picture: `short(1 / 3) == 0.3333333`."""
    return float(f"{t:.7g}")
