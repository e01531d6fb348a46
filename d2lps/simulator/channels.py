"""Messages to a rank that does not know who will speak next: a server's.

`send` and `recv` name each other, and no receive takes from any source. A channel instead is one direction of a connection
between two ranks: what is posted travels at once, one message after the other, and a function is called when it is there.
No task waits for it at the other end; `Mailbox.ends` is where the two ends of a channel find each other.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from d2lps.simulator.mailbox import Mailbox
from d2lps.simulator.network import Alarm
from d2lps.topology import Route


class Channel:
    """First the message that comes first in `order`; one that is under way is not interrupted.

    Those that wait are sent back to back, so a channel that is never idle pays its latency once.
    """

    def __init__(self, mailbox: Mailbox, route: Route) -> None:
        self.mailbox, self.links, self.bandwidth = mailbox, route.links, route.bandwidth
        self.latency = route.latency + mailbox.model.per_message if route.links else 0.0
        self._queue: list[tuple[Any, ...]] = []
        self._posted, self._busy = 0, False

    def post(self, order: Any, nbytes: int, departs: Callable[[], Any], there: Callable[[], Any]) -> None:
        """`departs` is called when the message sets out, `there` when it has arrived."""
        self._posted += 1
        first_byte = self.mailbox.network.now + self.latency
        heappush(self._queue, (order, self._posted, first_byte, nbytes, departs, there))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        """The channel is free."""
        self._busy = bool(self._queue)
        if self._busy:
            *_, first_byte, nbytes, departs, there = heappop(self._queue)
            departs()

            def arrived() -> None:
                self._next()
                there()

            network = self.mailbox.network
            network.send(Alarm(arrived), self.links, max(0.0, first_byte - network.now), nbytes, self.bandwidth)
