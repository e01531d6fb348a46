"""What workers and servers leave in a trace, simulated or real: their messages, and which pushes are in which value, when."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import nan
from typing import Any

import torch

from d2lps.kvstore.core.events import Append, Effect, Event, Reply, Request
from d2lps.kvstore.core.placement import key_of
from d2lps.kvstore.core.server import Server
from d2lps.trace import Recorder
from d2lps.trace.recorder import DONE, POSTED, SEQ, STREAM

GROUP = "kvstore"  # of the messages
NOTHING = torch.empty(0)  # what a message without a tensor carries
QUIET = ("leave", "send")  # what is none of the worker's own: it says goodbye


def carried(record: Request | Reply) -> torch.Tensor:
    return NOTHING if record.value is None else record.value


@contextmanager
def named(recorder: Recorder, record: Request | Reply) -> Iterator[None]:
    """What is noted meanwhile belongs to the step that the worker has named, or else to one named after the record."""
    given = recorder.step
    if not given and isinstance(record, Request):
        recorder.step = (f"{record.op} {record.key}".strip(),)
    elif not given:
        recorder.step = (f"{record.key or record.op}: {'ok' if record.value is None else 'value'}",)
    yield
    recorder.step = given


class StoreRecorder:
    """What a server adds up; the server itself knows of no trace."""

    def __init__(self, server: Server, recorder: Recorder) -> None:
        self.server, self.recorder = server, recorder
        self.pushed: dict[str, list[torch.Tensor]] = defaultdict(list)  # not yet part of the value
        self.versions: dict[str, int] = {}
        self.numbers: dict[str, int] = {}  # of the values' buffers

    def source(self, reply: Reply) -> torch.Tensor:
        """What an answer carries: not the copy that is sent, but the value itself, if it is the whole one."""
        entry = self.server.entries.get(reply.key)
        whole = entry is not None and reply.value is not None and entry.like.shape == reply.value.shape
        return self.value(reply.key) if whole else carried(reply)

    def value(self, key: str) -> torch.Tensor:
        """A key's value: one buffer, which is known by the key, wherever the server keeps it just now."""
        value, buffers = self.server.entries[key].peek(), self.recorder.vocabulary.buffers
        if key not in self.numbers:
            self.numbers[key] = buffers.part(self.recorder.rank, value)[0]
            buffer = buffers.seen[self.numbers[key]]
            buffer.name, buffer.scratch = key_of(key)[0], False
        buffers.moved(self.numbers[key], value)
        return value

    def stepped(self, effects: Sequence[Effect]) -> None:
        """After an event: what was executed, and not refused, is in the value, or waits for the end of its round."""
        refused = {(e.client, e.epoch, e.sequence) for e in effects if isinstance(e, Reply) and e.error}
        for effect in effects:
            if isinstance(effect, Append) and isinstance(done := effect.event, Request) and done.retry_key not in refused:
                self._executed(done)
        for key in [key for key in self.pushed if self.server.entries[key].version != self.versions.get(key, 0)]:
            self._changed(key)

    def _executed(self, request: Request) -> None:
        if request.op in ("init", "choose"):
            self.value(request.key)
        elif request.op == "clear":
            self.versions.clear()
        elif request.value is not None and request.op in ("push", "pushpull") and "codec" not in request.options:
            self.pushed[request.key].append(request.value)

    def _changed(self, key: str) -> None:
        """All that does not wait for the end of its round is now in the value."""
        entry = self.server.entries[key]
        waiting = {id(value) for pushes in entry.open.values() for mine in pushes.values() for _, value in mine}
        options, now = self.server.options, self.recorder.now()
        op = str(options.get("name") or options.get("reduction", "sum")).upper()
        for value in self.pushed.pop(key):
            if id(value) in waiting:
                self.pushed[key].append(value)
            else:
                self.recorder.local(op, self.value(key), value, now, now)
        self.versions[key] = entry.version


# ---- of a real run, in which each notes its own ends of messages -----------------------------------------------------------
#
# The two ends find each other by the number of the request, which is their tag: so one that was lost, or came twice, or whose
# other end has died with its process, confuses no other.


def _stream(recorder: Recorder, src: int, dst: int, tag: int) -> int:
    return recorder.vocabulary.stream[GROUP, src, dst, tag]


class WorkerNotes:
    """A worker's messages. A recorder belongs to its worker's thread: that writes down, when it asks again or has waited, what
    another thread has sent and received meanwhile."""

    def __init__(self, recorder: Recorder, workers: int) -> None:
        self.recorder, self.workers = recorder, workers
        self.over: deque[Any] = deque()  # answers that have come: each knows its reply, and when it came, and its request left

    def asked(self, server: int, request: Request, answer: Any) -> None:
        """The tensor has its name, and the message its place in the program; when it leaves is not known yet."""
        self.look()
        if request.op not in QUIET:
            rank = self.workers + server
            with named(self.recorder, request):
                row = self.recorder.end(carried(request), _stream(self.recorder, self.recorder.rank, rank, 0), nan)
            answer.notes, answer.noted = self, (row, rank)

    def look(self) -> None:
        """Write down the answers that have come."""
        while self.over:
            answer = self.over.popleft()
            (row, rank), tag, me, ends = answer.noted, answer.reply.sequence, self.recorder.rank, self.recorder.ends
            ends[row + STREAM], ends[row + POSTED] = _stream(self.recorder, me, rank, tag), answer.left
            came = self.recorder.end(carried(answer.reply), _stream(self.recorder, rank, me, tag), answer.left)
            self.recorder.done(came)
            ends[came + SEQ], ends[came + DONE] = ends[row + SEQ], answer.came  # it was expected from then on


class ServerNotes(StoreRecorder):
    """A server's messages too. An answer is on its way when the server has it: where a log must be safe first, that time is the
    message's. What comes again, because it was slow to be answered, is noted once, as the worker does."""

    def __init__(self, server: Server, recorder: Recorder, rank: int) -> None:
        super().__init__(server, recorder)
        self.ready, recorder.rank = recorder.now(), rank
        self.noted = set[tuple[type, int, int, int]]()  # requests that were heard, answers that were given

    def step(self, event: Event) -> list[Effect]:
        """The server's, and a note of it."""
        if isinstance(event, Request) and self._first(event):
            stream = _stream(self.recorder, event.client, self.recorder.rank, event.sequence)
            row = self.recorder.end(carried(event), stream, self.ready)
            self.recorder.done(row)
            self.recorder.ends[row + SEQ], self.recorder.ends[row + DONE] = 0, self.recorder.now()  # it listens all the time
        effects = self.server.step(event)
        self.stepped(effects)
        for reply in effects:
            if isinstance(reply, Reply) and not reply.error.startswith("stale view") and self._first(reply):
                stream = _stream(self.recorder, self.recorder.rank, reply.client, reply.sequence)
                with named(self.recorder, reply):
                    self.recorder.end(self.source(reply), stream, self.recorder.now())
        return effects

    def _first(self, record: Request | Reply) -> bool:
        """Whether it is to be noted: it is none of the quiet ones, and has not been before."""
        name = type(record), record.client, record.epoch, record.sequence
        new = record.op not in QUIET and name not in self.noted
        self.noted.add(name)
        return new
