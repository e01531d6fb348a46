"""How a worker's requests travel: what it needs of sockets, or of a simulation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from d2lps.kvstore.core.events import Reply, Request


class Answer(Protocol):
    """An answer that is under way."""

    reply: Reply | None  # once it is there

    def wait(self) -> Reply: ...

    def is_done(self) -> bool: ...


class Transport(Protocol):
    """Carries requests to servers, each client's to each server in order, as often as it takes: see `Session`."""

    room: Path | None  # a folder that all of the run's processes reach, where servers can come and go
    changes: int  # how often they have, as far as this worker has seen to it

    def request(self, server: int, request: Request, out: torch.Tensor | None = None) -> Answer:
        """Send it off, before others of lower priority; its value is not touched until the answer is there.

        out: where the value is wanted; it may be there when the answer is, or else the answer has it.
        """

    def follow(self, servers: Iterable[int]) -> None:
        """From now on have connections to these servers, and no others; nothing to do where they never change."""
        return

    def note(self, servers: str) -> None:
        """Leave where later runs look for it which servers there are, if there may be any."""
        return
