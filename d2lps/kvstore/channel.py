"""One worker's line to one server: what is sent when, and sent again until it is answered."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from d2lps.kvstore.deployment import Deployment
from d2lps.kvstore.duplicates import Session
from d2lps.kvstore.events import Reply, Request
from d2lps.kvstore.frame import FrameError
from d2lps.kvstore.slots import Slots
from d2lps.kvstore.sockets import connect, readable, writable
from d2lps.kvstore.wire import BIG, NOWHERE, Wire
from d2lps.sharedmemory.arena import Arena

RETRY, RETRY_MOST = 1.0, 16.0  # seconds of silence after which all is sent again: at first, and at most (it doubles)
SOON = 0.01  # seconds: the server knows less than we do, for a moment
MOST_LENT = 4  # slots in use for one server: few, so that they stay in the processor's cache


class Channel:
    """Requests wait here, by iteration and priority, until the socket takes them; only then do they get their numbers.

    What was sent and not answered is sent again, under its old number: at once when a connection was lost and is there
    again (a server that was restarted), else after RETRY seconds without a word. Used by one thread alone.
    """

    def __init__(
        self, plan: Deployment, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, rank: int, arena: Arena | None
    ) -> None:
        self.plan, self.context = plan, context
        self.wire = Wire(plan.limit, plan.checked, arena)
        self.slots = Slots(arena) if arena is not None else None
        self.session = Session(rank)
        self.queue: list[tuple[tuple[int, int, int], int, Request, Any]] = []  # a heap of what has no number yet
        self.again: deque[Request] = deque()
        self.counter = itertools.count()
        self.patience, self.due, self.lost = RETRY, math.inf, False
        self.open(endpoint)

    def open(self, endpoint: str) -> None:
        name = f"{self.session.client}.{self.session.epoch}".encode()
        self.socket = connect(self.context, endpoint, name, self.plan.largest, self.plan.keys)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def move(self, endpoint: str, view: int) -> None:
        """Another node serves from now on, under this view."""
        self.socket.disable_monitor()
        self.socket.close(linger=0)
        self.open(endpoint)
        self.session.view = max(self.session.view, view)
        self.repeat()

    def put(self, request: Request, answer: Any) -> None:
        """By iteration, and in it by priority; what ends an iteration comes after all else in it."""
        last = request.op in ("clock", "barrier", "leave")
        order = (request.clock - (request.op == "clock"), int(last), -request.priority)
        heapq.heappush(self.queue, (order, next(self.counter), request, answer))

    # ---- out --------------------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Send as much as the socket takes; whether anything is left."""
        while (self.again or (self.queue and not self._crowded())) and writable(self.socket):
            if self.again:
                request = self.again.popleft()
                if request.sequence not in self.session.open:
                    continue  # answered meanwhile
            else:
                _, _, request, answer = heapq.heappop(self.queue)
                answer.out = request.out
                request = self.session.number(self._shared(request), answer)
            self.socket.send_multipart(self.wire.pack(request), zmq.NOBLOCK, copy=False)
            self.due = min(self.due, time.monotonic() + self.patience)
        return bool(self.again or (self.queue and not self._crowded()))

    def _crowded(self) -> bool:
        """Whether the next request must wait for an answer, and for the slot that it frees."""
        request = self.queue[0][2]
        copied = self._to_copy(request.value) or self._to_copy(request.out)
        return self.slots is not None and copied and len(self.slots.lent) >= MOST_LENT

    def _to_copy(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tensor.nbytes >= BIG and self.wire.where(tensor) == NOWHERE

    def _shared(self, request: Request) -> Request:
        """The request with its big tensors where the server can reach them."""
        if self.slots is None:
            return request
        value, out = request.value, request.out
        if value is not None and self._to_copy(value):
            value = self.slots.copy(value)
        if out is not None and (self._to_copy(out) or self.wire.where(out) == self.wire.where(value) != NOWHERE):
            out = self.slots.like(out)  # never where the value lies: should the server die, that is sent again
        return replace(request, value=value, out=out)

    def repeat(self) -> None:
        """All that has no answer yet is to be sent once more, in its order and before all else."""
        self.again = deque(self.session.unanswered())
        self.due = time.monotonic() + self.patience if self.again else math.inf

    def retry(self) -> None:
        """Called now and then: has the server been silent for too long?"""
        if time.monotonic() >= self.due:
            self.patience = min(2 * self.patience, RETRY_MOST)
            self.repeat()

    # ---- in ---------------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in answers, and news of the connection."""
        while readable(self.socket):
            try:
                reply = self.wire.unpack([part.buffer for part in self.socket.recv_multipart(copy=False)])
            except FrameError:
                continue  # it will be asked for again
            if isinstance(reply, Reply):
                self._answered(reply)
        while readable(self.monitor):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self.lost:
                self.repeat()
            self.lost = event == zmq.EVENT_DISCONNECTED

    def _answered(self, reply: Reply) -> None:
        if reply.error.startswith("stale view"):
            self._stale(reply.view)
            return
        request, _ = self.session.open.get(reply.sequence, (None, None))
        answer = self.session.answered(reply)
        if request is not None and answer is not None:
            answer.arrived(self._fetched(reply, request.out, answer.out))
        self.patience = RETRY
        self.due = time.monotonic() + self.patience if self.session.open else math.inf

    def _fetched(self, reply: Reply, place: torch.Tensor | None, wanted: torch.Tensor | None) -> Reply:
        """The reply, with a value that the server has put into our place where the caller wants it; so the place is free."""
        if place is None or wanted is None or self.wire.where(reply.value) == NOWHERE:
            return reply
        if place is not wanted:
            with torch.inference_mode(wanted.is_inference()):  # the caller's mode, which this thread does not know
                wanted.copy_(place)
        return replace(reply, value=wanted)

    def _stale(self, view: int) -> None:
        """One of us has not heard of a new membership. Nothing was done: ask again, knowing it, or give the server a moment."""
        if view > self.session.view:
            self.session.view = view
            self.repeat()
        elif view < self.session.view:
            self.due = min(self.due, time.monotonic() + SOON)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(linger=0)
