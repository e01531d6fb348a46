"""A trace as a still picture: time to the right, one row a rank, in it one bar under the other for what runs beside it."""

from typing import Any

import numpy as np

from d2lps.trace.tables import Columns, Tables

COLORS = {"computing": "#82d9b5", "sleeping": "#f3e4b5", "waiting": "#d9d9d9", "combining": "#0072b2", "copying": "#56b4e9"}
COLORS |= {"moving": "#d55e00"}  # a message on its way
_BLOCKS = ("computing", "sleeping")  # one may follow the other at once, so they have edges
EDGED = 3.0  # points: a block this wide has them; a shorter one would hide behind its own
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_FONT = 7  # points: the label of a block


def draw(trace: Tables, ax: Any = None) -> Any:
    """Waits as pale bars, arithmetic as dark ones, blocks of computing with their labels where there is room, each message as
    an arrow from its sender's lane to its receiver's."""
    import matplotlib.pyplot as plt

    used = trace.lanes()
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 0.8 + 0.55 * trace.ranks + 0.25 * float((used - 1).sum())), layout="constrained")
    drawn = trace.bars()
    longest = max(table["end"].max(initial=1e-9) for table in drawn.values())
    scale, unit = next(((s, u) for s, u in _UNITS if longest >= s), _UNITS[-1])
    ax.set(xlim=(0, 1.02 * longest / scale), ylim=(trace.ranks - 0.5, -0.5), xlabel=f"time ({unit})")
    ax.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    for kind, table in drawn.items():
        if kind != "moving" and len(table["rank"]):
            thick = np.where(used == 1, 0.5, 0.7 / used)[table["rank"]]
            start, width = table["start"] / scale, (table["end"] - table["start"]) / scale
            y = _height(used, table["rank"], table["lane"])
            edge = np.where((width * _points(ax) >= EDGED) & (kind in _BLOCKS), "white", COLORS[kind])
            ax.barh(y, width, thick, start, color=COLORS[kind], edgecolor=edge, label=kind)
    _labels(ax, drawn["computing"], used, scale)
    _arrows(ax, trace, used, scale)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, fontsize="small")
    return ax


def _points(ax: Any) -> float:
    """Of the page, in a unit of time."""
    return float(72 * ax.bbox.width / ax.figure.dpi / ax.get_xlim()[1])


def _height(used: np.ndarray, rank: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Where a lane lies: a rank's lanes share the middle of its row, its own on top."""
    return rank + 0.8 * ((lane + 0.5) / used[rank] - 0.5)


def _labels(ax: Any, blocks: Columns, used: np.ndarray, scale: float) -> None:
    """The names of the blocks into which they fit, by an estimate: a letter is about 0.6 times as wide as high."""
    points, heights = _points(ax), _height(used, blocks["rank"], blocks["lane"])
    for y, start, end, label in zip(heights, blocks["start"] / scale, blocks["end"] / scale, blocks["label"], strict=True):
        if 0.6 * _FONT * len(label) < points * (end - start):
            ax.annotate(label, ((start + end) / 2, y), ha="center", va="center", fontsize=_FONT)


def _arrows(ax: Any, trace: Tables, used: np.ndarray, scale: float) -> None:
    """Lines rather than arrows where there are thousands: their heads would cover everything."""
    m = trace.messages
    tails, tips = (_height(used, m[end], m[f"{end}_lane"]).tolist() for end in ("src", "dst"))
    ends = zip(m["start"] / scale, tails, m["end"] / scale, tips, strict=True)
    if len(trace) > 200:
        from matplotlib.collections import LineCollection

        lines = [((start, tail), (end, tip)) for start, tail, end, tip in ends]
        ax.add_collection(LineCollection(lines, colors=COLORS["moving"], linewidths=0.8), autolim=False)
    else:
        style = {"arrowstyle": "-|>", "color": COLORS["moving"], "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        for start, tail, end, tip in ends:
            arrow = ax.annotate("", xy=(end, tip), xytext=(start, tail), arrowprops=style).arrow_patch
            arrow.set_clip_box(ax.bbox)  # where a reader shows fewer ranks, or less time
    if len(trace):
        ax.plot([], [], color=COLORS["moving"], label="message")
