"""Servers come and go while workers are at work: at the end of an iteration, the same for all.

The coordinator says over and over that it wants other servers. A worker need not be asking for anything just then: it may be
computing, or wait for another worker. So the thread that carries its requests answers for it: "it will go no further than to
clock 7 before it knows more" (hold). When the first server has heard this of all workers, it answers with the latest of these
clocks, and there all of them stop, at the same line of the same program, so that none of them waits for one that has stopped.
Then each has the answers to all that it has asked, and waits for other servers (settle): nothing is open, anywhere.

It may be that a worker comes to a barrier before it comes to that clock, and waits there for others that have stopped. Then the
change is called off: they go on, and the coordinator begins another in its stead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from d2lps.kvstore.core.events import Membership, Refused, Request
from d2lps.kvstore.core.placement import Placement


@dataclass
class Change:
    """Other servers, wanted. promise: the clock beyond which the worker won't go before `answer`, which says where to stop."""

    wanted: Membership
    promise: int
    answer: Any


class Changes:
    """Where two threads of a worker meet: its own, and the one that carries its requests.

    >>> changes = Changes()
    >>> changes.at(6)                                                   # its own: clock 6 is reached, nothing is wanted
    >>> changes.heard(Membership(1, (0, 1, 2)), answer=None).clock  # the other: it will go no further than to 7
    7
    """

    def __init__(self) -> None:
        self.lock, self.clock, self.view = threading.Lock(), 0, 0
        self.open = deque[Change]()  # several, if this worker is none of those who are asked
        self.missed = deque[Membership]()  # what came while another was open: if this worker leaves, it won't be told again
        self.followed = deque[Membership]()  # what the other thread has not seen to yet

    def heard(self, wanted: Membership, answer: Any) -> Request | None:
        """What the first server is to be told, if this is new; one change after the other, but for one who takes no part."""
        with self.lock:
            self._drop(wanted.instead)
            busy = self.open and (self.open[-1].answer.reply is None or not self.open[-1].answer.reply.error)
            if wanted.view <= self.view:
                return None
            if busy:
                if wanted not in self.missed:
                    self.missed.append(wanted)
                return None
            self.view, promise = wanted.view, self.clock + 1
            self.open.append(Change(wanted, promise, answer))
        return Request("hold", clock=promise)

    def reached(self, clock: int, asked: Iterable[Any], placement: Placement, request: Callable[[int, Request], Any]) -> None:
        """Where all workers stop: wait for what was `asked` before, and until other servers are in force. Raises Refused."""
        if (wanted := self.at(clock)) is None:
            return
        for answer in asked:
            answer.wait()
        settling = {server: request(server, Request("settle", clock=clock)) for server in placement.servers}
        replies = [answer.wait() for server, answer in settling.items() if server in wanted.servers]
        if error := next((reply.error for reply in replies if reply.error), ""):
            raise Refused(f"a change of servers: {error}")
        if any(reply.view < wanted.view for reply in replies):  # it was called off
            with self.lock:
                self._drop(wanted.view)
        else:
            self._follow(placement, self.open[0].wanted)  # maybe the one in the stead of `wanted`

    def at(self, clock: int) -> Membership | None:
        """What is wanted, if it is at this clock that all stop for it."""
        with self.lock:
            self.clock, change = clock, self.open[0] if self.open else None
        if change is None or clock < change.promise:
            return None
        if error := (reply := change.answer.wait()).error:
            raise Refused(f"a change of servers: {error}")
        return change.wanted if clock >= reply.clock else None

    def catch_up(self, placement: Placement) -> None:
        """With what has changed while this worker took no part: one after the other, as where a key lies depends on it."""
        while heard := self._heard():
            self._follow(placement, min(heard, key=lambda wanted: wanted.view))

    def _heard(self) -> list[Membership]:
        """What has been wanted, and not been followed."""
        with self.lock:
            return [*(change.wanted for change in self.open), *self.missed]

    def _drop(self, view: int) -> None:
        self.open = deque(change for change in self.open if change.wanted.view != view)
        self.missed = deque(wanted for wanted in self.missed if wanted.view != view)

    def _follow(self, placement: Placement, wanted: Membership) -> None:
        placement.follow(wanted.servers)
        with self.lock:  # at once: who hears of the next change has seen to this one
            self.view = max(self.view, wanted.view)
            self.open = deque(change for change in self.open if change.wanted.view > wanted.view)
            self.missed = deque(missed for missed in self.missed if missed.view > wanted.view)
            self.followed.append(wanted)
