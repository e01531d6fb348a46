"""What a step of parallel training is told in: which piece of a tensor each rank has, and what goes on between two stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from d2lps.trace import About
from d2lps.widgets.step_events import Block, Episode, Group, read, short
from d2lps.widgets.texts import STEPS

_MOST_STOPS = 60


class Shapes:
    """What of a tensor each rank has, as a grid of cells: a cell for each piece into which it is cut."""

    def __init__(self, axes: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        self.axes = axes

    def of(self, episode: Episode) -> list[dict[str, Any]]:
        """Those before and after: {"name", "text", "grid": [rows, columns], "own": of each rank of the group its cell, or -1 for
        all, "partial": whether that is a summand}."""
        about = episode.about
        return [self._shape(episode.group, about, dims, partial)
                for dims, partial in ((about.before, about.partial), (about.after, False)) if dims is not None]  # fmt: skip

    def _shape(self, group: Group, about: About, dims: str, partial: bool) -> dict[str, Any]:
        letters = [self._cut(dim, group.axis) for dim in dims.replace("*", about.axis).split()]
        text = f"{about.tensor}[{', '.join(letters)}]" + (f"{{U_{about.axis}}}" if partial else "")
        cuts = [axis for letter in letters if (axis := letter.partition("_")[2])]
        places = [[self._place(axis, rank, group) for axis in cuts] for rank in group.members]
        sizes = [size for _, size in places[0]] if places else []
        grid = [1, 1] if not sizes else [1, sizes[0]] if len(sizes) == 1 else [sizes[0], prod(sizes[1:])]
        own = [int(np.ravel_multi_index([at for at, _ in mine], sizes)) if mine else -1 for mine in places]
        return {"text": text, "grid": grid, "own": own, "partial": partial}

    def _cut(self, dim: str, axis: str) -> str:
        """The batch is cut along dp and tokens along cp, where there are those, whoever else cuts what."""
        along = {"B": "dp", "T": "cp"}.get(dim)
        return f"{dim}_{along}" if along in self.axes and along != axis else dim

    def _place(self, axis: str, rank: int, group: Group) -> tuple[int, int]:
        """Which piece along an axis a rank has, and of how many."""
        several = [group.members] if axis == group.axis else self.axes.get(axis, [])
        mine = next((members for members in several if rank in members), (rank,))
        return mine.index(rank), len(mine)


def name(about: About) -> str:
    """What is done, as the shapes tell it: "all-gather"."""
    if about.before is None or about.after is None:
        return STEPS["send"] if about.before is not None or read(about.name)[0] else about.name
    cut, left = ("_*" in dims for dims in (about.before, about.after))
    if about.partial:
        return STEPS["reduce_scatter"] if left else STEPS["all_reduce"]
    return STEPS["all_to_all"] if cut and left else STEPS["all_gather"] if cut else STEPS["scatter"] if left else STEPS["send"]


def free(about: About) -> str:
    """The words before the tensor's name; all of them, where there is no tensor."""
    return about.name if about.before is None else about.name.removesuffix(about.tensor).strip()


Drawn = Sequence[tuple[Episode, list[dict[str, Any]]]]  # with their shapes


def stops(computed: Sequence[Block], done: Drawn, end: float) -> list[dict[str, Any]]:
    """A step leads to where a block ends or a collective begins or ends; what is almost together is one."""
    times = sorted({*(block.end for block in computed), *(t for episode, _ in done for t in (episode.start, episode.end)), end})
    apart, kept = end / 500, list[float]()
    while not kept or len(kept) > _MOST_STOPS:
        kept, apart = _apart(times, apart), 1.25 * apart
    told = [{"t": 0.0, "label": STEPS["start"], "say": STEPS["before"]}]
    ranks = len({block.rank for block in computed})
    return told + [{"t": short(t), **_said(computed, done, (before, t), ranks)} for before, t in pairwise([0.0, *kept])]


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
            over = name(episode.about)
            if episode.group.axis:
                over = STEPS["over"].format(what=over, axis=episode.group.axis)
            what = [free(episode.about) if shapes else "", " → ".join(shape["text"] for shape in shapes)]
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
