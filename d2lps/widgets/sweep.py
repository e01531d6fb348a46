"""The sweep: how long each algorithm takes, by size and by number of ranks."""

from collections.abc import Callable, Sequence
from itertools import pairwise, repeat
from math import nan

import traitlets
from matplotlib.figure import Figure

from d2lps.topology import Topology
from d2lps.widgets import still
from d2lps.widgets.algorithms import Algorithm, described, simulated
from d2lps.widgets.texts import SWEEP

_EQUAL = 1e-6  # times that differ by less are the same


class Sweep(still.Still):
    """Time against bytes, a line for each all-reduce algorithm, with a slider for the number of ranks.

    >>> from d2lps.topology import star
    >>> Sweep(lambda n: star(n, 1e9, latency=1e-6), ["tree", "ring"], sizes=[160, 16e3, 16e5], ranks=[4])
    Sweep: All-reduce: time against size, tree, ring; fastest on 4 ranks: tree from 160 B, ring from 1,600 B

    topology_of: the cluster for a number of ranks. algorithms: names of `all_reduce`'s, or functions of one's own, of
    (comm, tensor). sizes: bytes on each rank, ascending. Every point is a simulation, run here, beforehand:
    data["times"][ranks][algorithm][size], in seconds; "winners" and "reigns" say who is the fastest, and from where on.
    `ranks` and `cursor` are the choices made, as indices. ValueError for fewer than two sizes or ranks, and for what
    the simulator refuses.
    """

    _esm, _css = still.source("sweep.js"), still.source("sweep.css")
    data = traitlets.Dict().tag(sync=True)
    ranks = traitlets.Int(0).tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True)

    def __init__(
        self, topology_of: Callable[[int], Topology], algorithms: Sequence[Algorithm],
        sizes: Sequence[float], ranks: Sequence[int], title: str = "",
    ) -> None:  # fmt: skip
        sizes, ranks = [int(size) for size in sizes], [int(count) for count in ranks]
        if len(sizes) < 2 or any(here >= there for here, there in pairwise(sizes)):
            raise ValueError(f"sizes={sizes} must be at least two numbers of bytes, ascending")
        if not ranks or min(ranks) < 2:
            raise ValueError(f"ranks={ranks} must be at least one number of ranks, each from 2 up: one rank alone takes no time")
        times = [[[simulated(a, net, n).time for n in sizes] for a in algorithms] for net in map(topology_of, ranks)]
        winners = [[_winners(column) for column in zip(*rows, strict=True)] for rows in times]
        data = {"title": title or SWEEP["title"], "algorithms": described(algorithms), "sizes": sizes, "ranks": ranks}
        found = {"times": times, "winners": winners, "reigns": [_reigns(sizes, rows) for rows in times]}
        super().__init__(data={**data, **found, "texts": SWEEP}, ranks=len(ranks) // 2, cursor=len(sizes) // 2)

    def __repr__(self) -> str:
        ranks, names = self.data["ranks"], [algorithm["name"] for algorithm in self.data["algorithms"]]
        said = ", ".join(f"{names[reign['best']]} from {reign['nbytes']:,.0f} B" for reign in self.data["reigns"][-1])
        return f"Sweep: {self.data['title']}, {', '.join(names)}; fastest on {ranks[-1]} ranks: {said}"

    def _figure(self) -> Figure:
        """The lines for the chosen number of ranks."""
        ranks = SWEEP["ranks_now"].format(n=self.data["ranks"][self.ranks])
        curves = zip(self.data["algorithms"], repeat(self.data["sizes"]), self.data["times"][self.ranks], strict=False)
        drawn, ax = still.chart(f"{self.data['title']}, {ranks}", f"{SWEEP['bytes']} (B)", f"{SWEEP['seconds']} (s)", curves)
        ax.set(xscale="log", yscale="log")
        for crossing in self.data["reigns"][self.ranks][1:]:
            ax.plot(crossing["nbytes"], crossing["seconds"], "o", mfc="none", mec="black")
        return drawn


def _winners(times: Sequence[float]) -> list[int]:
    """The algorithms that take the least time, more than one where they are equally fast."""
    return [index for index, time in enumerate(times) if time <= min(times) * (1 + _EQUAL)]


def _reigns(sizes: Sequence[float], rows: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Who is the fastest from where on. Between two sizes that were simulated, time is taken to grow evenly with bytes."""
    best = _winners([row[0] for row in rows])[0]
    found: dict[float, dict[str, float]] = {sizes[0]: {"nbytes": sizes[0], "seconds": rows[best][0], "best": best}}
    for k, (here, there) in enumerate(pairwise(sizes)):
        at = 0.0  # of the way from here to there
        while passing := [(way, row[k + 1], i) for i, row in enumerate(rows) if (way := _overtaken(rows[best], row, k)) >= at]:
            at, _, best = min(passing)
            nbytes, seconds = here + at * (there - here), rows[best][k] + at * (rows[best][k + 1] - rows[best][k])
            found[nbytes] = {"nbytes": nbytes, "seconds": seconds, "best": best}
    return list(found.values())


def _overtaken(old: Sequence[float], new: Sequence[float], k: int) -> float:
    """How far on the way from point k to the next an algorithm falls behind another; NaN if it does not."""
    before, after = new[k] - old[k], new[k + 1] - old[k + 1]
    if after >= -_EQUAL * old[k + 1]:
        return nan
    return before / (before - after) if before > 0 else 0.0
