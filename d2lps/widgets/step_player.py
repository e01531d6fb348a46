"""The step player: one step of parallel training, whatever the plan, as its trace tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import traitlets
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from d2lps.trace import Trace
from d2lps.widgets import still
from d2lps.widgets.player import _opening, _tell
from d2lps.widgets.step_events import HELD
from d2lps.widgets.step_scene import scene
from d2lps.widgets.texts import STEPS

# As in step_player.css.
AXIS_COLORS = ["#0072b2", "#c44e00", "#00805d", "#a2477c", "#8a6a00", "#57606a"]
BLOCK_COLORS = {"F": "#bcd9ee", "B": "#f6dc9c", "W": "#dccdee", "": "#d5d9df"}
HELD_COLORS = dict(zip(HELD, ["#57606a", "#8b949e", "#b4bcc6", "#9fc5b5", "#8b5cf6", "#d5d9df"], strict=True))


class StepPlayer(still.Still):
    """Play a step of parallel training: what each rank computes, sends along which axis of the mesh, and holds.

    >>> StepPlayer(d2lps.simulate(train, cluster, trace=True).trace, title="dp 2 x tp 2")       # doctest: +SKIP

    Cards are ranks, at their places in the mesh. Messages have the color, the dashes and the name of their axis, which is that
    of the group that sends them (see `Mesh`). A grid is the tensor that they are about, in as many cells as it is cut into:
    filled is what the rank has, hatched where that is only a summand (see `Communicator.about`; B is cut along dp and T along
    cp where there are such). A bar is what the rank holds of its memory (`allocate`, `hold`). Below, each rank over time: the
    blocks that it computes, by their labels ("F3", "1F3" or "forward 3 stage 1": micro-batch 3), its messages, its memory.
    title: shown above. names, sentences, at: as in `Player`; it opens where a tensor, not a number, is first sent. A step leads
    to where something has begun or ended. since: what was before this second is left out; by then a rank has made its model, say.
    ValueError for a trace in which nothing is computed and nothing sent.
    """

    _esm, _css = still.source("step_player.js"), still.source("step_player.css")
    scene = traitlets.Dict().tag(sync=True)
    t = traitlets.Float(0.0).tag(sync=True)

    def __init__(
        self, trace: Trace, title: str = "", names: Sequence[str] | None = None,
        sentences: Mapping[str | int, str] | Sequence[str] | None = None, at: float | None = None,
        since: float = 0.0,
    ) -> None:  # fmt: skip
        told: dict[str, Any] = {"title": title, **scene(trace, since), "texts": STEPS}
        if names is not None and len(names) != trace.ranks:
            raise ValueError(f"names has {len(names)} entries, but the trace has {trace.ranks} ranks")
        for rank, called in zip(told["ranks"], names or [], strict=False):
            rank["name"] = called
        _tell(told["stops"], sentences, None)
        tensors = [episode for episode in told["episodes"] if any("[]" not in shape["text"] for shape in episode["shapes"])]
        opening = {"stops": told["stops"], "messages": tensors or [{"start": m[2], "end": m[3]} for m in told["messages"]]}
        super().__init__(scene=told, t=_opening(opening, at))

    def __repr__(self) -> str:
        scene = self.scene
        axes = ", ".join(f"{axis['name']} {axis['size']}" for axis in scene["axes"])
        names = {axis["style"]: axis["name"] for axis in scene["axes"]}
        sent = Counter(names.get(style, STEPS["no_axis"]) for *_, style in scene["messages"])
        told = ", ".join(f"{count:,} along {name}" for name, count in sent.items())
        ranks = f"{len(scene['ranks'])} ranks" + (f" ({axes})" if axes else "")
        return f"StepPlayer: {scene['title'] or 'a step'}: {ranks}, messages: {told or 'none'}; {scene['end']:.3g} s"

    def _figure(self) -> Figure:
        """Each rank over time: what it computes, sends, and holds."""
        scene = self.scene
        drawn = still.figure(5.6, 1.1 + 0.55 * len(scene["ranks"]))
        ax = drawn.subplots()
        scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if scene["end"] >= s), (1e-6, "µs"))
        ax.set(xlim=(0, scene["end"] / scale), ylim=(len(scene["ranks"]) - 0.05, -0.05), xlabel=f"time ({unit})")
        _blocks(ax, scene, scale)
        _talks(ax, scene, scale)
        _memory(ax, scene, scale)
        names = [STEPS["rank"].format(name=rank["name"]) if rank["name"].isdigit() else rank["name"] for rank in scene["ranks"]]
        ax.set_yticks([rank + 0.2 for rank in range(len(names))], names, fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.spines[["top", "right", "left"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8)
        drawn.suptitle(scene["title"], fontsize=9)
        return drawn


def _blocks(ax: Axes, scene: dict[str, Any], scale: float) -> None:
    for rank, start, end, kind, text, _ in scene["blocks"]:
        look: dict[str, Any] = {"facecolor": BLOCK_COLORS[kind], "edgecolor": "white", "linewidth": 0.4}
        ax.broken_barh([(start / scale, (end - start) / scale)], (rank, 0.4), **look)
        if end - start > 0.011 * len(text) * scene["end"]:
            ax.text((start + end) / 2 / scale, rank + 0.2, text, ha="center", va="center", fontsize=7)


def _talks(ax: Axes, scene: dict[str, Any], scale: float) -> None:
    names = {axis["style"]: axis["name"] for axis in scene["axes"]}
    for rank, style, *flat in scene["talks"]:
        spans = [(start / scale, (end - start) / scale) for start, end in zip(flat[::2], flat[1::2], strict=True)]
        name = names.pop(style, "")
        ax.broken_barh(spans, (rank + 0.4, 0.14), facecolor=AXIS_COLORS[min(style, 5)], label=name or None)


def _memory(ax: Axes, scene: dict[str, Any], scale: float) -> None:
    """As high as the most that any rank ever holds."""
    times = [sorted({0.0, scene["end"], *(t for flat in kinds.values() for t in flat[::2])}) for kinds in scene["held"]]
    amounts = [{kind: _at(flat, mine) for kind, flat in kinds.items()} for kinds, mine in zip(scene["held"], times, strict=True)]
    most = max([1.0, *(float(np.sum(list(kinds.values()), axis=0).max()) for kinds in amounts if kinds)])
    seen = set[str]()
    for rank, (kinds, mine) in enumerate(zip(amounts, times, strict=True)):
        below = np.zeros(len(mine))
        for kind, nbytes in kinds.items():
            low, high = (rank + 0.9 - 0.32 * level / most for level in (below, below + nbytes))
            label = None if kind in seen else STEPS[kind].partition(",")[0]
            ax.fill_between(np.array(mine) / scale, low, high, step="post", color=HELD_COLORS[kind], linewidth=0, label=label)
            below = below + nbytes
            seen.add(kind)


def _at(flat: list[float], times: list[float]) -> np.ndarray:
    """What is held at each of these times."""
    steps, levels = np.array(flat[::2]), np.array([0.0, *flat[1::2]])
    return levels[np.searchsorted(steps, times, side="right")]
