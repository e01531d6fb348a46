"""The player: a run, step by step, as it happened."""

from __future__ import annotations

from collections.abc import Sequence

import traitlets

from d2lps.trace import Trace
from d2lps.widgets import still
from d2lps.widgets.picture import png
from d2lps.widgets.scene import scene


class Player(still.Still):
    """Animate a trace: every message, and whose data each chunk of every rank's memory holds.

    >>> Player(d2lps.run(work, 4, trace=True).trace, title="ring all-reduce")       # doctest: +SKIP

    title: shown above the picture. show: names of the variables to draw; by default all that the traced function's own
    variables hold, except one called `scratch`. layout: a place (x, y) in the unit square for each rank, by default a
    circle. clock: "rounds" (the same in every run) or "time" (seconds as measured or simulated).
    names: of the cards, by default "rank 0" and so on. once: mark in red what counts a contribution more than once; a server
    that adds up push after push does so rightly.
    A rank's card has one row for each variable, at most three. Traces of more than 3,000 messages are cut, and say so.
    """

    _esm = still.source("player.js")
    _css = still.source("player.css")
    scene = traitlets.Dict().tag(sync=True)
    t = traitlets.Float(0.0).tag(sync=True)

    def __init__(
        self,
        trace: Trace,
        title: str = "",
        show: Sequence[str] | None = None,
        layout: Sequence[tuple[float, float]] | None = None,
        clock: str = "rounds",
        names: Sequence[str] | None = None,
        once: bool = True,
    ) -> None:
        super().__init__(scene=scene(trace, title, show, layout, clock, names, once))

    def __repr__(self) -> str:
        """What stands in for the picture where there is none, for those who hear the page rather than see it."""
        steps = "; ".join(stop["label"] for stop in self.scene["stops"][1:9])
        counts = f"{len(self.scene['ranks'])} ranks, {len(self.scene['messages'])} messages"
        return f"Player: {self.scene['title'] or 'a run'}, {counts} ({steps})"

    def _still(self) -> bytes:
        return png(self.scene)
