"""Lanes: several runs on one clock, what every rank of each does over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets
from matplotlib.figure import Figure

from d2lps.trace import Trace
from d2lps.widgets import lanes_still, still
from d2lps.widgets.scene import strip
from d2lps.widgets.texts import LANES

_MOST_STOPS = 40


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
        return still.as_png(self._figure())

    def _figure(self) -> Figure:
        return lanes_still.draw(self.data)


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
