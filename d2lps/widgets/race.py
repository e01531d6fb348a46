"""The race: several all-reduce algorithms on one clock, and how far each has come, from the origins of what memory holds."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import traitlets
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from d2lps.topology import Topology
from d2lps.trace import Origins, Trace
from d2lps.widgets import still
from d2lps.widgets.algorithms import Algorithm, described, simulated
from d2lps.widgets.cells import Cells, inputs, seconds
from d2lps.widgets.texts import RACE

_MOST_POINTS = 200  # of one lane; more cannot be told apart
_MOST_STOPS = 40
_OPEN = 0.6  # of the winner's time: where a race opens, so that there is something to see

Curve = list[tuple[float, float]]  # (t, share): the share from t on


class Race(still.Still):
    """Several all-reduce algorithms side by side: how much of all ranks' memory holds the complete sum, over time.

    >>> from d2lps.topology import pcie_tree
    >>> Race(pcie_tree(4, bandwidth=16e9, latency=0), ["tree", "ring"], nbytes=160e6)
    Race: All-reduce: 160 MB on pcie_tree(4): 1. ring 0.015 s, 2. tree 0.04 s

    algorithms: names of `all_reduce`'s, or functions of one's own, of (comm, tensor). nbytes: on every rank. Each is
    simulated by itself, with one rank on each device, and its trace is followed byte by byte. `t` is the clock, in
    seconds. ValueError for what the simulator refuses.
    """

    _esm, _css = still.source("race.js"), still.source("race.css")
    data = traitlets.Dict().tag(sync=True)
    t = traitlets.Float(0.0).tag(sync=True)

    def __init__(self, topology: Topology, algorithms: Sequence[Algorithm], nbytes: float = 160e6, title: str = "") -> None:
        lanes = [look | _lane(a, topology, nbytes) for look, a in zip(described(algorithms), algorithms, strict=True)]
        for lane in lanes:  # equally fast ones share a place
            lane["place"] = 1 + sum(other["seconds"] < lane["seconds"] * (1 - 1e-6) for other in lanes)
        end = max(lane["seconds"] for lane in lanes)
        title = title or RACE["title"].format(bytes=EngFormatter("B", places=0)(nbytes), topology=topology.name)
        stops = _stops(lanes, end)
        early = _OPEN * min(lane["seconds"] for lane in lanes)
        opening = min(stops, key=lambda stop: abs(stop - early))
        super().__init__(data={"title": title, "lanes": lanes, "end": end, "stops": stops, "texts": RACE}, t=opening)

    def __repr__(self) -> str:
        lanes = sorted(self.data["lanes"], key=lambda lane: lane["place"])
        return f"Race: {self.data['title']}: " + ", ".join(f"{i['place']}. {i['name']} {i['seconds']:.4g} s" for i in lanes)

    def _figure(self) -> Figure:
        """All lanes in one picture: complete memory over time."""
        end = self.data["end"], 1.0
        curves = ((lane, *zip(*lane["complete"], end, strict=True)) for lane in self.data["lanes"])
        return still.chart(self.data["title"], f"{RACE['seconds']} (s)", RACE["complete"], curves, drawstyle="steps-post")[0]


def _lane(algorithm: Algorithm, topology: Topology, nbytes: float) -> dict[str, Any]:
    """An algorithm's time, and its two shares as [t, share] from each change on."""
    run = simulated(algorithm, topology, nbytes, trace=True)
    lane: dict[str, Any] = {"seconds": run.time}
    for name, curve in zip(("complete", "gathered"), progress(run.trace), strict=True):
        step = -(-len(curve) // _MOST_POINTS)  # the first point, then every so many up to the last
        lane[name] = [[t, round(share, 4)] for t, share in [curve[0], *curve[:0:-step][::-1]]]
    return lane


def _stops(lanes: Sequence[dict[str, Any]], end: float) -> list[float]:
    """Where a step of the clock leads: to each change, or where there are too many, evenly and to each finish."""
    changes = {t for lane in lanes for t, _ in lane["complete"]}
    if len(changes) > _MOST_STOPS:
        changes = {end * k / _MOST_STOPS for k in range(_MOST_STOPS)}
    times = np.array(sorted(changes | {0.0, *(lane["seconds"] for lane in lanes)}))
    return times[np.diff(times, append=np.inf) > 1e-6 * end].tolist()  # of those that are close together the last


def progress(trace: Trace) -> tuple[Curve, Curve]:
    """Two shares of the tensors that the ranks started with, whenever one of them changes: (complete, gathered).

    complete: of their bytes, those that hold the sum of all p ranks, each counted once. gathered: of the p summands that
    belong into each byte, those that are there, on average: 1/p at the start. A ring of 2 ranks, 4 s without latency:
    ([(0, 0), (2, 0.5), (4, 1)], [(0, 0.5), (2, 0.75), (4, 1)]).
    """
    origins = Origins(trace)
    cells = Cells(trace, origins, inputs(trace, origins), whole=True)
    if not cells.count:  # nobody had anything to add up
        return [(0.0, 1.0)], [(0.0, 1.0)]
    nbytes = np.concatenate([np.diff(cuts) for cuts in cells.cuts])
    held = np.ones((2, cells.count))  # of each cell: whether it is complete, and how many summands it has
    held[0] = trace.ranks == 1

    def shares() -> list[float]:
        return (held @ nbytes / nbytes.sum() / [1, trace.ranks]).tolist()

    complete, gathered = curves = [[(0.0, share)] for share in shares()]
    for t, changes in groupby(sorted(origins.changes, key=partial(seconds, trace)), key=partial(seconds, trace)):
        for change in changes:
            for cell, pieces in cells.covered(change.into.buffer, change.pieces).items():
                ranks = cells.ranks(pieces)
                held[:, cell] = ranks == list(range(trace.ranks)), len(set(ranks))
        for curve, share in zip(curves, shares(), strict=True):
            if abs(share - curve[-1][1]) > 1e-9:
                curve.append((t, share))
    return complete, gathered
