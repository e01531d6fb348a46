"""The player: a run, step by step, as it happened; and its still picture, a few steps side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import traitlets
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from d2lps import figures
from d2lps.trace import Trace
from d2lps.widgets import still
from d2lps.widgets.board import Places, board
from d2lps.widgets.captions import given, retold
from d2lps.widgets.code import Code
from d2lps.widgets.scene import Scene
from d2lps.widgets.texts import PLAYER

# The colors of ranks, as in player.css: those of all figures, then others between them in lightness.
COLORS = [*figures.COLORS, "#0b3c6f", "#7a4a00", "#82d9b5", "#7b2d60", "#b4d8f2", "#f3a78c", "#7f8000", "#2f343a"]
REPEATED = "#b3001b"  # the edge of a cell in which something counts more than once
_COLUMNS = 4  # of a still picture, side by side
_TIMES = 2  # as many columns, below each other: the second begins with the last of the first


class Player(still.Still):
    """Animate a trace: every message, and whose data each chunk of every rank's memory holds.

    >>> Player(d2lps.run(work, 4, trace=True).trace, title="ring all-reduce")       # doctest: +SKIP

    title: shown above the picture. show: names of the variables to draw; by default all that the traced function's own
    variables hold, except one called `scratch`. layout: a place (x, y) in the unit square for each rank, by default a
    circle. clock: "rounds" (the same in every run) or "time" (seconds as measured or simulated; what ranks compute, and what
    runs beside it, is seen in a strip below).
    names: of the cards, by default "rank 0" and so on. once: mark in red what counts a contribution more than once; a server
    that adds up push after push does so rightly.
    sentences: what to say of steps, in place of a sentence that the messages give: in their order, or by label or number, as
    {"reduce-scatter": "Each rank passes on a part.", "reduce-scatter 3/3": "Now one rank holds the whole sum."}; of labels that
    end in numbers the word before them stands for all. at: the step that is shown first, 2.5 is the middle of the third; by
    default in the middle of the first message. topology: draw the simulated cluster below the cards, which stand at their
    devices; by default where it can be read. groups: {name: ranks} to draw boxes around, by default the topology's machines.
    steps: {name: label of the round that it begins with, or None}, to tell the run in the steps of a text, of which some send
    nothing; what was before the first has happened when it starts. badges: {step: {rank: "5"}}, what is written at a card in
    a step, to say what happens there. code: the function that ran, of a trace with lines (trace="lines"): its source is shown,
    and in each step the lines at which messages were posted are lit, with the ranks that did.
    A rank's card has one row for each variable, at most three. Traces of more than 3,000 messages are cut, and say so.
    """

    _esm, _css = still.source("player.js"), still.source("player.css")
    scene = traitlets.Dict().tag(sync=True)
    t = traitlets.Float(0.0).tag(sync=True)

    def __init__(
        self, trace: Trace, title: str = "", show: Sequence[str] | None = None, layout: Places | None = None,
        clock: str = "rounds", names: Sequence[str] | None = None, once: bool = True,
        sentences: Mapping[str | int, str] | Sequence[str] | None = None, at: float | None = None,
        topology: bool | None = None, groups: Mapping[str, Sequence[int]] | None = None,
        badges: Mapping[str | int, Mapping[int, str]] | None = None, steps: Mapping[str, str | None] | None = None,
        code: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        for what, entries in (("layout", layout), ("names", names)):
            if entries is not None and len(entries) != trace.ranks:
                raise ValueError(f"{what} has {len(entries)} entries, but the trace has {trace.ranks} ranks")
        called, below = names or [str(rank) for rank in range(trace.ranks)], board(trace, layout, topology, groups)
        places = zip(called, below.pop("places"), strict=True)
        ranks = [{"name": name, "x": round(x, 4), "y": round(y, 4)} for name, (x, y) in places]
        lit = Code(trace, code) if code is not None else None
        drawn = Scene(trace, show, clock, called, once, lit)
        told = {**drawn.memory(), **drawn.moments(), **below, "placed": layout is not None, "note": drawn.note(), "texts": PLAYER}
        told |= {"code": lit.panel} if lit is not None else {}
        if steps:
            told = retold(told, steps)
        _tell(told["stops"], sentences, badges)
        super().__init__(scene={"title": title, "ranks": ranks, **told}, t=_opening(told, at))
        self._timed = trace if "strip" in self.scene else None

    def __repr__(self) -> str:
        """What stands in for the picture where there is none, for those who hear the page rather than see it."""
        steps = "; ".join(stop["label"] for stop in self.scene["stops"][1:9])
        counts = f"{len(self.scene['ranks'])} ranks, {sum(message.get('n', 1) for message in self.scene['messages'])} messages"
        return f"Player: {self.scene['title'] or 'a run'}, {counts} ({steps})"

    def _still(self) -> bytes:
        return still.as_png(self._figure())

    def _figure(self) -> Figure:
        """One column for each of a few steps, one line for each row; below them the timeline where there is a strip."""
        scene, trace = self.scene, self._timed
        stops, rows = scene["stops"], scene["rows"]
        most = _TIMES * (_COLUMNS - 1) + 1
        chosen = np.linspace(0, len(stops) - 1, min(len(stops), most)).round().astype(int)  # also the first and the last
        lines = [chosen[at : at + _COLUMNS] for at in range(0, max(1, len(chosen) - 1), _COLUMNS - 1)]
        heights = [max(1.2, 0.7 + 0.3 * len(rows))] * len(lines) + ([1.0 + 0.4 * trace.ranks] if trace is not None else [])
        drawn = still.figure(1.15 * len(lines[0]) + 0.9, sum(heights))
        grid = drawn.add_gridspec(len(heights), len(lines[0]), height_ratios=heights, wspace=0.3)  # room for arrows
        for line, steps in enumerate(lines):
            for column, step in enumerate(steps):
                _column(drawn.add_subplot(grid[line, column]), scene, stops[step])
                if column:
                    _arrows(drawn, scene, stops[steps[column - 1]]["t"], stops[step]["t"])
            names = [f"{scene['ranks'][row['rank']]['name']}  {row['name']}" for row in rows]
            drawn.axes[-len(steps)].set_yticks([index + 0.5 for index in range(len(rows))], names, fontsize=7)
        if trace is not None:
            trace.timeline(drawn.add_subplot(grid[-1, :]))
        drawn.suptitle(scene["title"], fontsize=9)
        return drawn


def _tell(stops: list[dict[str, Any]], sentences: Any, badges: Any) -> None:
    """Give each step the author's words."""
    labels = [stop["label"] for stop in stops]
    values = zip(stops, given("sentences", labels, sentences or {}), given("badges", labels, badges or {}), strict=True)
    for stop, sentence, marks in values:
        if sentence is not None:
            stop["say"] = sentence
        if marks:
            stop["badges"] = [{"rank": rank, "text": text} for rank, text in marks.items()]


def _opening(scene: dict[str, Any], at: float | None) -> float:
    """Where the clock stands when a player opens."""
    times = [stop["t"] for stop in scene["stops"]]
    if at is not None:
        if not 0 <= at < len(times):
            raise ValueError(f"at={at!r} is no step: there are {len(times) - 1}")
        return float(np.interp(at, range(len(times)), times))
    first = min(scene["messages"], key=lambda message: message["start"], default={"start": 0.0, "end": 0.0})
    return (first["start"] + first["end"]) / 2


def _column(ax: Axes, scene: dict[str, Any], stop: dict[str, Any]) -> None:
    """What every cell holds at a stop: each rank has its place in it, so that an empty one is a missing summand."""
    held = list(scene["initial"])
    for change in scene["changes"]:
        if change["t"] <= stop["t"]:
            held[change["cell"]] = change
    stripes, colors, outlines, edges, widths = [], [], [], [], []
    for cell, state in zip(scene["cells"], held, strict=True):
        ranks, left, right = state["from"] if state else [], cell["start"], cell["stop"]
        share = (right - left) / len(scene["ranks"])
        stripes += [(left + rank * share, left + (rank + 1) * share, cell["row"]) for rank in ranks]
        colors += [COLORS[rank % len(COLORS)] for rank in ranks]
        outlines.append((left, right, cell["row"]))
        repeated, whole = len(set(ranks)) < len(ranks), 0 < scene["whole"] <= len(set(ranks))
        edges.append(REPEATED if repeated else "black")
        widths.append(1.4 if whole or repeated else 0.4)
    ax.add_collection(PolyCollection(_boxes(stripes), facecolors=colors), autolim=False)
    lines = PolyCollection(_boxes(outlines), facecolors="none", edgecolors=edges, linewidths=widths, joinstyle="miter")
    ax.add_collection(lines, autolim=False)
    ax.set(xlim=(-0.03, 1.03), ylim=(max(1, len(scene["rows"])), 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_title(stop["label"].replace(" · ", "\n"), fontsize=7)


def _arrows(drawn: Figure, scene: dict[str, Any], start: float, end: float) -> None:
    """What has arrived in a step, from the column before it to its own."""
    before, after = drawn.axes[-2:]
    rows: dict[int, list[float]] = {rank: [] for rank in range(len(scene["ranks"]))}
    for index, row in enumerate(scene["rows"]):
        rows[row["rank"]].append(index + 0.5)
    for message in scene["messages"]:
        ways = rows[message["src"]], rows[message["dst"]]
        if start < message["end"] <= end and all(ways):
            (x, y), (z, w) = (1.06, np.mean(ways[0]).item()), (-0.06, np.mean(ways[1]).item())
            look: dict[str, Any] = {"arrowstyle": "-|>", "color": "#6b7280", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            patch = ConnectionPatch((x, y), (z, w), before.transData, after.transData, mutation_scale=6, **look)
            patch.set_in_layout(False)
            drawn.add_artist(patch)


def _boxes(spans: list[tuple[float, float, int]]) -> Any:
    """The corners of what lies from left to right in a row, an array of N x 4 x 2: matplotlib takes thousands at once so."""
    left, right, row = np.reshape(spans, (-1, 3)).T
    low, high = row + 0.12, row + 0.88
    return np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
