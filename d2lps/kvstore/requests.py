"""A worker's transport: a thread that sends and receives, so that pushes travel while the worker computes."""

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

from d2lps.comm import Communicator, RankHung
from d2lps.comm.status import Status, readers_line
from d2lps.kvstore.channel import Channel
from d2lps.kvstore.deployment import Deployment
from d2lps.kvstore.events import Membership, Reply, Request
from d2lps.kvstore.frame import frame, parse
from d2lps.kvstore.sockets import readable
from d2lps.sharedmemory import SharedMemoryCommunicator

_SOON = 0.02  # seconds: a wait that lasts longer leaves a note of where this worker stands


class SocketAnswer:
    """A reply that is under way."""

    def __init__(self, comm: Communicator, what: str, patience: float | None) -> None:
        self.comm, self.what, self.patience, self.there = comm, what, patience, threading.Event()
        self.out: torch.Tensor | None = None  # where the caller wants it
        self.reply: Reply | None = None
        self.failure: BaseException | None = None

    def arrived(self, reply: Reply) -> None:
        self.reply = reply
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


class SocketTransport:
    """A worker's lines to all servers, and the thread that looks after them.

    The worker's own thread only puts requests into `inbox` and rings. endpoints: where each server listens; with replicas,
    each node. patience: seconds that an answer may take; None, for ever: somebody else is watching.
    """

    def __init__(self, comm: Communicator, plan: Deployment, endpoints: dict[int, str], patience: float | None = None) -> None:
        self.comm, self.plan, self.endpoints, self.patience = comm, plan, endpoints, patience
        self.nodes, self.view = list(range(plan.servers)), 0  # who serves now
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.arena = comm.arena if plan.memory and isinstance(comm, SharedMemoryCommunicator) else None
        self.channels = [Channel(plan, self.context, endpoints[server], comm.rank, self.arena) for server in self.nodes]
        self.news = self._subscribed() if plan.replicated else None
        self.inbox: deque[tuple[int, Request, SocketAnswer]] = deque()
        self.rung, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        self.closing = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._life, name="requests", daemon=True)
        self.thread.start()

    def request(self, server: int, request: Request) -> SocketAnswer:
        """Whatever cannot be sent is an error here, before it has a number."""
        nbytes = sum(tensor.nbytes for tensor in (request.value, request.rows) if tensor is not None)
        if nbytes > self.plan.limit:
            raise ValueError(f"{request.op} of {request.key!r}: {nbytes:,} bytes are more than limit={self.plan.limit:,}")
        frame(request)
        what = f"{request.op} {request.key}".strip()
        answer = SocketAnswer(self.comm, f"{what!r} from server {server}", self.patience)
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
            waiting = [answer for channel in self.channels for _, answer in channel.session.open.values()]
            waiting += [answer for channel in self.channels for *_, answer in channel.queue]
            for answer in [*waiting, *(answer for *_, answer in self.inbox)]:
                answer.failed(error)
        finally:
            for channel in self.channels:
                channel.close()

    def _turn(self) -> None:
        """Send what can be sent, wait for something to happen, and look at it."""
        while self.inbox:
            server, request, answer = self.inbox.popleft()
            self.channels[server].put(request, answer)
        poller = zmq.Poller()
        poller.register(self.rung, zmq.POLLIN)
        for channel in self.channels:
            left = channel.flush()
            poller.register(channel.socket, zmq.POLLIN | (zmq.POLLOUT if left else 0))
            poller.register(channel.monitor, zmq.POLLIN)
        if self.news is not None:
            poller.register(self.news, zmq.POLLIN)
        due = min(channel.due for channel in self.channels)
        ready = dict(poller.poll(None if math.isinf(due) else max(0, math.ceil(1e3 * (due - time.monotonic())))))
        if self.rung in ready:
            os.read(self.rung, 4096)
        for channel in self.channels:
            channel.look()
            channel.retry()
        self._hear()

    # ---- replicas ---------------------------------------------------------------------------------------------------------

    def _subscribed(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.SUB)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, self.plan.largest)
        socket.set(zmq.SUBSCRIBE, b"")
        socket.connect(self.plan.news)
        return socket

    def _hear(self) -> None:
        """The coordinator repeats all the time which node is which server, and under which view."""
        while self.news is not None and readable(self.news):
            event = parse(self.news.recv_multipart(), self.plan.limit)
            if not isinstance(event, Membership) or event.view <= self.view:
                continue
            self.view = event.view
            for server, node in enumerate(event.servers):
                if node != self.nodes[server]:
                    self.nodes[server] = node
                    self.channels[server].move(self.endpoints[node], event.view)
