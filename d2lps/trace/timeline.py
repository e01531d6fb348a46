"""A trace as a still picture: time to the right, one lane a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from d2lps.trace.columns import Tables

WAITING, ADDING, COPYING, MESSAGE = "#d9d9d9", "#0072b2", "#56b4e9", "#d55e00"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw(trace: Tables, ax: Axes | None = None) -> Axes:
    """Waits as pale bars, arithmetic as dark ones, each message as an arrow from its sender's lane to its receiver's."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(9, 0.8 + 0.55 * trace.ranks), layout="constrained")
    times = np.concatenate([trace.waits["end"], trace.locals["end"], trace.messages["end"]])
    longest = float(np.nanmax(times, initial=1e-9))
    scale, unit = next(((s, u) for s, u in _UNITS if longest >= s), _UNITS[-1])
    _bars(ax, trace.waits, scale, WAITING, "waiting")
    copies = np.array([trace.ops[op] == "COPY" for op in trace.locals["op"]], dtype=bool)
    for chosen, color, label in ((~copies, ADDING, "combining"), (copies, COPYING, "copying")):
        _bars(ax, {name: column[chosen] for name, column in trace.locals.items()}, scale, color, label)
    _arrows(ax, trace, scale)
    ax.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)])
    ax.set_ylim(trace.ranks - 0.5, -0.5)
    ax.set_xlim(0, 1.02 * longest / scale)
    ax.set_xlabel(f"time ({unit})")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize="small")
    return ax


def _bars(ax: Axes, table: dict[str, np.ndarray], scale: float, color: str, label: str) -> None:
    if len(table["start"]):
        width = (table["end"] - table["start"]) / scale
        ax.barh(table["rank"], width, left=table["start"] / scale, height=0.5, color=color, label=label)


def _arrows(ax: Axes, trace: Tables, scale: float) -> None:
    """Lines rather than arrows where there are thousands: their heads would cover everything."""
    m = trace.messages
    for index in range(len(trace)):
        tail, tip = (m["start"][index] / scale, m["src"][index]), (m["end"][index] / scale, m["dst"][index])
        head = "-|>" if len(trace) <= 200 else "-"
        style = {"arrowstyle": head, "color": MESSAGE, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=tip, xytext=tail, arrowprops=style)
    if len(trace):
        ax.plot([], [], color=MESSAGE, label="message")


