"""Workers and servers as ranks of a simulation: what travels between them, and when.

A worker is a task that waits for answers. A server is none: whatever arrives is a step of its state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from d2lps.kvstore.core.client import Client, order
from d2lps.kvstore.core.events import Append, Event, Lost, Reply, Request, replace
from d2lps.kvstore.core.placement import Placement
from d2lps.kvstore.core.recorder import GROUP, NOTHING, StoreRecorder, carried, named
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.transport import Transport
from d2lps.simulator.channels import Channel
from d2lps.simulator.communicator import SimulatedCommunicator


@dataclass(frozen=True)
class Setup:
    """What all ranks of a run agree on."""

    workers: int
    servers: int
    server: dict[str, Any]  # the arguments of Server
    placement: dict[str, Any]  # those of Placement, but for its servers
    absent: Sequence[int] = ()
    events: Sequence[tuple[float, Event]] = ()
    log: bool = False

    def placed(self) -> Placement:
        return Placement(range(self.servers), **self.placement)


class _End:
    """One rank's ends of its lines to others."""

    def __init__(self, comm: SimulatedCommunicator) -> None:
        self.comm, self.network = comm, comm.mailbox.network
        self.channels: dict[int, Channel] = {}
        comm.mailbox.ends[comm.rank] = self

    def post(
        self, dst: int, order: Any, record: Request | Reply, departs: Callable[[], Any], there: Callable[[Any], Any]
    ) -> None:
        """Send what a record carries to another rank; `there` is called with a copy of the tensor, once it has arrived."""
        comm = self.comm
        if dst not in self.channels:
            self.channels[dst] = Channel(comm.mailbox, comm.topology.route(comm.nodes[comm.rank], comm.nodes[dst]))
        value, rows = record.value, getattr(record, "rows", None)
        with torch.inference_mode(False):  # of a worker that evaluates, it may be
            landing = NOTHING if value is None else torch.empty_like(value)
        nbytes = landing.nbytes + (0 if rows is None else rows.nbytes)
        sent, received = self._noted(dst, record, landing)

        def arrived() -> None:
            if value is not None:
                landing.copy_(value)
            sent()
            received()
            there(None if value is None else landing)

        self.channels[dst].post(order, nbytes, departs, arrived)

    def _source(self, record: Request | Reply) -> torch.Tensor:
        """The memory that a message is read from, as the trace has it."""
        return carried(record)

    def _noted(self, dst: int, record: Request | Reply, landing: torch.Tensor) -> tuple[Callable[[], Any], ...]:
        """A message in the trace: a send here, a receive there; call both when it has arrived. Goodbyes are none of the run's."""
        mine, theirs = self.comm.recorder, self.comm.mailbox.ends[dst].comm.recorder
        if mine is None or theirs is None or record.op == "leave":
            return (lambda: None,) * 2
        with named(mine, record):
            sent = mine.message("send", self._source(record), GROUP, dst, 0)
        return sent, theirs.message("recv", landing, GROUP, self.comm.rank, 0)


class SimulatedAnswer:
    """A reply that is under way to a worker."""

    def __init__(self, comm: SimulatedCommunicator) -> None:
        self.comm, self.waits = comm, False
        self.reply: Reply | None = None

    def arrived(self, reply: Reply) -> None:
        self.reply = reply
        if self.waits:
            self.comm.world.scheduler.happened(self.comm.task)

    def is_done(self) -> bool:
        self.comm.catch_up()
        if self.reply is None:
            self.comm.world.scheduler.looked(self.comm.task)
        return self.reply is not None

    def wait(self) -> Reply:
        if self.reply is None:
            self.waits = True
            try:
                self.comm.world.scheduler.block(self.comm.task, "answer")
            finally:  # of another thread, it may be, which is not let in: this worker's own waits for something else
                self.waits = False
        assert self.reply is not None
        return self.reply


class SimulatedTransport(_End, Transport):
    """A worker's end. Servers neither come nor go here."""

    def __init__(self, comm: SimulatedCommunicator, setup: Setup) -> None:
        super().__init__(comm)
        self.setup = setup
        self.client, self.room, self.changes = Client(comm.rank, setup.servers), None, 0

    def request(self, server: int, request: Request, out: torch.Tensor | None = None) -> SimulatedAnswer:
        answer, dst = SimulatedAnswer(self.comm), self.setup.workers + server
        numbered: list[Request] = []

        def departs() -> None:
            numbered.append(self.client.sessions[server].number(request, answer))

        def there(value: torch.Tensor | None) -> None:
            self.comm.mailbox.ends[dst].receive(replace(numbered[0], value=value))

        self.post(dst, order(request), request, departs, there)
        return answer

    def answered(self, server: int, reply: Reply) -> None:
        answer = self.client.sessions[server].answered(reply)
        if answer is not None:
            answer.arrived(reply)


class ServerNode(_End):
    """A server's end: each arrival is a step of the state machine, each reply a message."""

    def __init__(self, comm: SimulatedCommunicator, setup: Setup) -> None:
        super().__init__(comm)
        self.setup = setup
        members = [worker for worker in range(setup.workers) if worker not in setup.absent]
        self.server = Server(members, **setup.server)
        self.notes = StoreRecorder(self.server, comm.recorder) if comm.recorder else None
        self.report = ServerReport(comm.node)
        self.busy_until = 0.0
        self.left: set[int] = set()
        for time, event in setup.events:
            self.network.call_at(time, lambda event=event: self.step(event))  # type: ignore[misc]

    def receive(self, request: Request) -> None:
        """Adding up takes the server's time, if the model says how much."""
        nbytes = 0 if request.value is None else request.value.nbytes
        self.report.received += nbytes
        self.report.requests[request.op] += 1
        cost = self.comm.mailbox.model.per_combined_byte * nbytes
        self.busy_until = max(self.network.now, self.busy_until) + cost
        if self.busy_until > self.network.now:
            self.network.call_at(self.busy_until, lambda: self.step(request))
        else:
            self.step(request)

    def step(self, event: Event) -> None:
        if isinstance(event, Lost):
            self.goodbye(event.worker)
        effects = self.server.step(event)
        if self.notes is not None:
            self.notes.stepped(effects)
        for effect in effects:
            if isinstance(effect, Append) and self.setup.log:
                self.report.log.append((self.network.now, effect.event))
            elif isinstance(effect, Reply):
                self.reply(effect)

    def reply(self, reply: Reply) -> None:
        self.report.sent += 0 if reply.value is None else reply.value.nbytes
        worker, index = self.comm.mailbox.ends[reply.client], self.comm.rank - self.setup.workers

        def there(value: torch.Tensor | None) -> None:
            worker.answered(index, replace(reply, value=value))
            if reply.op == "leave":
                self.goodbye(reply.client)

        self.post(reply.client, -reply.priority, reply, lambda: None, there)

    def _source(self, record: Request | Reply) -> torch.Tensor:
        assert isinstance(record, Reply) and self.notes is not None
        return self.notes.source(record)

    def goodbye(self, worker: int) -> None:
        if worker in self.left:
            return
        self.left.add(worker)
        if len(self.left) == self.setup.workers:
            self.comm.world.scheduler.happened(self.comm.task)

    def serve(self) -> ServerReport:
        """Return when the last worker has left; meanwhile arrivals do the work."""
        self.comm.world.scheduler.block(self.comm.task, "serve")
        return self.report.closed(self.server)
