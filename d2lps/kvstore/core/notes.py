"""What workers and servers leave in a trace, simulated or real: their messages, and which pushes are in which value, when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from d2lps.kvstore.core.events import Reply, Request
from d2lps.kvstore.core.placement import key_of
from d2lps.kvstore.core.server import Server
from d2lps.trace import Recorder

GROUP = "kvstore"  # of the messages
NOTHING = torch.empty(0)  # what a message without a tensor carries


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


class Notes:
    """Looks at a server after each step; the server itself knows of no trace."""

    def __init__(self, server: Server, recorder: Recorder) -> None:
        self.server, self.recorder = server, recorder
        self.pushed: dict[str, list[torch.Tensor]] = defaultdict(list)  # not yet part of the value
        self.versions: dict[str, int] = {}

    def source(self, reply: Reply) -> torch.Tensor:
        """What an answer carries: not the copy that is sent, but the value itself, if it is the whole one."""
        entry = self.server.entries.get(reply.key)
        whole = entry is not None and reply.value is not None and entry.like.shape == reply.value.shape
        return entry.value if entry is not None and whole else carried(reply)

    def stepped(self, event: object) -> None:
        """After an event."""
        if isinstance(event, Request) and event.key in self.server.entries:
            if event.op in ("init", "choose"):
                self._began(event.key)
            elif event.value is not None and event.op != "offer" and "codec" not in event.options:  # else it keeps another tensor
                self.pushed[event.key].append(event.value)
        for key in [key for key in self.pushed if self.server.entries[key].version != self.versions.get(key, 0)]:
            self._changed(key)

    def _began(self, key: str) -> None:
        """The first value, whoever brought it, is the server's own; its buffer is known by the key."""
        if key not in self.versions:
            self.versions[key] = 0
            buffers = self.recorder.vocabulary.buffers
            buffer = buffers.seen[buffers.part(self.recorder.rank, self.server.entries[key].value)[0]]
            buffer.name, buffer.scratch = key_of(key)[0], False

    def _changed(self, key: str) -> None:
        """All that does not wait for the end of its round is now in the value."""
        entry = self.server.entries[key]
        waiting = {id(value) for pushes in entry.open.values() for mine in pushes.values() for _, value in mine}
        op, now = str(self.server.options.get("name", "sum")).upper(), self.recorder.now()
        for value in self.pushed.pop(key):
            if id(value) in waiting:
                self.pushed[key].append(value)
            else:
                self.recorder.local(op, entry.value, value, now, now)
        self.versions[key] = entry.version
