"""A server process: hear requests, let the state machine step, write the log, answer.

It takes in what has come, up to a batch, steps once for each request, brings the log to safety once for all of them, and
answers then: the more there is to do, the cheaper each becomes. Whatever is no request is counted, and changes nothing.
Only the coordinator, over a socket of its own, can say that a worker was lost, or who is primary.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import zmq

from d2lps.comm import Communicator, RankHung
from d2lps.kvstore.core.compression import CODECS
from d2lps.kvstore.core.events import Append, Event, Lost, Membership, Reply, Request, Send, replace
from d2lps.kvstore.core.optimizers import OPTIMIZERS
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.memory import keep_freed_memory
from d2lps.kvstore.network.pulse import Pulse
from d2lps.kvstore.network.replica import Backup, Deposed
from d2lps.kvstore.network.sockets import NOWHERE, Wire, connect, guard, listen, readable, shared_memory
from d2lps.kvstore.storage.durable import Durable, load_state, renew, save_state
from d2lps.kvstore.storage.frame import FrameError, frame, parse
from d2lps.kvstore.storage.log import lock
from d2lps.kvstore.storage.tiers import Tiers

EDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)  # seconds; the last bucket has what took longer
BATCH = 64  # requests, at most, between two syncs of the log


@dataclass
class Latencies:
    """How long requests were at the server, from the socket to the answer, the wait for other workers included.

    >>> latencies = Latencies()
    >>> for seconds in (0.00005, 0.002, 0.002, 40.0):
    ...     latencies.add(seconds)
    >>> latencies.counts[0], latencies.counts[3], latencies.counts[-1], latencies.median
    (1, 2, 1, 0.003)
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))  # by bucket: up to EDGES[i], and beyond
    total: float = 0.0  # seconds

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(EDGES, seconds)] += 1
        self.total += seconds

    @property
    def median(self) -> float:
        """The upper edge of the bucket in which the median lies, 0 if there is none."""
        half = sum(self.counts) / 2
        reached = [edge for edge, so_far in zip((*EDGES, float("inf")), accumulate(self.counts), strict=True) if so_far >= half]
        return reached[0] if half else 0.0


class Meter:
    """A server's own counters, beside its report: how long each request took, and how many wait."""

    def __init__(self) -> None:
        self.latencies = Latencies()
        self._since: dict[tuple[int, int, int], float] = {}  # by the request's retry_key

    def arrived(self, request: tuple[int, int, int]) -> None:
        self._since.setdefault(request, time.monotonic())

    def answered(self, request: tuple[int, int, int]) -> None:
        since = self._since.pop(request, None)
        if since is not None:  # else it was answered before
            self.latencies.add(time.monotonic() - since)

    def forget(self, client: int) -> None:
        """It waits for nothing any more."""
        self._since = {request: since for request, since in self._since.items() if request[0] != client}

    def said(self, report: ServerReport, staleness: Counter[int]) -> bytes:
        """For the coordinator."""
        counters: dict[str, Any] = {"received": report.received, "sent": report.sent, "requests": report.requests}
        counters |= {"staleness": staleness, "waiting": len(self._since)}
        return json.dumps(counters | {"latencies": self.latencies.counts, "seconds": self.latencies.total}).encode()


def serve(comm: Communicator, plan: Deployment, node: int, endpoint: str, first: bool) -> ServerReport | None:
    """The life of a node, perhaps its first; None from one that lost its place to its backup."""
    with serving(plan, node, endpoint, first) as server:
        try:
            return server.serve()
        except Deposed as reason:
            server.tell(b"deposed", str(reason).encode())
            return None


@contextmanager
def serving(plan: Deployment, node: int, endpoint: str, first: bool = True) -> Iterator[Serving]:
    """A node that listens, as long as the context lasts."""
    keep_freed_memory()
    OPTIMIZERS.update(plan.optimizers)
    CODECS.update(plan.codecs)
    server = Serving(plan, node, endpoint, first)
    try:
        yield server
    finally:
        server.close()


class Serving:
    """One node's sockets around its Server."""

    def __init__(self, plan: Deployment, node: int, endpoint: str, first: bool) -> None:
        self.plan, self.report, self.meter = plan, ServerReport(node), Meter()
        self.serves = node < plan.servers  # a backup answers nobody but its primary
        on_disk = plan.durability in ("log", "fsync")
        self.lock = lock(plan.disk(node)) if on_disk else -1  # until the process ends
        store = Tiers(plan.pages(node), plan.memory_budget) if plan.memory_budget else None
        self.server = Server(plan.members, **plan.rules, store=store)
        self.server.replicate = plan.replicated and self.serves
        if plan.replicated:
            load_state(self.server, self._handed(node))
        if on_disk and plan.earlier and first:
            earlier = Server(plan.earlier["members"], **plan.earlier["rules"], store=store)
            promised = plan.earlier.get("numbers", {}).get(str(node), 0)
            renew(self.server, earlier, plan.disk(node), plan.durability, plan.limit, promised)
        self.durable = Durable(self.server, plan.disk(node), plan.durability, plan.limit, plan.log_bytes) if on_disk else None
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.doorkeeper = guard(self.context, plan.keys)
        self.requests = listen(self.context, endpoint, plan.largest, plan.keys)
        self.endpoint = self.requests.getsockopt_string(zmq.LAST_ENDPOINT)
        self.control = connect(self.context, plan.coordinator, str(node).encode(), plan.largest, None) if plan.room else None
        self.copies = listen(self.context, f"ipc://{plan.room}/b{node}", plan.largest, None) if plan.replicated else None
        self.backup = self._backup(node + plan.servers) if self.server.replicate else None
        self.wire = Wire(plan.limit, shared_memory(plan.memory, plan.workers))
        self.over = False
        self.pulse = Pulse(self.context, plan.coordinator, node) if plan.replicated else None
        self.tell(b"ready", self.endpoint.encode())

    def _handed(self, node: int) -> Path:
        """Where a new backup finds what its primary had when it came."""
        return self.plan.disk(node) / "handed"

    def _backup(self, node: int) -> Backup:
        return Backup(self.context, f"ipc://{self.plan.room}/b{node}", self.plan.largest)

    def close(self) -> None:
        for helper in (self.pulse, self.doorkeeper):
            if helper is not None:
                helper.stop()
        if self.durable is not None:
            self.durable.close()
        for socket in (self.control, self.requests):
            if socket is not None:
                socket.close(linger=1000)  # milliseconds: a last word may still be under way
        self.context.destroy(linger=0)
        if isinstance(self.server.store, Tiers):
            self.server.store.close()

    def tell(self, *words: bytes) -> None:
        """To the coordinator, if there is one."""
        if self.control is not None:
            self.control.send_multipart(words)

    def serve(self, patience: float | None = None) -> ServerReport:
        """Until the coordinator says that all is over; without one, until the last worker has left.

        RankHung when nothing has come for `patience` seconds, and no worker can be reached: a cable may be cut.
        """
        sockets = [socket for socket in (self.control, self.requests, self.copies) if socket is not None]
        while not self.over:
            heard = [*sockets, self.backup.socket] if self.backup is not None else sockets
            if not zmq.select(heard, [], [], patience)[0]:
                self._look_for_workers(patience)
            self._orders()
            if self.backup is not None:
                self._send(self.backup.confirmed())
            self._answer_all()
            self._follow()
            self.over |= self.control is None and not self.server.clocks.at
        return self.report.closed(self.server)

    # ---- workers ----------------------------------------------------------------------------------------------------------

    def _look_for_workers(self, patience: float | None) -> None:
        """A message without content, which they ignore, to everybody: the socket knows who is connected."""
        reached, members = 0, list(self.server.clocks.at)
        self.requests.set(zmq.ROUTER_MANDATORY, 1)
        for worker in members:
            with suppress(zmq.ZMQError):  # it is not
                self.requests.send_multipart([f"{worker}.{self.server.filter.clients[worker].epoch}".encode(), b""], zmq.NOBLOCK)
                reached += 1
        self.requests.set(zmq.ROUTER_MANDATORY, 0)
        if not reached:
            silent = f"server {self.report.node}: nothing has come for {patience:g} s"
            raise RankHung(f"{silent}, and workers {members} are out of reach")

    def _answer_all(self) -> None:
        """One batch."""
        replies: list[Reply] = []
        for event in self._arrived(self.requests):
            if isinstance(event, Request) and self.serves:
                self.report.received += 0 if event.value is None else event.value.nbytes
                self.report.requests[event.op] += 1
                self.meter.arrived(event.retry_key)
                replies += self._step(self._owned(event))
            elif self.serves:
                self.report.requests["not a request"] += 1
        self._commit(replies)

    def _arrived(self, socket: zmq.Socket[bytes]) -> list[Event | Reply]:
        """What is there, of a batch at most; tensors lie where the socket has put them."""
        found: list[Event | Reply] = []
        for _ in range(BATCH):
            try:
                _, *parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                found.append(self.wire.unpack([part.buffer for part in parts]))
            except zmq.Again:
                break
            except FrameError:
                self.report.requests["not a request"] += 1
        return found

    def _owned(self, request: Request) -> Request:
        """The server's own copy of a tensor that it will keep beyond its answer: one that waits for its round to end."""
        keeps = self.server.consistency.rounds and self.wire.where(request.value) != NOWHERE
        return replace(request, value=request.value.clone()) if keeps and request.value is not None else request

    def _step(self, event: Event) -> list[Reply]:
        """Let something happen; the answers, which must wait for `_commit`."""
        replies = []
        for effect in self.server.step(event):
            if isinstance(effect, Reply):
                replies.append(effect)
            elif isinstance(effect, Send) and self.backup is not None:
                self.backup.send(effect)
            elif isinstance(effect, Append) and self.durable is not None:
                self.durable.append(effect.event)
        return replies

    def _commit(self, replies: list[Reply]) -> None:
        """First safety, then answers."""
        if self.durable is not None:
            self.durable.sync()
        self._send(self.backup.hold(replies) if self.backup is not None else replies)

    def _send(self, replies: list[Reply]) -> None:
        """To workers by name; an answer to somebody who is not there is dropped, and will be asked for again."""
        for reply in replies:
            self.report.sent += 0 if reply.value is None else reply.value.nbytes
            self.meter.answered((reply.client, reply.epoch, reply.sequence))
            name = f"{reply.client}.{reply.epoch}".encode()
            self.requests.send_multipart([name, *self.wire.pack(reply)], copy=False)

    # ---- the coordinator, and the primary ---------------------------------------------------------------------------------

    def _orders(self) -> None:
        while self.control is not None and readable(self.control):
            word, *parts = self.control.recv_multipart()
            if word in (b"measure", b"finish"):
                self.tell(b"measured", self.meter.said(self.report, self.server.seen))
                if word == b"finish":
                    self.tell(b"over")
                    self.over = True
            elif word == b"alone" and self.backup is not None:
                self.server.replicate, backup, self.backup = False, self.backup, None
                self._send(backup.released())
            elif word == b"handover":
                save_state(self.server, self._handed(int(parts[0])), self.server.number)
                self.server.replicate, self.backup = True, self._backup(int(parts[0]))
                self.tell(b"handed", parts[0])
            elif word == b"event":
                self._told(parse(parts, self.plan.limit))

    def _told(self, event: Event | Reply) -> None:
        if isinstance(event, Lost):
            self.meter.forget(event.worker)
            self._commit(self._step(event))
        elif isinstance(event, Membership):  # of workers we know better: some have left, which nobody else can date
            alive = {worker: self.server.filter.clients[worker].epoch for worker in self.server.clocks.at}
            self._commit(self._step(replace(event, workers=alive)))
            self.serves = True
            self.tell(b"serves", str(event.view).encode())

    def _follow(self) -> None:
        """A backup: do what the primary did, in its order, and say so."""
        if self.copies is None:
            return
        for send in self._arrived(self.copies):
            replies = self._step(send) if isinstance(send, Send) else []
            for reply in replies:
                self.copies.send_multipart([b"primary", *frame(reply)])
