"""A player's scene as a still picture: one column for each of a few steps, one line for each rank."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from d2lps.trace import Trace
from d2lps.widgets.still import figure

# The colours of ranks, as in player.css: Okabe and Ito's, then others between them in lightness.
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#e8d92b", "#7d848c"]
COLORS += ["#0b3c6f", "#7a4a00", "#82d9b5", "#7b2d60", "#b4d8f2", "#f3a78c", "#7f8000", "#2f343a"]
REPEATED = "#b3001b"  # the edge of a cell in which something counts more than once
_COLUMNS = 8

State = list[dict[str, Any] | None]


def picture(scene: dict[str, Any], trace: Trace | None = None) -> Figure:
    """A few steps side by side, below them the timeline of a trace."""
    columns, rows = _chosen(scene["stops"]), scene["rows"]
    heights = [max(1.2, 0.7 + 0.3 * len(rows)), *([1.0 + 0.4 * trace.ranks] if trace else [])]
    drawn = figure(1.3 * len(columns) + 0.9, sum(heights))
    grid = drawn.add_gridspec(len(heights), len(columns), height_ratios=heights)
    axes = [drawn.add_subplot(grid[0, k]) for k in range(len(columns))]
    for ax, stop in zip(axes, columns, strict=True):
        _column(ax, scene, _state_at(scene, stop["t"]), stop["label"])
    names = [f"{scene['ranks'][row['rank']]['name']}  {row['name']}" for row in rows]
    axes[0].set_yticks([index + 0.5 for index in range(len(rows))], names, fontsize=7)
    if trace:
        trace.timeline(drawn.add_subplot(grid[1, :]))
    drawn.suptitle(scene["title"], fontsize=9)
    return drawn


def _chosen(stops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evenly spaced ones, the first and the last among them; all if they fit side by side."""
    return [stops[k] for k in np.linspace(0, len(stops) - 1, min(len(stops), _COLUMNS)).round().astype(int)]


def _state_at(scene: dict[str, Any], t: float) -> State:
    state: State = list(scene["initial"])
    for change in scene["changes"]:
        if change["t"] <= t:
            state[change["cell"]] = change
    return state


def _column(ax: Axes, scene: dict[str, Any], state: State, label: str) -> None:
    for cell, held in zip(scene["cells"], state, strict=True):
        left, width, top = cell["start"], cell["stop"] - cell["start"], cell["row"] + 0.12
        contributors = held["from"] if held else []
        share = width / len(scene["ranks"])  # every rank has its place in a cell, so an empty one is a missing summand
        for rank in contributors:
            ax.add_patch(Rectangle((left + rank * share, top), share, 0.76, facecolor=COLORS[rank % len(COLORS)]))
        whole, repeated = 0 < scene["whole"] <= len(set(contributors)), len(set(contributors)) < len(contributors)
        edge, thick = REPEATED if repeated else "black", 1.4 if whole or repeated else 0.4
        ax.add_patch(Rectangle((left, top), width, 0.76, facecolor="none", edgecolor=edge, linewidth=thick))
    ax.set(xlim=(-0.03, 1.03), ylim=(max(1, len(scene["rows"])), 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_title(label.replace(" · ", "\n"), fontsize=7)
