"""A step with prices in place of messages: all ranks of one replica's pipeline, and what each has spent on what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from d2lps.parallel.pipeline.schedules import Action, Schedule, after, needs, traffic
from d2lps.parallel.prediction.clock import WITHIN, Clock, Flow, Segment, Time, segments
from d2lps.parallel.prediction.loads import LinkLoads
from d2lps.parallel.prediction.prices import Prices
from d2lps.parallel.prediction.program import Job, Rank
from d2lps.parallel.training.plan import Plan


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
    """What all plays of a job with the same prices have in common: a part's passes, and how long a stage's last, on what."""

    passes: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    lasting: dict[tuple[str, int], tuple[float, list[tuple[str, float]]]] = field(default_factory=dict)


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
        self.time = Time(self.prices)
        alone = _alone(self.job, self.time.loads) if plan.pp > 1 else {0}
        self.clocks = [Clock(self.time, place, place in alone) for place in range(plan.pp)]
        self.ranks = [Rank(self.job, clock, place, self.known.passes) for place, clock in enumerate(self.clocks)]
        self.segments = {pair: list(self._segments(*pair)) for place in range(plan.pp) for pair in _neighbors(place, plan.pp)}
        self.starts, self.ends, self.done = dict[Action, float](), dict[Action, float](), [0.0] * plan.pp
        rows = ordered(plan.schedule, plan.pp, plan.interleave, self.micro_batches)[1]
        self.time.run(partial(self._row, place, row) for place, row in enumerate(rows))
        return Played(self.starts, self.ends, self.done, [clock.spent for clock in self.clocks])

    def _segments(self, here: int, there: int) -> Iterator[Segment]:
        """What a message is on its way."""
        if self.messages:
            low = here if (here + 1) % self.job.plan.pp == there else there
            price = self.prices.between(low, (low + 1) % self.job.plan.pp)
            yield from segments(price, self.job.message, lambda _: self.time.loads.between(here, there))

    def _row(self, place: int, row: Sequence[Turn]) -> None:
        """A rank of the pipeline, as `carry_out` has it: what is sent is waited for at the end."""
        sent = []
        for turn in row:
            if turn.waits:
                message = self._message(turn.waits)
                if turn.posts:
                    self.time.ask(message)
                self.time.wait(message)
            if turn.ahead:
                self.time.ask(self._message(turn.ahead))
            self._act(turn.action, place)
            if turn.sends:
                sent.append(self._message(turn.action))
                self.time.ask(sent[-1])
        for message in sent:
            self.time.wait(message)
        self.ranks[place].finish()
        self.done[place] = self.time.now

    def _message(self, action: Action) -> Flow:
        """With what an action makes, to the next stage: on its way once it is sent and its receiver is ready for it."""
        if action not in self.time.flows:
            pair = action.stage % self.job.plan.pp, after(action) % self.job.plan.pp
            self.time.flows[action] = Flow(self.segments[pair], asking=2)
        return self.time.flows[action]

    def _act(self, action: Action, place: int) -> None:
        """Passes that nothing goes on beside last equally long each time."""
        clock, last, start = self.clocks[place], action.micro_batch == self.micro_batches - 1, self.time.now
        if self.job.plan.zero > 1 or (last and action.kind != "F") or clock.going or not clock.alone:
            if last:  # of a step that is played in short, this is the whole one's last
                self.ranks[place].act(action._replace(micro_batch=self.job.micro_batches - 1))
            else:
                self.ranks[place].act(action)
        elif (key := action[:2]) in self.known.lasting:
            seconds, spent = self.known.lasting[key]
            self.time.sleep(seconds)
            for label, part in spent:
                clock.spent[label] += part
        else:
            before = defaultdict(float, clock.spent)
            self.ranks[place].act(action)
            spent = [(label, clock.spent[label] - before[label]) for label in clock.spent]
            self.known.lasting[key] = self.time.now - start, spent
        self.starts[action], self.ends[action] = start, self.time.now


def _neighbors(place: int, count: int) -> set[tuple[int, int]]:
    """Messages go to the next rank of the pipeline, and back."""
    return {(place, (place + 1) % count), ((place + 1) % count, place)} if count > 1 else set()


def _alone(job: Job, loads: LinkLoads) -> set[int]:
    """Places in the pipeline whose ranks meet nothing of other stages, nor a message, in what they ask of tp, cp and ep."""
    plan, asked, known = job.plan, sorted(job.asks), loads.prices.known
    mesh = plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, bool(plan.zero), plan.zero_group
    if (key := ("alone", mesh, *asked)) not in known:
        within, seen, shared = list[set[Any]](), set[Any](), set[Any]()
        for place in range(plan.pp):
            used = [(axis in WITHIN, load) for axis, name in asked for load in loads.all(place, axis, name)]
            within.append({link for mine, load in used if mine for link in load.share})
            links = {link for _, load in used for link in load.share}
            shared |= seen & links
            seen |= links
            for pair in _neighbors(place, plan.pp):
                shared |= loads.between(*pair).share.keys()
        known[key] = {place for place, links in enumerate(within) if links.isdisjoint(shared)}
    found: set[int] = known[key]
    return found


class Turn(NamedTuple):
    """An action, and of what other ranks make: what it waits for, whether that is posted only then, what is posted ahead."""

    action: Action
    waits: Action | None
    posts: bool
    ahead: Action | None
    sends: bool


@lru_cache(maxsize=128)
def ordered(name: str, ranks: int, chunks: int, micro_batches: int) -> tuple[Schedule, list[list[Turn]]]:
    """A schedule by name, and who waits for what in it: plans by the hundred share them."""
    schedule = Plan(pp=ranks, schedule=name, interleave=chunks).order(micro_batches)
    ahead, stages = posted_ahead(schedule), 1 + max(action.stage for row in schedule for action in row)

    def elsewhere(action: Action | None) -> Action | None:
        need = needs(action, stages) if action else None
        return need if need and action and (need.stage - action.stage) % ranks else None

    def turn(previous: Action | None, action: Action, then: Action | None) -> Turn:
        need, soon = elsewhere(action), elsewhere(then) if then and ahead.get(then) == action else None
        sends = 0 <= after(action) < stages and (after(action) - action.stage) % ranks != 0
        return Turn(action, need, need is not None and (previous is None or ahead.get(action) != previous), soon, sends)

    return schedule, [list(map(turn, [None, *row], row, [*row[1:], None])) for row in schedule]


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
