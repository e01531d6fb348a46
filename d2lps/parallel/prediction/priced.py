"""A step with prices in place of messages: a clock for each rank of one replica's pipeline, and what it has spent on what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from d2lps.parallel.pipeline.schedules import Action, Schedule, needs, played, traffic
from d2lps.parallel.prediction.beside import slowed
from d2lps.parallel.prediction.prices import Prices
from d2lps.parallel.prediction.program import Job, Rank
from d2lps.parallel.training.plan import Plan


@dataclass(eq=False)  # two that have equally long to go are two
class Going:
    """A collective that goes on beside what the rank does. left: seconds of each phase, if nothing else were on its links."""

    axis: str
    collective: str
    left: list[float]
    behind: Going | None
    phase: int = 0

    @property
    def asked(self) -> tuple[str, str, int]:
        return self.axis, self.collective, self.phase

    def goes_on(self, seconds: float) -> bool:
        """Whether something is left then."""
        self.left[self.phase] -= seconds
        while self.phase < len(self.left) and self.left[self.phase] <= 1e-12:  # rounding leaves less than that
            self.phase += 1
        return self.phase < len(self.left)


class Clock:
    """A `World` in which time is a number. Collectives that go on at the same time slow one another down."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.cp = prices, prices.plan.cp
        self.now = 0.0
        self.going: list[Going] = []
        self.spent: dict[str, float] = defaultdict(float)

    def compute(self, seconds: float, label: str = "compute") -> None:
        self.take(seconds, label)

    def collective(self, axis: str, collective: str, nbytes: float) -> None:
        if self.going:
            self.wait(self._begin(axis, collective, nbytes))
        else:
            self.take(self.prices(axis, collective, nbytes), axis)

    def around(self, seconds: float, nbytes: float) -> None:
        for piece in range(self.cp):
            coming = self._begin("cp", "pass_on", nbytes) if piece < self.cp - 1 else None
            self.take(seconds / self.cp, "compute")
            self.wait(coming)

    def start(self, axis: str, collective: str, nbytes: float, behind: Going | None = None) -> Going:
        return self._begin(axis, collective, nbytes, behind)

    def _begin(self, axis: str, collective: str, nbytes: float, behind: Going | None = None) -> Going:
        started = Going(axis, collective, self.prices.price(axis, collective).phases(nbytes), behind)
        if started.goes_on(0.0):  # a group of one rank has nothing to send
            self.going.append(started)
        return started

    def wait(self, started: Going | None) -> None:
        while started in self.going:
            self.take(self._until_a_phase_ends(), started.axis)

    def take(self, seconds: float, label: str) -> None:
        self.until(self.now + seconds)
        self.spent[label] += seconds

    def until(self, time: float) -> None:
        """Let time pass, and what goes on go on."""
        while self.going and self.now < time:
            passed = min(time - self.now, self._until_a_phase_ends())
            over = [going for going, times in self._slowed() if not going.goes_on(passed / times)]
            self.going = [going for going in self.going if going not in over]
            self.now += passed
        self.now = max(self.now, time)

    def _until_a_phase_ends(self) -> float:
        return min(going.left[going.phase] * times for going, times in self._slowed())

    def _slowed(self) -> list[tuple[Going, float]]:
        """What is on its way now, and how many times as long it takes as it would alone."""
        now = [going for going in self.going if going.behind not in self.going]
        return [(one, 1.0 + sum(self._more(one, other) for other in now if other is not one)) for one in now]

    def _more(self, one: Going, other: Going) -> float:
        """How many times as long one takes longer beside another."""
        if (pair := (one.asked, other.asked)) not in self.prices.pairs:
            self.prices.pairs[pair] = slowed(self.prices, *pair) - 1.0
        return self.prices.pairs[pair]


@dataclass
class Played:
    """A step of so many micro-batches: when each action began and ended, each rank was done, and what it had spent on what."""

    starts: dict[Action, float]
    ends: dict[Action, float]
    done: list[float]
    spent: list[dict[str, float]]

    @property
    def time(self) -> float:
        return max(self.done)


@dataclass
class Known:
    """What all plays of a job with the same prices have in common: a part's passes, and what a stage's spend on what."""

    passes: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    lasting: dict[tuple[str, int], list[tuple[str, float]]] = field(default_factory=dict)


def play(job: Job, prices: Prices, micro_batches: int, messages: bool = True, known: Known | None = None) -> Played:
    """The step of one replica. messages: whether what stages send one another takes its time."""
    return _Play(job, prices, micro_batches, messages, known or Known()).result()


@dataclass
class _Play:
    job: Job
    prices: Prices
    micro_batches: int
    messages: bool
    known: Known

    def result(self) -> Played:
        plan = self.job.plan
        self.clocks = [Clock(self.prices) for _ in range(plan.pp)]
        self.ranks = [Rank(self.job, clock, place, self.known.passes) for place, clock in enumerate(self.clocks)]
        count = len(self.job.stages)
        self.travels = [self.prices.message(stage, self.job.message) if self.messages else 0.0 for stage in range(count - 1)]
        schedule, self.ahead = ordered(plan.schedule, plan.pp, plan.interleave, self.micro_batches)
        self.began: dict[Action | None, float] = {}
        starts, ends = played(schedule, self._act, self._arrives)
        for rank in self.ranks:
            rank.finish()
        return Played(starts, ends, [clock.now for clock in self.clocks], [clock.spent for clock in self.clocks])

    def _act(self, action: Action, start: float) -> float:
        """When it ends. Passes that nothing goes on beside last equally long each time."""
        place = action.stage % self.job.plan.pp
        clock, last = self.clocks[place], action.micro_batch == self.micro_batches - 1
        clock.until(start)
        self.began[action] = start
        if last:  # of a step that is played in short, this is the whole one's last
            action = action._replace(micro_batch=self.job.micro_batches - 1)
        if self.job.plan.zero > 1 or (last and action.kind != "F"):
            self.ranks[place].act(action)
            return clock.now
        key = action[:2]
        if key not in self.known.lasting:
            before = defaultdict(float, clock.spent)
            self.ranks[place].act(action)
            self.known.lasting[key] = [(label, clock.spent[label] - before[label]) for label in clock.spent]
            return clock.now
        for label, seconds in self.known.lasting[key]:
            clock.take(seconds, label)
        return clock.now

    def _arrives(self, before: Action, action: Action, ended: float, free: float) -> float:
        if (before.stage - action.stage) % self.job.plan.pp == 0 or not self.messages:
            return ended
        posted = self.began.get(self.ahead.get(action), free)
        return max(ended, posted) + self.travels[min(before.stage, action.stage)]


@lru_cache(maxsize=128)
def ordered(name: str, ranks: int, chunks: int, micro_batches: int) -> tuple[Schedule, dict[Action, Action | None]]:
    """A schedule by name, and `posted_ahead` of it: plans by the hundred share them."""
    schedule = Plan(pp=ranks, schedule=name, interleave=chunks).order(micro_batches)
    return schedule, posted_ahead(schedule)


def posted_ahead(schedule: Schedule) -> dict[Action, Action | None]:
    """With the start of which action the receive is posted that each one waits for; None: only once it waits.

    `Mail` posts it an action ahead; but the two ends of a pair post all their messages in one order, and where what the rank is
    computing is to be sent before it, the receive comes behind that.
    """
    stages = 1 + max(action.stage for row in schedule for action in row)
    queues = traffic(tuple(map(tuple, schedule))).values()
    place = {action: (queue, number) for queue, order in enumerate(queues) for number, (action, _) in enumerate(order)}
    ahead: dict[Action, Action | None] = {}
    for row in schedule:
        for previous, action in pairwise(row):
            if (need := needs(action, stages)) in place:
                queue, number = place[need]
                pair, before = place.get(previous, (-1, 0))
                ahead[action] = None if pair == queue and before < number else previous
    return ahead
