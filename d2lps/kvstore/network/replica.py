"""Primary and backup: every server twice, and no answer before both have what it is about.

The primary gives each event that it executes to its backup, numbered, with the number of the membership (the view) that it
believes in; the backup steps with it, and says so. When the coordinator gives the primary up, it first moves the backup
into a new view, and only then tells the workers. From that moment the backup refuses what the old primary sends: should it
only have been paused, it can still change its own memory, but nobody will ever get an answer out of it.
"""

from __future__ import annotations

from collections import deque

import zmq

from d2lps.kvstore.core.events import Reply, Send
from d2lps.kvstore.network.sockets import connect, readable
from d2lps.kvstore.storage.frame import frame, parse


class Deposed(Exception):
    """Somebody else is the primary."""


class Backup:
    """A primary's line to its backup, and the answers that wait for it; each event costs its bytes again, and a round trip."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, limit: int) -> None:
        self.socket = connect(context, endpoint, b"primary", limit, None, most=0)
        self.limit = limit
        self.sent: deque[Send] = deque()  # and not yet confirmed
        self.held: deque[tuple[int, Reply]] = deque()  # answers, each with the number of the last event before it
        self.last = 0

    def send(self, send: Send) -> None:
        self.last = send.number
        self.sent.append(send)
        self.socket.send_multipart(frame(send), copy=False)

    def hold(self, replies: list[Reply]) -> list[Reply]:
        """Those that may go at once; the others are given by `confirmed` or `released`."""
        self.held.extend((self.last, reply) for reply in replies)
        return self._free(self.sent[0].number if self.sent else self.last + 1)

    def confirmed(self) -> list[Reply]:
        """Take in what the backup says; the answers that may go now. Deposed if it obeys a newer view than ours."""
        while readable(self.socket):
            reply = parse([part.buffer for part in self.socket.recv_multipart(copy=False)], self.limit)
            assert isinstance(reply, Reply)
            if reply.error.startswith("stale view"):
                raise Deposed(reply.error)
            if reply.error:
                raise RuntimeError(f"the backup no longer follows: {reply.error}")
            while self.sent and self.sent[0].number <= reply.sequence:
                self.sent.popleft()
        return self._free(self.sent[0].number if self.sent else self.last + 1)

    def released(self) -> list[Reply]:
        """All that are held: there is no backup any more, and the coordinator has said so."""
        self.socket.close()
        return [reply for _, reply in self.held]

    def _free(self, before: int) -> list[Reply]:
        free = []
        while self.held and self.held[0][0] < before:
            free.append(self.held.popleft()[1])
        return free
