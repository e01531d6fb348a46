"""A server process: hear requests, let the state machine step, write the log, answer.

It takes in what has come, up to a batch, steps once for each request, brings the log to safety once for all of them, and
answers then. What is no request is counted, and changes nothing. Who serves, and who is lost, only the coordinator can say.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from d2lps.comm import Communicator, RankHung
from d2lps.kvstore.core.events import Append, Event, Lost, Membership, Reply, Send
from d2lps.kvstore.core.recorder import ServerNotes
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.network.clients import Clients, received
from d2lps.kvstore.network.deployment import REGISTERS, Deployment
from d2lps.kvstore.network.heartbeat import Pulse
from d2lps.kvstore.network.monitor import Meter
from d2lps.kvstore.network.replica import Backup, Deposed
from d2lps.kvstore.network.sockets import connect, listen, readable
from d2lps.kvstore.storage.durable import Durable, load_state, renew, save_state
from d2lps.kvstore.storage.frame import frame, parse
from d2lps.kvstore.storage.log import LogDamaged, lock
from d2lps.kvstore.storage.tiers import Tiers
from d2lps.sharedmemory.linux import keep_freed_memory
from d2lps.trace import Recorder


def serve(comm: Communicator, plan: Deployment, node: int, endpoint: str, first: bool) -> ServerReport | None:
    """The life of a node, perhaps its first; None from one that lost its place to its backup."""
    with serving(plan, node, endpoint, first, comm.recorder) as server:
        try:
            return server.serve()
        except Deposed as reason:
            server.tell(b"deposed", str(reason).encode())
            return None


@contextmanager
def serving(
    plan: Deployment, node: int, endpoint: str, first: bool = True, recorder: Recorder | None = None
) -> Iterator[Serving]:
    """A node that listens, as long as the context lasts."""
    keep_freed_memory()
    for table, registered in zip(REGISTERS, plan.registered, strict=True):
        table.update(registered)
    server = Serving(plan, node, endpoint, first, recorder)
    try:
        yield server
    finally:
        server.close()


class Serving:
    """One node's sockets around its Server."""

    def __init__(self, plan: Deployment, node: int, endpoint: str, first: bool, recorder: Recorder | None) -> None:
        self.plan, self.report = plan, ServerReport(node)
        self.serves = node < plan.servers or not plan.replicated  # a backup answers nobody but its primary
        on_disk = plan.durability in ("log", "fsync")
        if on_disk and first and node >= plan.servers:  # what one of an earlier run has left is old
            shutil.rmtree(plan.disk(node), ignore_errors=True)
        self.lock = lock(plan.disk(node)) if on_disk else -1  # until the process ends
        store = Tiers(plan.pages(node), plan.memory_budget) if plan.memory_budget else None
        self.server = Server(plan.members if node < plan.servers or plan.replicated else (), **plan.rules, store=store)
        self.server.replicate = plan.replicated and self.serves
        self.meter = Meter(self.report, self.server)
        self.step = ServerNotes(self.server, recorder, plan.workers + plan.server(node)).step if recorder else self.server.step
        if plan.replicated and (handed := load_state(self._handed(node))) is not None:
            self.server.restore(handed)
        self.durable: Durable | None = None
        goes_on = on_disk and bool(plan.earlier) and first and node < plan.servers
        if on_disk and (goes_on or not first) and not any(plan.disk(node).glob("log-*")):
            raise LogDamaged(f"{plan.disk(node)}: its log is gone: acknowledged requests are lost")
        if goes_on:
            members = plan.earlier["members"] if node < plan.earlier.get("first", node + 1) else ()
            earlier = Server(members, **plan.earlier["rules"], store=store)
            promised = plan.earlier.get("numbers", {}).get(str(node), 0)
            written = plan.disk(node), plan.durability, plan.limit, plan.log_bytes
            self.durable = renew(self.server, earlier, *written, promised)
        elif on_disk:
            self.durable = Durable(self.server, plan.disk(node), plan.durability, plan.limit, plan.log_bytes)
        cut = self.durable.cut if self.durable is not None else 0
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.workers = Clients(plan, self.context, endpoint)
        self.control = connect(self.context, plan.coordinator, str(node).encode(), plan.largest, None) if plan.room else None
        self.copies = listen(self.context, f"ipc://{plan.room}/b{node}", plan.largest, None) if plan.replicated else None
        self.backup = self._backup(node + plan.servers) if self.server.replicate else None
        self.over = False
        self.pulse = Pulse(self.context, plan.coordinator, node) if plan.replicated else None
        self.endpoint = self.workers.endpoint
        self.tell(b"ready", self.endpoint.encode(), str(cut).encode())

    def _handed(self, node: int) -> Path:
        """Where a new backup finds what its primary had when it came."""
        return self.plan.disk(node) / "handed"

    def _backup(self, node: int) -> Backup:
        return Backup(self.context, f"ipc://{self.plan.room}/b{node}", self.plan.largest)

    def close(self) -> None:
        if self.pulse is not None:
            self.pulse.stop()
        if self.durable is not None:
            self.durable.close()
        self.workers.close()
        if self.control is not None:
            self.control.close(linger=1000)  # milliseconds: a last word may still be under way
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
        sockets = [socket for socket in (self.control, self.workers.socket, self.copies) if socket is not None]
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
        """Is anybody there?"""
        lives = [(worker, self.server.clients[worker].epoch) for worker in self.server.clocks.at]
        if not self.workers.reached(lives):
            silent = f"server {self.report.node}: nothing has come for {patience:g} s"
            raise RankHung(f"{silent}, and workers {[worker for worker, _ in lives]} are out of reach")

    def _answer_all(self) -> None:
        """One batch."""
        replies: list[Reply] = []
        for request in self.workers.asked():
            if self.serves:
                self.report.received += 0 if request.value is None else request.value.nbytes
                self.report.requests[request.op] += 1
                self.meter.arrived(request.retry_key)
                replies += self._step(request)
        if self.workers.wrong:
            self.report.requests["not a request"] = self.workers.wrong
        self._commit(replies)

    def _step(self, event: Event) -> list[Reply]:
        """Let something happen; the answers, which must wait for `_commit`."""
        replies = []
        for effect in self.step(event):
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
        """To the workers."""
        for reply in replies:
            self.report.sent += 0 if reply.value is None else reply.value.nbytes
            self.meter.answered((reply.client, reply.epoch, reply.sequence))
        self.workers.answer(replies)

    # ---- the coordinator, and the primary ---------------------------------------------------------------------------------

    def _orders(self) -> None:
        while self.control is not None and readable(self.control):
            word, *parts = self.control.recv_multipart()
            if word in (b"measure", b"finish"):
                self.tell(b"measured", msgspec.json.encode(self.meter.counts()))
                if word == b"finish":
                    self.tell(b"over")
                    self.over = True
            elif word == b"alone" and self.backup is not None:
                self.server.replicate, backup, self.backup = False, self.backup, None
                self._send(backup.released())
            elif word == b"handover":
                self._hand_over(int(parts[0]))
            elif word == b"event":
                self._told(parse(parts, self.plan.limit))

    def _hand_over(self, spare: int) -> None:
        """A new backup is to begin with all that there is now; if that cannot be written, there will be none."""
        try:
            save_state(self._handed(spare), self.server.number, self.server.state())
        except OSError as error:
            shutil.rmtree(self._handed(spare), ignore_errors=True)  # what was written takes up the room that others need
            self.tell(b"unhanded", str(error).encode())
        else:
            self.server.replicate, self.backup = True, self._backup(spare)
            self.tell(b"handed", str(spare).encode())

    def _told(self, event: Event | Reply) -> None:
        if isinstance(event, Lost):
            self.meter.forget(event.worker)
            self.workers.forget(event.worker)
            self._commit(self._step(event))
        elif isinstance(event, Membership):
            self._commit(self._step(event))
            if event.wanted:
                return
            self.serves = True
            self.tell(b"serves", str(event.view).encode())

    def _follow(self) -> None:
        """A backup: do what the primary did, in its order, and say so."""
        if self.copies is None:
            return
        for name, parts in received(self.copies):
            send = parse(parts, self.plan.limit)
            for reply in self._step(send) if isinstance(send, Send) else []:
                self.copies.send_multipart([name, *frame(reply)])

