"""A worker's transport over sockets: a thread that carries what the `Client` wants sent, so pushes travel while it computes."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from d2lps.comm import Communicator, RankHung
from d2lps.comm.status import Status, readers_line
from d2lps.kvstore.core.client import Client, Session
from d2lps.kvstore.core.events import READS, Membership, Reply, Request, replace
from d2lps.kvstore.core.notes import WorkerNotes
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.sockets import BIG, NOWHERE, Slots, Wire, connect, readable, subscribe, writable
from d2lps.kvstore.storage.frame import FrameError, frame, parse
from d2lps.sharedmemory import SharedMemoryCommunicator
from d2lps.sharedmemory.arena import Arena

_SOON = 0.02  # seconds: a wait that lasts longer leaves a note of where this worker stands
MOST_LENT = 4  # slots in use for what a server answers at once: few, so that they stay in the processor's cache


class SocketAnswer:
    """A reply that is under way."""

    def __init__(self, comm: Communicator, what: str, patience: float | None, out: torch.Tensor | None) -> None:
        self.comm, self.what, self.patience, self.there = comm, what, patience, threading.Event()
        self.out, self.place = out, out  # where the caller wants it, and where the server puts it
        self.brief = False  # whether it holds one of MOST_LENT
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

    def _long_wait(self) -> None:
        comm = self.comm
        me, line = comm.members[comm.rank], readers_line(sys._getframe())
        comm.board.write(Status(me, "answer", -1, 0, 0, "", comm.members, *line, time.monotonic()))
        if not self.there.wait(self.patience):
            told = f"worker {comm.rank} has waited for more than timeout={self.patience:g} s for an answer to {self.what}"
            raise RankHung(told)
        comm.board.write(None)


class Line:
    """The socket of one session. Used by one thread alone."""

    def __init__(self, plan: Deployment, context: zmq.Context[zmq.Socket[bytes]], session: Session, arena: Arena | None) -> None:
        self.plan, self.context, self.session = plan, context, session
        self.wire = Wire(plan.limit, arena)
        self.slots = Slots(arena) if arena is not None else None
        self.lent = 0  # requests under way that are answered at once, and have a slot
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
        while writable(self.socket):
            request = self.session.next(time.monotonic(), self._staged)
            if request is None:
                return zmq.POLLIN
            self.socket.send_multipart(self.wire.pack(request), zmq.NOBLOCK, copy=False)
        return zmq.POLLIN | zmq.POLLOUT

    def _staged(self, request: Request, answer: SocketAnswer) -> Request | None:
        """The request with its big tensors where the server can reach them; None if it must wait for another's slot.

        Only what is answered at once is waited for, never what itself may wait for other workers: these could be waiting for
        what would then not be sent.
        """
        value, out, answer.left = request.value, request.out, time.monotonic()
        copied = self._to_copy(value) or self._to_copy(out)
        if self.slots is None or not (copied or out is not None):
            return request
        answer.brief = copied and not (request.op in READS and self.plan.waits)
        if answer.brief and self.lent >= MOST_LENT:
            return None
        self.lent += answer.brief
        if value is not None and self._to_copy(value):
            value = self.slots.copy(value)
        if out is not None and (self._to_copy(out) or self.wire.where(out) == self.wire.where(value) != NOWHERE):
            out = self.slots.like(out)  # never where the value lies: should the server die, that is sent again
        answer.place = out
        return replace(request, value=value, out=out)

    def _to_copy(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tensor.nbytes >= BIG and self.wire.where(tensor) == NOWHERE

    def look(self) -> None:
        """Take in answers, and news of the connection: one that was lost and is there again is to a server that was restarted."""
        while readable(self.socket):
            try:
                reply = self.wire.unpack([part.buffer for part in self.socket.recv_multipart(copy=False)])
            except FrameError:
                continue  # it will be asked for again
            answer = self.session.answered(reply, time.monotonic()) if isinstance(reply, Reply) else None
            if answer is not None and isinstance(reply, Reply):
                self.lent -= answer.brief
                answer.arrived(self._fetched(reply, answer))
        while readable(self.monitor):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self.lost:
                self.session.repeat(time.monotonic())
            self.lost = event == zmq.EVENT_DISCONNECTED

    def _fetched(self, reply: Reply, answer: SocketAnswer) -> Reply:
        """The reply, with a value that the server has put into our place where the caller wants it; so the place is free."""
        place, answer.place = answer.place, None
        if place is None or answer.out is None or self.wire.where(reply.value) == NOWHERE:
            return reply
        value, out = reply.value, answer.out
        if value is None or (value.dtype, value.numel()) != (out.dtype, out.numel()):
            return reply  # the caller's own copy will say so
        if place is not out:
            try:
                with torch.inference_mode(out.is_inference()):  # the caller's mode, which this thread does not know
                    out.copy_(place)
            except RuntimeError:  # expanded, say: the same, where the caller hears it
                return reply
        return replace(reply, value=out)


class SocketTransport:
    """A worker's lines to all servers, and the thread that looks after them.

    The worker's own thread only puts requests into `inbox` and rings. endpoints: where each server listens; with replicas,
    each node. patience: seconds that an answer may take; None, for ever: somebody else is watching.
    """

    def __init__(self, comm: Communicator, plan: Deployment, endpoints: dict[int, str], patience: float | None = None) -> None:
        self.comm, self.plan, self.endpoints, self.patience = comm, plan, endpoints, patience
        self.client, self.context = Client(comm.rank, plan.servers), zmq.Context[zmq.Socket[bytes]]()
        self.arena = comm.arena if plan.memory and isinstance(comm, SharedMemoryCommunicator) else None
        self.lines = [Line(plan, self.context, session, self.arena) for session in self.client.sessions]
        for server, line in enumerate(self.lines):
            line.open(endpoints[server])
        self.news = subscribe(self.context, plan.news, plan.largest) if plan.replicated else None
        self.inbox: deque[tuple[int, Request, SocketAnswer]] = deque()
        self.rung, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        self.closing = False
        self.notes = WorkerNotes(comm.recorder, plan.workers) if comm.recorder else None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._life, name="requests", daemon=True)
        self.thread.start()

    def request(self, server: int, request: Request) -> SocketAnswer:
        """Whatever cannot be sent is an error here, before it has a number."""
        nbytes = sum(tensor.nbytes for tensor in (request.value, request.rows) if tensor is not None)
        if nbytes > self.plan.limit:
            raise ValueError(f"{request.op} of {request.key!r}: {nbytes:,} bytes are more than limit={self.plan.limit:,}")
        frame(request)
        what = f"{f'{request.op} {request.key}'.strip()!r} from server {server}"
        answer = SocketAnswer(self.comm, what, self.patience, request.out)
        if self.notes is not None:
            self.notes.asked(server, request, answer)
        self.inbox.append((server, request, answer))
        self._ring()
        if self.failure is not None:
            answer.failed(self.failure)
        return answer

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """In shared memory, if servers and workers share it."""
        return torch.empty(shape, dtype=dtype) if self.arena is None else self.arena.empty(shape, dtype)

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
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self.bell, b"!")

    # ---- the thread -------------------------------------------------------------------------------------------------------

    def _life(self) -> None:
        try:
            while not self.closing:
                self._turn()
        except BaseException as error:
            self.failure = error
            waiting = [answer for line in self.lines for _, answer in line.session.open.values()]
            waiting += [answer for line in self.lines for *_, answer in line.session.queue]
            for answer in [*waiting, *(answer for *_, answer in self.inbox)]:
                answer.failed(error)
        finally:
            for line in self.lines:
                line.close()

    def _turn(self) -> None:
        """Send what can be sent, wait for something to happen, and look at it."""
        while self.inbox:
            server, request, answer = self.inbox.popleft()
            self.lines[server].session.put(request, answer)
        poller = zmq.Poller()
        poller.register(self.rung, zmq.POLLIN)
        for line in self.lines:
            poller.register(line.socket, line.flush())
            poller.register(line.monitor, zmq.POLLIN)
        if self.news is not None:
            poller.register(self.news, zmq.POLLIN)
        due = self.client.due
        ready = dict(poller.poll(None if math.isinf(due) else max(0, math.ceil(1e3 * (due - time.monotonic())))))
        if self.rung in ready:
            os.read(self.rung, 4096)
        for line in self.lines:
            line.look()
            line.session.retry(time.monotonic())
        self._hear()

    def _hear(self) -> None:
        """The coordinator repeats all the time which node is which server, and under which view."""
        while self.news is not None and readable(self.news):
            event = parse(self.news.recv_multipart(), self.plan.limit)
            if isinstance(event, Membership):
                for server, node in self.client.learn(event, time.monotonic()).items():
                    self.lines[server].close()
                    self.lines[server].open(self.endpoints.get(node) or self.plan.endpoint(node))
