"""A step with prices in place of messages: a clock for each rank of one replica's pipeline, and what it has spent on what."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from d2lps.parallel.pipeline.schedules import Action, played
from d2lps.parallel.prediction.prices import Prices
from d2lps.parallel.prediction.program import Job, Rank


class Clock:
    """A `World` in which time is a number. free: when what was started on this rank's lane is over."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.cp = prices, prices.plan.cp
        self.now = self.free = 0.0
        self.spent: Counter[str] = Counter()

    def compute(self, seconds: float, label: str = "compute") -> None:
        self._pass(seconds, label)

    def collective(self, axis: str, collective: str, nbytes: float) -> None:
        self._pass(self.prices(axis, collective, nbytes), axis)

    def around(self, seconds: float, nbytes: float) -> None:
        piece = seconds / self.cp
        waits = max(0.0, self.prices("cp", "pass_on", nbytes) - piece)
        self._pass(seconds, "compute")
        self._pass(waits * (self.cp - 1), "cp")

    def start(self, axis: str, collective: str, nbytes: float) -> tuple[float, str]:
        self.free = max(self.free, self.now) + self.prices(axis, collective, nbytes)
        return self.free, axis

    def wait(self, started: tuple[float, str] | None) -> None:
        if started is not None:
            self._pass(max(0.0, started[0] - self.now), started[1])

    def _pass(self, seconds: float, label: str) -> None:
        self.now += seconds
        self.spent[label] += seconds


@dataclass
class Played:
    """A step of so many micro-batches: when each action began and ended, when each rank was done, and what it had spent on what."""

    starts: dict[Action, float]
    ends: dict[Action, float]
    done: list[float]
    spent: list[Counter[str]]

    @property
    def time(self) -> float:
        return max(self.done)


def play(job: Job, prices: Prices, micro_batches: int, messages: bool = True) -> Played:
    """The step of one replica. messages: whether what stages send one another takes its time."""
    return _Play(job, prices, micro_batches, messages).result()


@dataclass
class _Play:
    job: Job
    prices: Prices
    micro_batches: int
    messages: bool
    passes: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    lasting: dict[tuple[str, int], tuple[float, list[tuple[str, float]]]] = field(default_factory=dict)

    def result(self) -> Played:
        plan = self.job.plan
        self.clocks = [Clock(self.prices) for _ in range(plan.pp)]
        self.ranks = [Rank(self.job, clock, place, self.passes) for place, clock in enumerate(self.clocks)]
        count = len(self.job.stages)
        self.travels = [self.prices.message(stage, self.job.message) if self.messages else 0.0 for stage in range(count - 1)]
        schedule = plan.order(self.micro_batches * plan.dp * plan.micro_batch)
        starts, ends = played(schedule, self._act, self._travel)
        for rank in self.ranks:
            rank.finish()
        return Played(starts, ends, [clock.now for clock in self.clocks], [clock.spent for clock in self.clocks])

    def _act(self, action: Action, start: float) -> float:
        """When it ends. Passes that nothing goes on beside last equally long each time."""
        place = action.stage % self.job.plan.pp
        clock, last = self.clocks[place], action.micro_batch == self.micro_batches - 1
        clock.now = start
        if last:  # of a step that is played in short, this is the whole one's last
            action = action._replace(micro_batch=self.job.micro_batches - 1)
        if self.job.plan.zero > 1 or last:
            self.ranks[place].act(action)
            return clock.now
        key = action[:2]
        if key not in self.lasting:
            before = Counter(clock.spent)
            self.ranks[place].act(action)
            self.lasting[key] = clock.now - start, [(label, clock.spent[label] - before[label]) for label in clock.spent]
            return clock.now
        seconds, spent = self.lasting[key]
        clock.now += seconds
        for label, part in spent:
            clock.spent[label] += part
        return clock.now

    def _travel(self, before: Action, action: Action) -> float:
        return self.travels[min(before.stage, action.stage)] if before.stage != action.stage else 0.0
