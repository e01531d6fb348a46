"""Lanes: several runs on one clock, what every rank of each does over time; and their still picture, from the same data."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import traitlets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from d2lps.trace import Trace
from d2lps.trace.timeline import COLORS, EDGED
from d2lps.widgets import still
from d2lps.widgets.scene import strip
from d2lps.widgets.texts import LANES

_MOST_STOPS = 40

# Of the still picture:
_WIDTH, _RIGHT, _MOST_LEFT = 461.0, 12.0, 115.0  # points: the picture, its right margin, at most of names on its left
_TITLE, _HEAD, _AXIS, _LEGEND = 20.0, 16.0, 30.0, 24.0  # points high: over all, over each run, its axis, below all
_MANY = 10  # lanes, beyond which they lie closer
_FOOT = 0.2  # of a lane's height: the messages along its foot
_LEAST = 0.4  # points: the shortest bar that is seen
_NAME, _BLOCK = 8.0, 7.0  # points: letters of a rank's name, and of a block's
_UNITS = ((3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Lanes(still.Still):
    """Runs below each other on one clock: for each rank a lane with what it computes, its waits, and its messages.

    >>> Lanes({"BSP": d2lps.simulate(bsp, cluster).trace, "ASP": d2lps.simulate(asp, cluster).trace})       # doctest: +SKIP

    traces: {name: trace}. ranks: those to show, by default all. names: what these are called, by default "rank 0" and so on.
    title: shown above. sleeping: what it is called that ranks do while they sleep. `t` is the clock, in seconds; a step leads to
    where somebody stops computing or sleeping. The head of a run says for how long its ranks have waited, or, where nobody in any
    run waits, for how long they have not computed: they sleep, or have ended before others. ValueError for no trace, for a rank
    that a trace has not, and for names that are not as many as the ranks.
    """

    _esm, _css = still.source("lanes.js", "player_strip.js"), still.source("player.css", "lanes.css")
    data = traitlets.Dict().tag(sync=True)
    t = traitlets.Float(0.0).tag(sync=True)

    def __init__(
        self, traces: Mapping[str, Trace], ranks: Sequence[int] | None = None,
        names: Sequence[str] | None = None, title: str = "", sleeping: str = "",
    ) -> None:  # fmt: skip
        if not traces:
            raise ValueError(f"traces={traces!r} is empty: lanes need at least one")
        shown = list(range(max(trace.ranks for trace in traces.values())) if ranks is None else ranks)
        if not shown or not all(0 <= rank < trace.ranks for trace in traces.values() for rank in (shown if ranks else [])):
            raise ValueError(f"ranks={ranks!r}: the traces have {[trace.ranks for trace in traces.values()]} ranks")
        if names is not None and len(names) != len(shown):
            raise ValueError(f"names has {len(names)} entries, but {len(shown)} ranks are shown")
        called = [str(name) for name in names or shown]
        runs = [_run(name, trace, shown) for name, trace in traces.items()]
        end = max(run["seconds"] for run in runs)
        data = {"title": title or LANES["title"], "ranks": [{"name": name} for name in called], "runs": runs, "end": end}
        super().__init__(data=data | {"stops": _stops(runs, end), "texts": LANES | ({"sleeping": sleeping} if sleeping else {})})

    def __repr__(self) -> str:
        return f"Lanes: {self.data['title']}: " + ", ".join(f"{run['name']} {run['seconds']:.4g} s" for run in self.data["runs"])

    def _still(self) -> bytes:
        return still.as_png(draw(self.data))


def _run(name: str, trace: Trace, ranks: Sequence[int]) -> dict[str, Any]:
    """The strip's lanes of these ranks, numbered as they are shown, and when the last of all bars ends."""
    end = float(max(table["end"].max(initial=0.0) for table in trace.bars().values()))
    lanes = strip(trace, end)["strip"]
    shown = [{**lane, "rank": place} for place, rank in enumerate(ranks) for lane in lanes if lane["rank"] == rank]
    return {"name": name, "strip": shown, "seconds": end}


def _stops(runs: Sequence[dict[str, Any]], end: float) -> list[float]:
    """Where a step of the clock leads: to each end of a block or sleep and of a run, evenly where those are too many."""
    bars = [bar for run in runs for lane in run["strip"] for bar in lane["bars"] if bar["kind"] in ("computing", "sleeping")]
    ends = {float(t) for bar in bars for t in bar["times"].split()[1::2]} | {run["seconds"] for run in runs}
    even = {end * k / _MOST_STOPS for k in range(1, _MOST_STOPS)} | {run["seconds"] for run in runs}
    return [0.0, *sorted(even if len(ends) > _MOST_STOPS else ends)]


# ---- the still picture --------------------------------------------------------------------------------------------------


def draw(data: dict[str, Any]) -> Figure:
    """The runs of `Lanes.data` below each other on one clock, and a legend of what is seen in them.

    >>> draw(Lanes({"ring": run.trace}).data).savefig("lanes.png")       # doctest: +SKIP
    """
    called = [rank["name"] for rank in data["ranks"]]
    names = [data["texts"]["rank"].format(name=name) if name.isdigit() else name for name in called]
    left = min(_MOST_LEFT, max(_width(name, _NAME) for name in names) + 10)
    heights = [_rows(run["strip"])[-1] for run in data["runs"]]
    top = high = _TITLE + sum(_HEAD + height + _AXIS for height in heights) + _LEGEND
    drawn = Figure(figsize=(_WIDTH / 72, high / 72), facecolor="white")
    drawn.set_layout_engine("none")  # whatever the style says: axes are placed below
    drawn.text(2 / _WIDTH, 1 - 4 / high, _shortened(data["title"], 10, 0.96 * _WIDTH), va="top", fontsize=10)
    top -= _TITLE
    for run, height in zip(data["runs"], heights, strict=True):
        said = _shortened(run["name"], 10, 0.92 * _WIDTH)
        drawn.text(2 / _WIDTH, (top - _HEAD / 2) / high, said, va="center", fontsize=9, fontweight="bold")
        top -= _HEAD + height
        ax = drawn.add_axes((left / _WIDTH, top / high, 1 - (left + _RIGHT) / _WIDTH, height / high))
        _lanes(ax, run["strip"], [_shortened(name, _NAME, left - 8) for name in names], data["end"], _WIDTH - left - _RIGHT)
        top -= _AXIS
    seen = {bar["kind"] for run in data["runs"] for lane in run["strip"] for bar in lane["bars"]}
    entries = [Patch(color=color, label=data["texts"][kind]) for kind, color in COLORS.items() if kind in seen]
    drawn.legend(handles=entries, loc="lower left", ncols=6, frameon=False, fontsize=_NAME, handlelength=1, handleheight=0.9)
    return drawn


def _lanes(ax: Axes, lanes: list[dict[str, Any]], names: list[str], end: float, width: float) -> None:
    """A run's lanes with their ranks' names, a point high for each unit of y, and its axis, `width` points long."""
    scale, unit = next(((s, u) for s, u in _UNITS if end >= s), _UNITS[-1])
    tops, high = _rows(lanes), _high(lanes)
    ax.set(xlim=(0, 1.02 * end / scale), ylim=(tops[-1], 0))
    ax.set_xlabel(f"time ({unit})", fontsize=_NAME, labelpad=1)
    ax.tick_params(axis="x", labelsize=_NAME, pad=2)
    ax.tick_params(axis="y", labelsize=_NAME, pad=3, length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    first: dict[int, float] = {}
    for lane, top in zip(lanes, tops, strict=False):
        first.setdefault(lane["rank"], top)
    ax.set_yticks([top + high / 2 for top in first.values()], [names[rank] for rank in first])
    for lane, top in zip(lanes, tops, strict=False):
        ax.barh(top + high / 2, end / scale, high, color="#f4f5f7", zorder=0.5)
        for bar in lane["bars"]:
            _bars(ax, bar, top, high, scale, width / (1.02 * end))


def _bars(ax: Axes, bar: dict[str, Any], top: float, high: float, scale: float, points: float) -> None:
    """The bars of one kind with one label in one lane, the label in those where there is room. points: for a second."""
    times = [float(t) for t in bar["times"].split()]
    spans = zip(times[::2], times[1::2], strict=True)
    pieces = [(start / scale, max(end - start, _LEAST / points) / scale) for start, end in spans]
    wide = [width * scale * points for _, width in pieces]
    foot = bar["kind"] == "moving"
    within = (top + (1 - _FOOT) * high, _FOOT * high) if foot else (top, high)
    edges = [0.75 if there >= EDGED and bar["kind"] in ("computing", "sleeping") else 0 for there in wide]
    ax.broken_barh(pieces, within, facecolors=COLORS[bar["kind"]], edgecolors="white", linewidths=edges, zorder=1 + foot)
    room = _width(bar["label"], _BLOCK) + 4 if bar["label"] and high > _BLOCK + 2 else float("inf")
    for (start, width), there in zip(pieces, wide, strict=True):
        if room <= there:
            ax.text(start + width / 2, top + 0.45 * high, bar["label"], ha="center", va="center", fontsize=_BLOCK, zorder=3)


def _high(lanes: list[dict[str, Any]]) -> float:
    """Points: one lane."""
    return 11.0 if len(lanes) <= _MANY else 8.0


def _rows(lanes: list[dict[str, Any]]) -> list[float]:
    """Where each lane begins, in points from the top, and where all end: ranks lie apart, lanes of one do not."""
    high, apart = _high(lanes), 4.0 if len(lanes) <= _MANY else 2.5
    steps = (high + apart * (after["rank"] != before["rank"]) for before, after in pairwise(lanes))
    tops = list(accumulate(steps, initial=1.0))
    return [*tops, tops[-1] + high + 1]


def _width(text: str, size: float) -> float:
    """Points that a text of this size takes."""
    return float(TextPath((0, 0), text, size=size).get_extents().width) if text.strip() else 0.0


def _shortened(text: str, size: float, room: float) -> str:
    """The text, or as much of it as there is room for."""
    while len(text) > 1 and _width(text, size) > room:
        text = text.removesuffix("…")[:-1] + "…"
    return text
