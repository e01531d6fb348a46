"""A pipeline's schedule as a timetable: what each rank does when, and what the reader would have it do instead."""

from typing import Any

import traitlets

from d2lps.parallel.pipeline.arrange import arranged, assignment
from d2lps.parallel.pipeline.schedules import Schedule, gpipe, interleaved, one_f_one_b, placed, replay, zero_bubble
from d2lps.widgets import still
from d2lps.widgets.choices import Choices, Options
from d2lps.widgets.texts import TIMETABLE


class Timetable(still.Still):
    """A row for each rank, a block for each thing that it does, with the number of the micro-batch; beside it what it holds.

    >>> Timetable(one_f_one_b(4, 8))
    Timetable: 33 long, a bubble of 37.5 %; held: 4, 3, 2, 1

    schedule, costs: as of `replay`, which says when each action starts. Later stages of a rank are paler. Held are micro-batches,
    by whole ranks: of v stages on a rank each counts a v-th. A click on a block shows where else its micro-batch is.
    """

    _esm, _css = still.source("timetable.js"), still.source("timetable.css")
    data = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Int(-1).tag(sync=True)  # a micro-batch; -1: none

    def __init__(self, schedule: Schedule, title: str = "", **costs: Any) -> None:
        done, (home, _) = replay(schedule, **costs), placed(schedule)
        stages = [[stage for stage, rank in home.items() if rank == mine] for mine in range(len(schedule))]
        rows = []
        for row, mine, peak in zip(schedule, map(sorted, stages), done.peak, strict=True):
            times = (f"{done.starts[action]:.4g} {done.ends[action]:.4g}" for action in row)
            bars = (f"{a.kind} {mine.index(a.stage)} {a.micro_batch} {time}" for a, time in zip(row, times, strict=True))
            rows.append({"bars": ";".join(bars), "held": f"{peak / len(mine):.3g}"})
        held = TIMETABLE["and"].join(row["held"] for row in rows)
        said = TIMETABLE["said"].format(time=f"{done.time:.4g}", bubble=f"{100 * done.bubble:.3g}", held=held)
        kinds = [kind for kind in "FBW" if any(action.kind == kind for row in schedule for action in row)]
        super().__init__(data={"title": title, "rows": rows, "end": done.time, "said": said, "kinds": kinds, "texts": TIMETABLE})

    def __repr__(self) -> str:
        return f"Timetable: {self.data['title'] and self.data['title'] + ': '}{self.data['said']}"


def schedule_explorer(
    ranks: int = 4, micro_batches: tuple[int, ...] = (4, 8, 12), messages: tuple[float, ...] = (0, 0.25, 1),
    order: str = "one_f_one_b",
) -> Choices:  # fmt: skip
    """Timetables among which the reader chooses: where stages lie, in which order, how evenly, and what a message costs.

    A rank's forward pass of a micro-batch takes 1, its backward pass 2; `messages` are in the same unit. With two stages on a
    rank each takes half of that. "uneven": the last stage takes half as much again.
    """
    orders = {TIMETABLE[name]: name for name in ("gpipe", "one_f_one_b", "zero_bubble")}
    ways = {TIMETABLE[way]: way for way in ("linear", "looped", "V")}
    stages = {TIMETABLE["even"]: 1.0, TIMETABLE["uneven"]: 1.5}

    def make(way: str, order: str, stages: float, m: int, message: float) -> Timetable:
        home = assignment(ranks, way)
        share = ranks / len(home)
        times = [share] * (len(home) - 1) + [share * stages]
        costs: dict[str, Any] = {"forward": times, "backward": [2 * time for time in times], "message": message}
        return Timetable(_schedule(way, order, home, m), **costs)

    names = {name: TIMETABLE[name] for name in ("way", "order", "stages", "m", "message")}
    options: dict[str, Options] = {
        "way": ways,
        "order": orders,
        "stages": stages,
        "m": list(micro_batches),
        "message": list(messages),
    }
    return Choices(
        options, make, TIMETABLE["title"], names, first={"order": order, "m": micro_batches[len(micro_batches) // 2]}
    )


def _schedule(way: str, order: str, home: list[int], m: int) -> Schedule:
    """The published one where there is one."""
    ranks = max(home) + 1
    if way == "linear":
        return {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "zero_bubble": zero_bubble}[order](ranks, m)
    return interleaved(ranks, m, 2) if (way, order) == ("looped", "one_f_one_b") else arranged(home, m, order)
