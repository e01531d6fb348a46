"""Time as a number, for several ranks at once: each computes, waits, and has collectives go on that share links with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from greenlet import getcurrent, greenlet

from d2lps.parallel.prediction.loads import LinkLoad, LinkLoads, speeds
from d2lps.parallel.prediction.prices import Price, Prices
from d2lps.simulator.simulate import uncollected

WITHIN = "tp", "cp", "ep"  # axes whose groups are ranks of one stage that do nothing meanwhile
ALONE = (1.0,)
LEAST = 1e-15  # seconds: rounding leaves less than that
Segment = tuple[float, LinkLoad | None, float]  # a latency, which nothing makes longer; then what is on links, its seconds alone


def segments(price: Price, nbytes: float, load: Callable[[int], LinkLoad]) -> Iterator[Segment]:
    """One for each phase."""
    for number, (alpha, beta) in enumerate(zip(price.alphas, price.betas, strict=True)):
        seconds = beta * nbytes + min(alpha, 0.0)
        yield max(alpha, 0.0), load(number) if seconds > LEAST else None, seconds


class Flow:
    """A collective, or a message, that goes on segment by segment once it has been asked for so often, such as by both its ends.

    left: seconds of a segment that are left, were nothing else on its links, as of `since`, which is in the future while its
    latency lasts; speed: 1 is as fast as alone, 0 says that it is not foreseen yet when it will end.
    """

    __slots__ = ("after", "asking", "left", "on", "over", "segments", "since", "speed", "until")

    def __init__(self, segments: Iterable[Segment], asking: int = 1) -> None:
        self.segments, self.asking = iter(segments), asking
        self.after: list[Callable[[], Any]] = []  # what happens when it is over
        self.over = False
        self.on: LinkLoad | None = None
        self.left = self.since = self.speed = self.until = 0.0


class Time:
    """The moments at which something happens, one after another, and what is on the links."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.loads = prices, LinkLoads(prices)
        self.now = 0.0
        self.flows: dict[Any, Flow] = {}  # those that two ranks ask for, by what both call them
        self._moments: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = count()
        self._flowing: dict[Flow, None] = {}

    def run(self, programs: Iterable[Callable[[], Any]]) -> None:
        """Until all of them have come to their end."""
        self._hub = getcurrent()
        tasks = [greenlet(program) for program in programs]
        for task in tasks:
            self.at(self.now, task.switch)
        with uncollected():
            while self._moments:
                self.now, _, happens = heappop(self._moments)
                happens()
        assert all(task.dead for task in tasks), "they wait for one another"

    def at(self, time: float, happens: Callable[[], Any]) -> None:
        heappush(self._moments, (time, next(self._number), happens))

    def sleep(self, seconds: float) -> None:
        """Of the program that calls it."""
        end = self.now + seconds
        if self._moments and self._moments[0][0] <= end:
            self.at(end, getcurrent().switch)
            self._hub.switch()
        else:
            self.now = end  # nothing happens before

    def wait(self, flow: Flow) -> None:
        if not flow.over:
            flow.after.append(getcurrent().switch)
            self._hub.switch()

    # ---- what is on its way ---------------------------------------------------------------------------------------

    def ask(self, flow: Flow) -> None:
        """It begins when as many have asked for it as must."""
        flow.asking -= 1
        if not flow.asking:
            self._go_on(flow)

    def _go_on(self, flow: Flow) -> None:
        """Its next segment; after the last one it is over."""
        for latency, load, seconds in flow.segments:
            if load is not None:
                flow.on, flow.left, flow.since, flow.speed = load, seconds, self.now + latency, 0.0
                self._come(flow)
                return
            if latency > LEAST:
                self.at(self.now + latency, partial(self._go_on, flow))
                return
        flow.over = True
        *others, last = flow.after or (None,)
        for happens in others:
            self.at(self.now, happens)
        if last is not None and getcurrent() is self._hub:  # which has nothing else to do at this moment
            last()
        elif last is not None:
            self.at(self.now, last)

    def _come(self, flow: Flow) -> None:
        """Onto its links, after its latency. Most meet nobody: their end is foreseen at once, in one event in place of two."""
        meeting = [other for other in self._flowing if flow.on.meets(other.on)]  # type: ignore[union-attr, arg-type]
        self._flowing[flow] = None
        if not meeting:
            flow.speed = 1.0
            return self._foresee(flow)
        for one in meeting:
            if one.since > self.now and one.speed:  # it was foreseen that it would be alone
                one.speed, one.until = 0.0, -1.0
                self.at(one.since, partial(self._enter, one))
        self.at(flow.since, partial(self._enter, flow)) if flow.since > self.now else self._enter(flow)

    def _enter(self, flow: Flow) -> None:
        self._share(self._beside(flow))

    def _foresee(self, flow: Flow) -> None:
        flow.until = flow.since + flow.left / flow.speed
        self.at(flow.until, partial(self._end, flow))

    def _end(self, flow: Flow) -> None:
        if flow.until != self.now:
            return  # it was foreseen, and then something else came, or ended
        _, *beside = self._beside(flow)
        del self._flowing[flow]
        flow.until = -1.0
        if beside:
            self._share(beside)
        self._go_on(flow)

    def _beside(self, flow: Flow) -> list[Flow]:
        """Itself, and all on links by now that share one with it, or with something that does, and so on."""
        found = [flow]
        if len(self._flowing) > 1:
            for one in found:
                for other in self._flowing:
                    if one.on.meets(other.on) and other.since <= self.now and other not in found:  # type: ignore[union-attr, arg-type]
                        found.append(other)
        return found

    def _share(self, beside: list[Flow]) -> None:
        """Give each its speed, and foresee its end."""
        for flow, speed in zip(beside, self._speeds(beside), strict=True):
            if speed != flow.speed:
                left = max(0.0, flow.left - flow.speed * (self.now - flow.since))
                flow.left, flow.since, flow.speed = left, self.now, speed
                self._foresee(flow)

    def _speeds(self, beside: list[Flow]) -> Sequence[float]:
        if len(beside) < 2:
            return ALONE[: len(beside)]
        beside.sort(key=lambda flow: id(flow.on))  # so that as many as can be are known
        key = ("speeds", *(flow.on for flow in beside))
        if key not in self.prices.known:
            self.prices.known[key] = speeds(key[1:])  # type: ignore[arg-type]
        found: list[float] = self.prices.known[key]
        return found


class Clock:
    """A `World` in which time is a number: that of a rank at some place in the pipeline.

    alone: nothing on other ranks meets what this one asks of the axes within its stage.
    """

    def __init__(self, time: Time, place: int = 0, alone: bool = True) -> None:
        self.time, self.prices, self.place, self.alone = time, time.prices, place, alone
        self.spent: dict[str, float] = defaultdict(float)
        self.going = 0

    def compute(self, seconds: float, label: str = "compute") -> None:
        self.time.sleep(seconds)
        self.spent[label] += seconds

    def collective(self, axis: str, collective: str, nbytes: float) -> None:
        if self.alone and not self.going and axis in WITHIN:
            self.compute(self.prices(axis, collective, nbytes), axis)
        elif axis == "ends":  # the first and the last stage's ranks: whoever comes first waits for the other
            flow = self.time.flows.setdefault(collective, self._flow(axis, collective, nbytes, 2))
            self.time.ask(flow)
            self.wait((axis, flow))
        else:
            self.wait(self.start(axis, collective, nbytes))

    def start(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        flow = self._flow(axis, collective, nbytes)
        self.going += 1
        flow.after.append(self._less)
        if behind is None or behind[1].over:
            self.time.ask(flow)
        else:
            behind[1].after.append(partial(self.time.ask, flow))
        return axis, flow

    def wait(self, started: Any) -> None:
        if started is not None:
            axis, flow = started
            before = self.time.now
            self.time.wait(flow)
            self.spent[axis] += self.time.now - before

    def _flow(self, axis: str, collective: str, nbytes: float, asking: int = 1) -> Flow:
        price = self.prices.price(axis, collective)
        load = partial(self.time.loads.of, self.place, axis, collective)
        return Flow(segments(price, nbytes, load), asking)

    def _less(self) -> None:
        self.going -= 1
