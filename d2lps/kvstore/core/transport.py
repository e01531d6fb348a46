"""How a worker's requests travel: what it needs of sockets, or of a simulation."""

from __future__ import annotations

from typing import Protocol

import torch

from d2lps.kvstore.core.changes import Changes
from d2lps.kvstore.core.events import Reply, Request


class Answer(Protocol):
    """An answer that is under way."""

    reply: Reply | None  # once it is there

    def wait(self) -> Reply: ...

    def is_done(self) -> bool: ...


class Transport(Protocol):
    """Carries requests to servers, each client's to each server in order, as often as it takes: see `Session`."""

    changes: Changes

    def request(self, server: int, request: Request, out: torch.Tensor | None = None) -> Answer:
        """Send it off, before others of lower priority; its value is not touched until the answer is there.

        out: where the value is wanted; it may be there when the answer is, or else the answer has it.
        """
