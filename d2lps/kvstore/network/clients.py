"""A server's line to all workers: what they ask for, the answers to it, and the values that they may still read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush

import zmq

from d2lps.kvstore.core.events import Reply, Request
from d2lps.kvstore.core.exactly_once import Life
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.sockets import guard, listen
from d2lps.kvstore.network.wire import CARD, UNREADABLE, Wire
from d2lps.kvstore.storage.frame import FrameError

BATCH = 64  # messages, at most, that are taken in at once


class Clients:
    """All that have connected to one server's socket."""

    def __init__(self, plan: Deployment, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.authenticator = guard(context, plan.keys)
        self.socket = listen(context, endpoint, plan.largest, plan.keys)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.wire = Wire(plan.limit, plan.near)
        self.near: dict[Life, bool] = {}  # whether a worker can read this process
        self.lent: defaultdict[Life, list[tuple[int, int, Reply]]] = defaultdict(list)  # by sequence: what it may still read
        self.wrong = 0  # messages, or parts of them, that were no requests

    def asked(self) -> Iterator[Request]:
        """What is there, of a batch at most."""
        for name, parts in received(self.socket):
            try:
                yield from self._opened(parts)
            except FrameError:
                self.wrong += 1
            except ProcessLookupError:  # nobody waits for an answer any more
                continue
            except OSError:
                self.socket.send_multipart([name, UNREADABLE])

    def _opened(self, parts: list[memoryview]) -> Iterator[Request]:
        for request, far in self.wire.unpack(parts):
            if not isinstance(request, Request):
                self.wrong += 1
                continue
            if far is not None and request.value is not None:
                far.read(request.value)
            life = request.client, request.epoch
            self.near[life], lent = CARD.unpack_from(parts[0])[-1] == os.getpid(), self.lent[life]
            while lent and lent[0][0] < request.acknowledged:  # it has read these
                heappop(lent)
            yield request

    def answer(self, replies: Iterable[Reply]) -> None:
        """By name; an answer to somebody who is not there is dropped, and will be asked for again."""
        by_life: defaultdict[Life, list[Reply]] = defaultdict(list)
        for reply in replies:
            life = reply.client, reply.epoch
            by_life[life].append(reply)
            if reply.value is not None:
                heappush(self.lent[life], (reply.sequence, id(reply), reply))
        for (client, epoch), theirs in by_life.items():
            for message in self.wire.packed(theirs, self.near.get((client, epoch), False)):
                self.socket.send_multipart([f"{client}.{epoch}".encode(), *message], copy=False)

    def forget(self, worker: int) -> None:
        """It is no more, and reads nothing."""
        for life in [life for life in self.lent if life[0] == worker]:
            del self.lent[life]

    def reached(self, lives: Sequence[Life]) -> int:
        """How many of them are connected, as the socket knows: a message without content, which they ignore, to each."""
        reached = 0
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        for worker, epoch in lives:
            with suppress(zmq.ZMQError):  # it is not
                self.socket.send_multipart([f"{worker}.{epoch}".encode(), b""], zmq.NOBLOCK)
                reached += 1
        self.socket.set(zmq.ROUTER_MANDATORY, 0)
        return reached

    def close(self) -> None:
        if self.authenticator is not None:
            self.authenticator.stop()
        self.socket.close(linger=1000)  # milliseconds: a last word may still be under way


def received(socket: zmq.Socket[bytes]) -> Iterator[tuple[bytes, list[memoryview]]]:
    """The messages that are there, of a batch at most: who has sent each, and its parts, where the socket has put them."""
    for _ in range(BATCH):
        try:
            name, *parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield name.bytes, [part.buffer for part in parts]
