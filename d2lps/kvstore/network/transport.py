"""A worker's transport over sockets: a thread that carries what the `Client` wants sent, so pushes travel while it computes."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from d2lps.comm import Communicator, RankHung
from d2lps.comm.status import Status, readers_line
from d2lps.kvstore.core.client import Client, Session
from d2lps.kvstore.core.events import Membership, Reply, Request, replace
from d2lps.kvstore.core.recorder import WorkerNotes
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.sockets import connect, readable, subscribe, writable
from d2lps.kvstore.network.wire import NOBODY, RemoteTensor, Wire, in_one_piece
from d2lps.kvstore.storage.frame import FrameError, frame, parse

_SOON = 0.02  # seconds: a wait that lasts longer leaves a note of where this worker stands


class SocketAnswer:
    """A reply that is under way."""

    def __init__(self, comm: Communicator, what: str, patience: float | None, out: torch.Tensor | None) -> None:
        self.comm, self.what, self.patience, self.there = comm, what, patience, threading.Event()
        self.out = out  # where the caller wants the value
        self.reply: Reply | None = None
        self.left = self.came = 0.0  # when the request did, first, and when the answer
        self.notes: WorkerNotes | None = None
        self.failure: BaseException | None = None

    def arrived(self, reply: Reply) -> None:
        self.came, self.reply = time.monotonic(), reply
        if self.notes is not None:
            self.notes.over.append(self)
        self.there.set()

    def failed(self, error: BaseException) -> None:
        self.failure = error
        self.there.set()

    def wait(self) -> Reply:
        if not self.there.wait(_SOON):
            self._long_wait()
        if self.failure is not None:
            raise RuntimeError(f"the thread that sends this worker's requests has ended: {self.failure!r}") from self.failure
        assert self.reply is not None
        if self.notes is not None:
            self.notes.look()
        return self.reply

    def is_done(self) -> bool:
        return self.there.is_set()

    def fetched(self, reply: Reply, far: RemoteTensor) -> Reply:
        """The reply with its value, read to where the caller wants it; if it does not fit, the caller's own copy will say so."""
        value, out = reply.value, self.out
        assert value is not None
        if out is None or (out.dtype, out.shape) != (value.dtype, value.shape) or not in_one_piece(out):
            far.read(value)
            return reply
        far.read(out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)  # what autograd has kept of it is spoiled
        return replace(reply, value=out)

    def _long_wait(self) -> None:
        comm = self.comm
        me, line = comm.members[comm.rank], readers_line(sys._getframe())
        comm.board.write(Status(me, "answer", -1, 0, 0, "", comm.members, *line, time.monotonic()))
        if not self.there.wait(self.patience):
            told = f"worker {comm.rank} has waited for more than timeout={self.patience:g} s for an answer to {self.what}"
            raise RankHung(told)
        comm.board.write(None)


class SessionSocket:
    """The socket of one session. Used by one thread alone."""

    def __init__(self, plan: Deployment, context: zmq.Context[zmq.Socket[bytes]], session: Session) -> None:
        self.plan, self.context, self.session = plan, context, session
        self.wire = Wire(plan.limit, plan.near)
        self.lost = False

    def open(self, endpoint: str) -> None:
        name = f"{self.session.client}.{self.session.epoch}".encode()
        self.socket = connect(self.context, endpoint, name, self.plan.largest, self.plan.keys)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(linger=0)

    def flush(self) -> int:
        """Send as much as the socket takes; the events to wait for."""
        messages = self.wire.packed(iter(self._leaving, None))
        while writable(self.socket):
            message = next(messages, None)
            if message is None:
                return zmq.POLLIN
            self.socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        return zmq.POLLIN | zmq.POLLOUT

    def _leaving(self) -> Request | None:
        request = self.session.next(time.monotonic())
        if request is not None:
            answer = self.session.open[request.sequence][1]
            answer.left = answer.left or time.monotonic()
        return request

    def look(self) -> None:
        """Take in answers, and news of the connection: one that was lost and is there again is to a server that was restarted."""
        while readable(self.socket):
            self._open([part.buffer for part in self.socket.recv_multipart(copy=False)])
        while readable(self.monitor):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self.lost:
                self.session.repeat(time.monotonic())
            self.lost = event == zmq.EVENT_DISCONNECTED

    def _open(self, message: list[memoryview]) -> None:
        """The answers of a message. What is no answer, or is nowhere any more, will be asked for again."""
        self.wire.meet(message)
        try:
            for reply, far in self.wire.unpack(message):
                if isinstance(reply, Reply):
                    self._answered(reply, far)
        except (FrameError, ProcessLookupError):
            return
        except OSError:  # the server may not read this process: from now on everything travels, what is under way too
            if self.wire.card != NOBODY:
                self.wire.card = NOBODY
                self.session.repeat(time.monotonic())

    def _answered(self, reply: Reply, far: RemoteTensor | None) -> None:
        """Only what was read to its end counts as answered: from then on the server may change it."""
        _, answer = self.session.open.get(reply.sequence, (None, None))
        if answer is not None and far is not None:
            reply = answer.fetched(reply, far)
        if (answer := self.session.answered(reply, time.monotonic())) is not None:
            answer.arrived(reply)


class SocketTransport:
    """A worker's lines to all servers, and the thread that looks after them.

    The worker's own thread only puts requests into `inbox` and rings. endpoints: where each server listens at first.
    patience: seconds that an answer may take; None, for ever: somebody else is watching.
    """

    def __init__(self, comm: Communicator, plan: Deployment, endpoints: dict[int, str], patience: float | None = None) -> None:
        self.comm, self.plan, self.patience = comm, plan, patience
        self.client, self.context = Client(comm.rank, plan.servers), zmq.Context[zmq.Socket[bytes]]()
        self.lines = dict[int, SessionSocket]()
        for server in range(plan.servers):
            self._connect(server, endpoints[server])
        self.news = subscribe(self.context, plan.news, plan.largest) if plan.room else None
        self.room, self.changes, self.followed = Path(plan.room) if plan.room else None, 0, deque[set[int]]()
        self.inbox: deque[tuple[int, Request, SocketAnswer]] = deque()
        self.rung, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        self.closing = self.awake = False
        self.notes = WorkerNotes(comm.recorder, plan.workers) if comm.recorder else None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._life, name="requests", daemon=True)
        self.thread.start()

    def _connect(self, server: int, endpoint: str) -> None:
        self.lines[server] = SessionSocket(self.plan, self.context, self.client.sessions[server])
        self.lines[server].open(endpoint)

    def request(self, server: int, request: Request, out: torch.Tensor | None = None) -> SocketAnswer:
        """Whatever cannot be sent is an error here, before it has a number."""
        nbytes = sum(tensor.nbytes for tensor in (request.value, request.rows) if tensor is not None)
        if nbytes > self.plan.limit:
            raise ValueError(f"{request.op} of {request.key!r}: {nbytes:,} bytes are more than limit={self.plan.limit:,}")
        frame(request)
        what = f"{f'{request.op} {request.key}'.strip()!r} from server {server}"
        answer = SocketAnswer(self.comm, what, self.patience, out)
        if self.notes is not None:
            self.notes.asked(server, request, answer)
        self.inbox.append((server, request, answer))
        self._ring()
        if self.failure is not None:
            answer.failed(self.failure)
        return answer

    def close(self) -> None:
        """End the thread and the connections; what has no answer yet is given up."""
        self.closing = True
        self._ring()
        self.thread.join()
        if self.notes is not None:
            self.notes.look()
        os.close(self.rung)
        os.close(self.bell)
        self.context.destroy(linger=0)

    def _ring(self) -> None:
        if self.awake:  # and will look before it sleeps
            return
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self.bell, b"!")

    # ---- the thread -------------------------------------------------------------------------------------------------------

    def _life(self) -> None:
        try:
            while not self.closing:
                self._turn()
        except BaseException as error:
            self.failure = error
            waiting = [answer for line in self.lines.values() for _, answer in line.session.open.values()]
            waiting += [answer for line in self.lines.values() for *_, answer in line.session.queue]
            for answer in [*waiting, *(answer for *_, answer in self.inbox)]:
                answer.failed(error)
        finally:
            for line in self.lines.values():
                line.close()

    def _turn(self) -> None:
        """Send what can be sent, wait for something to happen, and look at it."""
        while self.inbox:
            server, request, answer = self.inbox[0]  # where it is found if this thread fails
            self._follow()  # before the first request that is for a new server
            self.lines[server].session.put(request, answer)
            self.inbox.popleft()
        poller = zmq.Poller()
        poller.register(self.rung, zmq.POLLIN)
        for line in self.lines.values():
            poller.register(line.socket, line.flush())
            poller.register(line.monitor, zmq.POLLIN)
        if self.news is not None:
            poller.register(self.news, zmq.POLLIN)
        due = self.client.due
        patience = None if math.isinf(due) else max(0, math.ceil(1e3 * (due - time.monotonic())))
        self.awake = False
        ready = dict(poller.poll(0 if self.inbox or self.closing else patience))
        self.awake = True
        if self.rung in ready:
            os.read(self.rung, 4096)
        for line in self.lines.values():
            line.look()
            line.session.retry(time.monotonic())
        self._hear()

    def _hear(self) -> None:
        """The coordinator repeats all the time which node is which server and where it listens."""
        while self.news is not None and readable(self.news):
            where, *parts = self.news.recv_multipart()
            event = parse(parts, self.plan.limit)
            for server in self.client.learn(event, time.monotonic()) if isinstance(event, Membership) else ():
                self.lines[server].close()
                self.lines[server].open(json.loads(where)[server])

    def _follow(self) -> None:
        while self.followed:
            come, gone = self.client.follow(self.followed.popleft())
            for server in gone:
                self.lines.pop(server).close()
            for server in come:
                self._connect(server, self.plan.endpoint(server))

    # ---- servers that come and go (see `growth`): the worker's own thread ---------------------------------------------------

    def follow(self, servers: Iterable[int]) -> None:
        """Have connections to these servers, and no others, before the next request leaves."""
        self.followed.append({*servers})

    def note(self, servers: str) -> None:
        self.plan.note(servers=servers)
