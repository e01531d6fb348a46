"""What a server leaves in a trace besides its messages: which pushes it has added to which value, and when."""

from __future__ import annotations

from collections import defaultdict

import torch

from d2lps.kvstore.core.events import Request
from d2lps.kvstore.core.placement import key_of
from d2lps.kvstore.core.server import Server
from d2lps.trace import Recorder


class Notes:
    """Looks at a server before and after each step; the server itself knows of no trace."""

    def __init__(self, server: Server, recorder: Recorder | None) -> None:
        self.server, self.recorder = server, recorder
        self.pushed: dict[str, list[torch.Tensor]] = defaultdict(list)  # not yet part of the value
        self.versions: dict[str, int] = {}

    def stepped(self, event: object) -> None:
        """After an event."""
        if self.recorder is None:
            return
        plain = isinstance(event, Request) and not {"codec", "moment"} & event.options.keys()  # else it keeps other tensors
        if plain and isinstance(event, Request) and event.key in self.server.entries and event.value is not None:
            if event.op == "init":
                self._began(event.key)
            else:
                self.pushed[event.key].append(event.value)
        for key in [key for key in self.pushed if self.server.entries[key].version != self.versions.get(key, 0)]:
            self._changed(key)

    def _began(self, key: str) -> None:
        """The first value, whoever brought it, is the server's own; its buffer is known by the key."""
        if key in self.versions or self.recorder is None:
            return
        self.versions[key] = 0
        buffers = self.recorder.vocabulary.buffers
        buffer = buffers.seen[buffers.part(self.recorder.rank, self.server.entries[key].value)[0]]
        buffer.name, buffer.scratch = key_of(key)[0], False

    def _changed(self, key: str) -> None:
        """All that does not wait for the end of its round is now in the value."""
        entry = self.server.entries[key]
        waiting = {id(value) for pushes in entry.open.values() for mine in pushes.values() for _, value in mine}
        op = str(self.server.options.get("name") or self.server.options.get("reduction", "sum")).upper()
        for value in self.pushed.pop(key):
            if id(value) in waiting:
                self.pushed[key].append(value)
            elif self.recorder is not None:
                now = self.recorder.now()
                self.recorder.local(op, entry.value, value, now, now)
        self.versions[key] = entry.version
