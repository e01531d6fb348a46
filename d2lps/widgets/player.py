"""The player: a run, step by step, as it happened."""

import math
from collections.abc import Sequence

import traitlets
from matplotlib.figure import Figure

from d2lps.trace import Trace
from d2lps.widgets import still
from d2lps.widgets.picture import picture
from d2lps.widgets.scene import Scene
from d2lps.widgets.texts import PLAYER

Places = Sequence[tuple[float, float]]


class Player(still.Still):
    """Animate a trace: every message, and whose data each chunk of every rank's memory holds.

    >>> Player(d2lps.run(work, 4, trace=True).trace, title="ring all-reduce")       # doctest: +SKIP

    title: shown above the picture. show: names of the variables to draw; by default all that the traced function's own
    variables hold, except one called `scratch`. layout: a place (x, y) in the unit square for each rank, by default a
    circle. clock: "rounds" (the same in every run) or "time" (seconds as measured or simulated; what ranks compute, and what
    runs beside it, is seen in a strip below).
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
        layout: Places | None = None,
        clock: str = "rounds",
        names: Sequence[str] | None = None,
        once: bool = True,
    ) -> None:
        for what, given in (("layout", layout), ("names", names)):
            if given is not None and len(given) != trace.ranks:
                raise ValueError(f"{what} has {len(given)} entries, but the trace has {trace.ranks} ranks")
        called, places = names or [str(rank) for rank in range(trace.ranks)], layout or circle(trace.ranks)
        ranks = [{"name": name, "x": round(x, 4), "y": round(y, 4)} for name, (x, y) in zip(called, places, strict=True)]
        drawn = Scene(trace, show, clock, called, once)
        told = {**drawn.memory(), **drawn.moments(), "note": drawn.note(), "texts": PLAYER}
        super().__init__(scene={"title": title, "ranks": ranks, **told})
        self._timed = trace if "strip" in self.scene else None

    def _figure(self) -> Figure:
        return picture(self.scene, self._timed)

    def __repr__(self) -> str:
        """What stands in for the picture where there is none, for those who hear the page rather than see it."""
        steps = "; ".join(stop["label"] for stop in self.scene["stops"][1:9])
        counts = f"{len(self.scene['ranks'])} ranks, {len(self.scene['messages'])} messages"
        return f"Player: {self.scene['title'] or 'a run'}, {counts} ({steps})"


def circle(ranks: int) -> Places:
    """Places on a circle in the unit square, the first at the top, then clockwise."""
    angles = [2 * math.pi * rank / ranks for rank in range(ranks)]
    return [(0.5 + 0.5 * math.sin(a), 0.5 - 0.5 * math.cos(a)) for a in angles]
