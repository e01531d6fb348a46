"""What came of a job: how long it took, where its bytes went, and how well the model knows the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from torch import Tensor

from d2lps.architectures.job import Job
from d2lps.architectures.replica import Record
from d2lps.result import Run
from d2lps.trace import Trace

LONGER = 1.25  # times the usual step: a rank that had such a one was held up


@dataclass
class Outcome:
    """Of a job that was started once, or again after each accident.

    attempts: its Runs, one after another, each with the time at which it began and the places of its ranks; without those of
    processes of which one was killed: of these nothing is left. history: what happened, in sentences. redone: steps that were
    made twice, since the checkpoint was older. told: losses by step that the job has written down.
    """

    architecture: str
    job: Job
    attempts: list[tuple[Run, float, list[Any]]] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    redone: int = 0
    told: dict[str, float] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        """Of the last attempt's ranks that have come to the end."""
        return [record for record in self.attempts[-1][0] if record is not None]

    @property
    def ranks(self) -> int:
        return len(self.attempts[-1][0])

    @cached_property
    def ended(self) -> dict[Hashable, dict[int, float]]:
        """When each step was over, for the last time, on each place of those that have come to the end."""
        found: dict[Hashable, dict[int, float]] = {}
        for run, began, places in self.attempts:
            for place, record in zip(places, run, strict=True):
                if record is not None:
                    found.setdefault(place, {}).update({k: began + t for k, t in record.ended.items()})
        run, _, places = self.attempts[-1]
        return {place: found[place] for place, record in zip(places, run, strict=True) if record and found[place]}

    @property
    def time(self) -> float:
        """Seconds until the last step was over everywhere."""
        return max(max(steps.values()) for steps in self.ended.values())

    def laps(self, place: Hashable) -> list[float]:
        """Seconds that this place took for each step, the waiting for a new start included; of some that it missed, the mean."""
        steps = sorted(self.ended[place].items())
        return [(t - s) / (j - i) for (i, s), (j, t) in zip([(-1, 0.0), *steps], steps, strict=False) if j > i]

    @property
    def step_time(self) -> float:
        """Seconds for a step, as the median has it."""
        return median(lap for place in self.ended for lap in self.laps(place))

    def held_up(self, usual: float) -> int:
        """How many places had a step much longer than usual."""
        return sum(max(self.laps(place)) > LONGER * usual for place in self.ended)

    @property
    def losses(self) -> list[float | None]:
        """Of each step, over the whole batch; None where a worker that has died took its part along."""
        parts: list[list[float]] = [[] for _ in range(self.job.steps)]
        for record in self.records:
            for (step, _), loss in record.losses.items():
                parts[step].append(loss)
        return [self._mean(step, found) for step, found in enumerate(parts)]

    def _mean(self, step: int, found: list[float]) -> float | None:
        shares = {"parameter server": len(self.attempts[0][0]), "cloud-native": self.job.parts}
        whole = shares.get(self.architecture, len(self.records))
        return sum(found) / whole if found and len(found) == whole else self.told.get(str(step))

    @property
    def weights(self) -> Tensor | None:
        """At the end; all ranks have the same."""
        return self.records[0].weights

    @property
    def loss(self) -> float | None:
        """Of the final weights, on text that no step has seen."""
        return None if self.weights is None else self.job.loss(self.weights)

    @property
    def trace(self) -> Trace:
        """Of the first attempt."""
        return self.attempts[0][0].trace

    def bytes_on_links(self) -> dict[tuple[Any, Any], int]:
        """{link: bytes} of a simulated run, in all attempts."""
        total: Counter[tuple[Any, Any]] = Counter()
        for run, _, _ in self.attempts:
            total.update(run.trace.bytes_on_links())
        return dict(total)
