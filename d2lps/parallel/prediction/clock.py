"""Time as a number, for several ranks at once: each computes, waits, and has collectives go on that share links with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from greenlet import getcurrent, greenlet

from d2lps.parallel.prediction.loads import Load, Loads, speeds
from d2lps.parallel.prediction.prices import Price, Prices
from d2lps.simulator.simulate import uncollected

WITHIN = "tp", "cp", "ep"  # axes whose groups are ranks of one stage that do nothing meanwhile
ALONE = (1.0,)
LEAST = 1e-15  # seconds: rounding leaves less than that
Parcel = tuple[float, Load | None, float]  # a latency, which nothing makes longer; then what is on links, and its seconds alone


def parcels(price: Price, nbytes: float, load: Callable[[int], Load]) -> Iterator[Parcel]:
    """One for each phase."""
    for number, (alpha, beta) in enumerate(zip(price.alphas, price.betas, strict=True)):
        seconds = beta * nbytes + min(alpha, 0.0)
        yield max(alpha, 0.0), load(number) if seconds > LEAST else None, seconds


class Going:
    """Something on its way, parcel by parcel.

    left: seconds of a parcel that are left, were nothing else on its links, as of `since`, which is in the future while its
    latency lasts; speed: 1 is as fast as alone, 0 says that it is not foreseen yet when it will end.
    """

    __slots__ = ("after", "left", "on", "over", "parcels", "since", "speed", "until")

    def __init__(self, parcels: Iterable[Parcel]) -> None:
        self.parcels = iter(parcels)
        self.after: list[Callable[[], Any]] = []  # what happens when it is over
        self.over = False
        self.on: Load | None = None
        self.left = self.since = self.speed = self.until = 0.0


class Time:
    """The moments at which something happens, one after another, and what is on the links."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.loads = prices, Loads(prices)
        self.now = 0.0
        self.met: dict[Any, Going] = {}
        self._moments: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = count()
        self._flowing: dict[Going, None] = {}

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

    def wait(self, going: Going) -> None:
        if not going.over:
            going.after.append(getcurrent().switch)
            self._hub.switch()

    # ---- what is on its way ---------------------------------------------------------------------------------------

    def begin(self, going: Going) -> None:
        """Its next parcel; after the last one it is over."""
        for latency, load, seconds in going.parcels:
            if load is not None:
                going.on, going.left, going.since, going.speed = load, seconds, self.now + latency, 0.0
                self._come(going)
                return
            if latency > LEAST:
                self.at(self.now + latency, partial(self.begin, going))
                return
        going.over = True
        *others, last = going.after or (None,)
        for happens in others:
            self.at(self.now, happens)
        if last is not None and getcurrent() is self._hub:  # which has nothing else to do at this moment
            last()
        elif last is not None:
            self.at(self.now, last)

    def _come(self, going: Going) -> None:
        """Onto its links, after its latency. Most meet nobody: their end is foreseen at once, in one event in place of two."""
        meeting = [other for other in self._flowing if going.on.meets(other.on)]  # type: ignore[union-attr, arg-type]
        self._flowing[going] = None
        if not meeting:
            going.speed = 1.0
            return self._foresee(going)
        for one in meeting:
            if one.since > self.now and one.speed:  # it was foreseen that it would be alone
                one.speed, one.until = 0.0, -1.0
                self.at(one.since, partial(self._enter, one))
        self.at(going.since, partial(self._enter, going)) if going.since > self.now else self._enter(going)

    def _enter(self, going: Going) -> None:
        self._share(self._beside(going))

    def _foresee(self, going: Going) -> None:
        going.until = going.since + going.left / going.speed
        self.at(going.until, partial(self._end, going))

    def _end(self, going: Going) -> None:
        if going.until != self.now:
            return  # it was foreseen, and then something else came, or ended
        _, *beside = self._beside(going)
        del self._flowing[going]
        going.until = -1.0
        if beside:
            self._share(beside)
        self.begin(going)

    def _beside(self, going: Going) -> list[Going]:
        """Itself, and all on links by now that share one with it, or with something that does, and so on."""
        found = [going]
        if len(self._flowing) > 1:
            for one in found:
                for other in self._flowing:
                    if one.on.meets(other.on) and other.since <= self.now and other not in found:  # type: ignore[union-attr, arg-type]
                        found.append(other)
        return found

    def _share(self, beside: list[Going]) -> None:
        """Give each its speed, and foresee its end."""
        for going, speed in zip(beside, self._speeds(beside), strict=True):
            if speed != going.speed:
                left = max(0.0, going.left - going.speed * (self.now - going.since))
                going.left, going.since, going.speed = left, self.now, speed
                self._foresee(going)

    def _speeds(self, beside: list[Going]) -> Sequence[float]:
        if len(beside) < 2:
            return ALONE[: len(beside)]
        beside.sort(key=lambda going: id(going.on))  # so that as many as can be are known
        key = ("speeds", *(going.on for going in beside))
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
        elif axis == "ends":
            self._meet(collective, nbytes)
        else:
            self.wait(self._begin(axis, collective, nbytes))

    def around(self, seconds: float, nbytes: float) -> None:
        pieces = self.prices.plan.cp
        for piece in range(pieces):
            coming = self._begin("cp", "pass_on", nbytes) if piece < pieces - 1 else None
            self.compute(seconds / pieces)
            self.wait(coming)

    def start(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        return self._begin(axis, collective, nbytes, behind)

    def _begin(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        going = Going(self._parcels(axis, collective, nbytes))
        self.going += 1
        going.after.append(self._less)
        if behind is None or behind[1].over:
            self.time.begin(going)
        else:
            behind[1].after.append(partial(self.time.begin, going))
        return axis, going

    def wait(self, started: Any) -> None:
        if started is not None:
            axis, going = started
            before = self.time.now
            self.time.wait(going)
            self.spent[axis] += self.time.now - before

    def _parcels(self, axis: str, collective: str, nbytes: float) -> Iterator[Parcel]:
        price = self.prices.price(axis, collective)
        return parcels(price, nbytes, lambda number: self.time.loads.of(self.place, axis, collective, number))

    def _less(self) -> None:
        self.going -= 1

    def _meet(self, collective: str, nbytes: float) -> None:
        """The first and the last stage's ranks: whoever comes first waits for the other."""
        other = self.time.met.pop(collective, None)
        going = Going(self._parcels("ends", collective, nbytes)) if other is None else other
        if other is None:
            self.time.met[collective] = going
        else:
            self.time.begin(going)
        self.wait(("ends", going))
