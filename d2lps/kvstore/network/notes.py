"""What a real run's workers and servers note, each its own ends of messages, so that the trace is that of a simulation.

The two ends of a message find each other by its request's number, which is their tag: so a message that was lost, or came
twice, or whose other end has died with its process, confuses no other.
"""

from __future__ import annotations

from math import nan
from typing import Any

from d2lps.kvstore.core.events import Effect, Event, Reply, Request
from d2lps.kvstore.core.notes import GROUP, Notes, carried, named
from d2lps.kvstore.core.server import Server
from d2lps.trace import Recorder
from d2lps.trace.recorder import DONE, POSTED, SEQ, STREAM


class WorkerNotes:
    """A worker's messages. A recorder belongs to its worker's thread, which writes down what another thread has sent and
    received meanwhile whenever it asks again, or has waited."""

    def __init__(self, recorder: Recorder, workers: int) -> None:
        self.recorder, self.workers = recorder, workers
        self.open: list[tuple[int, int, Any]] = []  # where a request's row begins, the server's rank, its SocketAnswer

    def asked(self, server: int, request: Request, answer: Any) -> None:
        """The tensor has its name, and the message its place in the program; when it leaves is not known yet."""
        self.look()
        if request.op == "leave":  # the goodbye is none of the run's
            return
        rank = self.workers + server
        with named(self.recorder, request):
            row = self.recorder.end(carried(request), self._stream(self.recorder.rank, rank, 0), nan)
        self.open.append((row, rank, answer))

    def look(self) -> None:
        """Write down the answers that have come."""
        waiting = []
        for row, rank, answer in self.open:
            if answer.reply is None:
                waiting.append((row, rank, answer))
            else:
                tag, me, ends = answer.reply.sequence, self.recorder.rank, self.recorder.ends
                ends[row + STREAM], ends[row + POSTED] = self._stream(me, rank, tag), answer.left
                came = self.recorder.end(carried(answer.reply), self._stream(rank, me, tag), answer.left)
                self.recorder.done(came)
                ends[came + SEQ], ends[came + DONE] = ends[row + SEQ], answer.came  # it was expected from then on
        self.open = waiting

    def _stream(self, src: int, dst: int, tag: int) -> int:
        return self.recorder.vocabulary.stream[GROUP, src, dst, tag]


class ServerNotes(Notes):
    """A server's messages, and what it adds up. An answer is on its way when the server has it: the time until the log is safe
    is the message's."""

    def __init__(self, server: Server, recorder: Recorder, rank: int) -> None:
        super().__init__(server, recorder)
        self.ready, recorder.rank = recorder.now(), rank

    def step(self, event: Event) -> list[Effect]:
        """The server's, and a note of it."""
        if isinstance(event, Request) and event.op != "leave":
            stream = self.recorder.vocabulary.stream[GROUP, event.client, self.recorder.rank, event.sequence]
            row = self.recorder.end(carried(event), stream, self.ready)
            self.recorder.done(row)
            self.recorder.ends[row + SEQ], self.recorder.ends[row + DONE] = 0, self.recorder.now()  # it listens all the time
        effects = self.server.step(event)
        self.stepped(event)
        for reply in effects:
            if isinstance(reply, Reply) and reply.op not in ("leave", "send"):
                stream = self.recorder.vocabulary.stream[GROUP, self.recorder.rank, reply.client, reply.sequence]
                with named(self.recorder, reply):
                    self.recorder.end(self.source(reply), stream, self.recorder.now())
        return effects
