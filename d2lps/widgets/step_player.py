"""The step player: one step of parallel training, whatever the plan, as its trace tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from d2lps.trace import Trace
from d2lps.widgets import still
from d2lps.widgets.player import _opening, _tell
from d2lps.widgets.step_scene import scene
from d2lps.widgets.texts import STEPS


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
