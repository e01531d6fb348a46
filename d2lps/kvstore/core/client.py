"""The client: a pure state machine beside the server's. It decides what goes when, and what goes again until it is answered.

No clock, no sockets, no threads: a driver tells it the time, sends what `next` gives, and hands in what comes back. Requests
get their numbers as they leave, so until then one of higher priority can overtake. A server executes them in the order of
their numbers, each once (see `exactly_once`): so a client may send as often as it likes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from d2lps.kvstore.core.events import Membership, Reply, Request, replace

RETRY, RETRY_MOST = 1.0, 16.0  # seconds of silence after which all is sent again: at first, and at most (it doubles)
SOON = 0.01  # seconds: the server knows less than we do, for a moment


def order(request: Request) -> tuple[int, bool, int]:
    """What goes first: by iteration, and in it by priority; what ends an iteration comes after all else in it."""
    return request.clock - (request.op == "clock"), request.op in ("clock", "barrier", "leave"), -request.priority


class Session:
    """What one life of a worker asks of one server.

    >>> session = Session(client=0, epoch=1)
    >>> session.put(Request("push", "w"), "a"), session.put(Request("push", "v", priority=1), "b")
    (None, None)
    >>> first, second = session.next(), session.next()
    >>> first.key, first.sequence, second.key, second.sequence
    ('v', 1, 'w', 2)
    >>> session.answered(Reply(client=0, epoch=1, sequence=1))
    'b'
    >>> session.repeat(now=5.0)         # the server was away
    >>> again = session.next()
    >>> again.key, again.sequence, again.acknowledged, session.next()
    ('w', 2, 2, None)
    """

    def __init__(self, client: int, epoch: int = 0) -> None:
        self.client, self.epoch, self.view = client, epoch, 0
        self.posted, self.sent, self.acknowledged = 0, 0, 1  # the last number given; the lowest that has no answer
        self.queue: list[tuple[Any, int, Request, Any]] = []  # a heap of what has no number yet
        self.open: dict[int, tuple[Request, Any]] = {}  # by sequence: the request, and who waits for the answer
        self.again: deque[int] = deque()
        self.patience, self.due = RETRY, math.inf

    def put(self, request: Request, waiter: Any = None) -> None:
        """To be sent, in its order; its tensors stay as they are until the answer is there."""
        self.posted += 1
        heapq.heappush(self.queue, (order(request), self.posted, request, waiter))

    def next(self, now: float = 0.0) -> Request | None:
        """What is to be sent now, if anything is."""
        while self.again:
            if (sequence := self.again.popleft()) in self.open:  # else it was answered meanwhile
                self.due = min(self.due, now + self.patience)
                return self._stamped(sequence)
        return self.number(*heapq.heappop(self.queue)[2:], now) if self.queue else None

    def number(self, request: Request, waiter: Any = None, now: float = 0.0) -> Request:
        """The request as it leaves; remembered, with whoever waits for it, until it is answered."""
        self.sent += 1
        self.open[self.sent] = request, waiter
        self.due = min(self.due, now + self.patience)
        return self._stamped(self.sent)

    def _stamped(self, sequence: int) -> Request:
        while self.acknowledged < sequence and self.acknowledged not in self.open:
            self.acknowledged += 1
        mine: dict[str, Any] = {"client": self.client, "epoch": self.epoch, "sequence": sequence, "view": self.view}
        return replace(self.open[sequence][0], acknowledged=self.acknowledged, **mine)

    def answered(self, reply: Reply, now: float = 0.0) -> Any:
        """Who waits for this answer; None for one that came before, or to another life, or that says: ask me once more."""
        if (reply.client, reply.epoch) != (self.client, self.epoch):
            return None
        if reply.error.startswith("stale view"):
            # One of us has not heard of a new membership. Nothing was done: ask again, or give the server a moment to hear.
            if reply.view > self.view:
                self.serve(reply.view, now)
            elif reply.view < self.view:
                self.due = min(self.due, now + SOON)
            return None
        waiter = self.open.pop(reply.sequence, (None, None))[1]
        self.patience = RETRY
        self.due = now + RETRY if self.open else math.inf
        return waiter

    def serve(self, view: int, now: float) -> None:
        """The server is in this view now, and may be another node: what has no answer is asked of it."""
        self.view = max(self.view, view)
        self.repeat(now)

    def repeat(self, now: float) -> None:
        """All that has no answer yet is to be sent once more, in its order and before all else."""
        self.again = deque(self.open)
        self.due = now + self.patience if self.open else math.inf

    def retry(self, now: float) -> None:
        """Called when `due`: has the server been silent for too long?"""
        if now >= self.due:
            self.patience = min(2 * self.patience, RETRY_MOST)
            self.repeat(now)


class Client:
    """One worker's sessions with all servers, and its view of who serves.

    >>> client = Client(rank=0, servers=2)
    >>> client.learn(Membership(view=1, servers=(0, 3)), now=0.0)       # node 3 is server 1 from now on
    {1: 3}
    >>> client.sessions[1].view, client.sessions[0].view
    (1, 0)
    """

    def __init__(self, rank: int, servers: int, epoch: int = 0) -> None:
        self.rank, self.epoch = rank, epoch
        self.sessions = {server: Session(rank, epoch) for server in range(servers)}
        self.nodes, self.view = list(range(servers)), 0

    @property
    def due(self) -> float:
        """When `retry` is to be called next."""
        return min(session.due for session in self.sessions.values())

    def learn(self, news: Membership, now: float) -> dict[int, int]:
        """Take in who serves; {server: its new node} of those that have moved."""
        if news.view <= self.view:
            return {}
        moved = {server: node for server, node in enumerate(news.servers) if node != self.nodes[server]}
        self.view = news.view
        for server, node in moved.items():
            self.nodes[server] = node
            self.sessions[server].serve(news.view, now)
        return moved

    def follow(self, servers: Iterable[int]) -> tuple[set[int], set[int]]:
        """Other servers are in force: those with whom sessions begin, and those with whom they end."""
        before, now = set(self.sessions), set(servers)
        self.sessions = {server: self.sessions.get(server) or Session(self.rank, self.epoch) for server in sorted(now)}
        return now - before, before - now
