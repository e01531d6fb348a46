"""Flows on links that they share fairly.

Max-min fairness: raise the rates of all flows together; as a link fills up, fix the flows on it; go on with the others.
No flow can then be given more without taking from one that has no more than it. A set of flows that share no link,
directly or through others, with the flows that came or went keeps its rates: only what is touched is solved again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

_SAME_TIME = 1e-12  # events this close, relative to the time, are one: rounding must not take simultaneous ones apart


class Flow:
    """Bytes on their way; a subclass says in `arrived` what their arrival means. An empty route takes no time."""

    __slots__ = ("end", "left", "peak", "rate", "route", "since")

    route: tuple[int, ...]  # links
    left: float  # bytes, as of `since`
    peak: float  # the bandwidth of the slowest link: the rate of a flow that is alone
    rate: float  # below 0 until it has begun to flow
    since: float
    end: float  # when it will begin, then when it will end at the rate that it has now

    def arrived(self) -> None:
        raise NotImplementedError


class Alarm(Flow):
    """A function is called."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def arrived(self) -> None:
        self.function()


class Network:
    """The links, the flows on them, and the virtual clock: `advance` goes to the next time at which anything happens."""

    def __init__(self, bandwidth: list[float]) -> None:
        self.bandwidth = list(bandwidth)
        self.now = 0.0
        self.flows_on: list[dict[Flow, None]] = [{} for _ in bandwidth]  # dictionaries, for their fixed order
        self._changed = False  # whether a link may be slower, or faster, than a flow's `peak` says
        self._times: list[float] = []  # a heap of the keys of _at
        self._at: dict[float, list[Flow]] = {}  # what begins or ends at a time; one whose `end` has changed is stale

    def add_link(self, bandwidth: float) -> int:
        """A link more; its number."""
        self.bandwidth.append(bandwidth)
        self.flows_on.append({})
        return len(self.bandwidth) - 1

    def change(self, link: int, bandwidth: float) -> None:
        """From now on a link carries so much; with 0, what flows on it stands still until it is more again."""
        self.bandwidth[link], self._changed = bandwidth, True
        self._solve(self._connected([link]))

    def send(self, flow: Flow, route: tuple[int, ...], latency: float, nbytes: float, peak: float) -> None:
        """Let `nbytes` flow over a route after its latency; without links, or without bytes, they are there by then."""
        flow.route = route if nbytes else ()
        flow.left, flow.peak, flow.rate = nbytes, peak, -1.0
        flow.end = time = self.now + latency
        if time in self._at:
            self._at[time].append(flow)
        else:
            self._schedule(flow, time)

    def flows(self) -> list[Flow]:
        """All that are to arrive: on their way, before their latency is over, or standing still."""
        return [flow for flows in (*self._at.values(), *self.flows_on) for flow in flows]

    def cancel(self, flow: Flow) -> None:
        """It never arrives, and leaves its links to the others."""
        flow.end = -1.0
        self._solve(self._connected([link for link, on in enumerate(self.flows_on) if on.pop(flow, flow) is None]))

    def call_at(self, time: float, function: Callable[[], None]) -> None:
        """An alarm clock."""
        self.send(Alarm(function), (), time - self.now, 0, 0.0)

    def _schedule(self, flow: Flow, time: float) -> None:
        flow.end = time
        try:
            self._at[time].append(flow)  # most are of a time that others have too
        except KeyError:
            self._at[time] = [flow]
            heappush(self._times, time)

    def advance(self) -> bool:
        """Go to the next time at which flows begin or end, and let everything of that time happen; False if none is left."""
        due = self._next()
        if not due:
            return False
        beginning = [flow for flow in due if flow.rate < 0 and flow.route]
        ended = due if not beginning else [flow for flow in due if flow.rate >= 0 or not flow.route]
        self._change(beginning, ended)
        for flow in ended:
            flow.arrived()
        return True

    def _next(self) -> list[Flow]:
        """The flows that begin or end at the next time at which any does, to which the clock goes."""
        due: list[Flow] = []
        times = self._times
        while times and (not due or times[0] <= self.now * (1 + _SAME_TIME)):
            time, first = heappop(times), not due
            for flow in self._at.pop(time):
                if flow.end == time:
                    flow.end = -1.0  # if it had moved away from this time and back, it is here twice
                    due.append(flow)
            if first and due:
                self.now = time
        return due

    def _change(self, beginning: list[Flow], ended: list[Flow]) -> None:
        """Take flows off their links, put others on, and find the rates of those that this concerns."""
        flows_on, touched = self.flows_on, set()
        for flow in ended:
            for link in flow.route:
                on = flows_on[link]
                del on[flow]
                if on:
                    touched.add(link)
        for flow in beginning:
            alone = not self._changed
            for link in flow.route:
                on = flows_on[link]
                if on or not alone:
                    touched.add(link)
                    alone = False
                on[flow] = None
            if alone:  # no system of equations for that; and should another join it later, both are solved again
                flow.rate, flow.since = flow.peak, self.now
                self._schedule(flow, self.now + flow.left / flow.peak)
        if touched:
            self._solve(self._connected(touched))

    def _connected(self, links: Iterable[int]) -> dict[Flow, None]:
        """All flows that share a link with a flow that shares a link with ... one of these links."""
        found: dict[Flow, None] = {}
        seen, frontier = set(), sorted(links)
        while frontier:
            link = frontier.pop()
            if link in seen:
                continue
            seen.add(link)
            for flow in self.flows_on[link]:
                if flow not in found:
                    found[flow] = None
                    frontier += flow.route
        return found

    def _solve(self, flows: dict[Flow, None]) -> None:
        """Give each flow its max-min fair rate, and move its end to where that takes it."""
        now = self.now
        for flow, rate in max_min(flows, self.bandwidth).items():
            if rate != flow.rate:
                if flow.rate > 0:
                    flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.rate, flow.since, flow.end = rate, now, math.inf
                if rate:
                    self._schedule(flow, now + flow.left / rate)


def max_min(flows: Iterable[Flow], bandwidth: list[float]) -> dict[Flow, float]:
    """The max-min fair rate of each flow, by progressive filling.

    In each round the links on which the fair share is smallest are full: their flows get that share, everywhere.
    """
    waiting: dict[int, dict[Flow, None]] = {}  # link -> its flows without a rate yet
    for flow in flows:
        for link in flow.route:
            waiting.setdefault(link, {})[flow] = None
    room = {link: bandwidth[link] for link in waiting}
    rates: dict[Flow, float] = {}
    while waiting:
        shares = {link: room[link] / len(on) for link, on in waiting.items()}
        least = min(shares.values())
        full = [link for link, share in shares.items() if share <= least * (1 + 1e-12)]
        for link in full:
            for flow in list(waiting.get(link, ())):
                rates[flow] = least
                for passed in flow.route:
                    on = waiting[passed]
                    del on[flow]
                    room[passed] -= least
                    if not on:
                        del waiting[passed]
    return rates
