"""Servers come and go while workers are at work: at the end of an iteration, the same for all.

The coordinator says over and over that it wants other servers. A worker need not be asking for anything just then: it may be
computing, or wait for another worker. So the thread that carries its requests answers for it: "it will go no further than to
clock 7 before it knows more" (hold). When the first server has heard this of all workers, it answers with the latest of these
clocks, and there all of them stop, at the same line of the same program, so that none of them waits for one that has stopped.
Then each has the answers to all that it has asked, and waits for other servers (settle): nothing is open, anywhere.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from d2lps.kvstore.core.events import Membership, Refused, Request


@dataclass
class Change:
    """Other servers, wanted. promise: the clock beyond which the worker won't go before `answer`, which says where to stop."""

    wanted: Membership
    promise: int
    answer: Any


class Changes:
    """Where two threads of a worker meet: its own, and the one that carries its requests.

    >>> changes = Changes()
    >>> changes.at(6)                                                           # its own: clock 6 is reached, and nothing is wanted
    >>> changes.heard(Membership(1, {}, (0, 1, 2)), answer=None).clock          # the other: it is to go no further than to 7
    7
    """

    def __init__(self) -> None:
        self.lock, self.iteration, self.view = threading.Lock(), 0, 0
        self.open = deque[Change]()  # several, if this worker is none of those who are asked
        self.followed = deque[Membership]()  # what the other thread has not seen to yet

    def heard(self, wanted: Membership, answer: Any) -> Request | None:
        """What the first server is to be told, if this is new; one change after the other, but for one who takes no part."""
        busy = self.open and (self.open[-1].answer.reply is None or not self.open[-1].answer.reply.error)
        if wanted.view <= self.view or busy:
            return None
        with self.lock:
            self.view, promise = wanted.view, self.iteration + 1
            self.open.append(Change(wanted, promise, answer))
        return Request("hold", clock=promise)

    def at(self, iteration: int) -> Membership | None:
        """This clock is reached: the servers that are to be waited for here, if it is here that all stop. Raises Refused."""
        with self.lock:
            self.iteration, change = iteration, self.open[0] if self.open else None
        if change is None or iteration < change.promise:
            return None
        if error := (reply := change.answer.wait()).error:
            raise Refused(f"a change of servers: {error}")
        return change.wanted if iteration >= reply.clock else None

    def follow(self) -> Membership:
        """The next change is, or will be, in force."""
        change = self.open.popleft()
        self.followed.append(change.wanted)
        return change.wanted
