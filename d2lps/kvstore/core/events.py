"""What can happen to a server, and what it then wants done: the whole vocabulary of `Server.step`.

Events and effects are plain frozen records of numbers, strings and tensors, so a driver can carry them over a wire, write
them into a log, and play them again.

>>> push = Request("push", key="w", value=torch.ones(2), client=0, epoch=1, sequence=3)
>>> push.op, push.retry_key, push.value.tolist()
('push', (0, 1, 3), [1.0, 1.0])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace
from typing import Any

import torch

# What a client can ask for.
OPS = ("offer", "choose", "init", "push", "pull", "pushpull", "clock", "barrier", "set_optimizer", "join", "leave", "peek")
READS = ("pull", "pushpull", "peek")  # what is answered with a value


LOSS = "acknowledged requests are lost"  # what an answer begins with that names such a loss


class Refused(RuntimeError):
    """A server answered that it won't: an unknown key, another shape, a client that was given up; its state is as before."""


# ---- events: what a server can be given -----------------------------------------------------------------------------------


class _Record:
    """Two records are equal if they are of one kind and all their fields are, tensors element by element."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and alike(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Request(_Record):
    """One client asks one server for something.

    The server owns `value` and `rows` from now on: who gives them keeps no tensor that shares their memory.
    """

    op: str  # one of OPS
    key: str = ""
    value: torch.Tensor | None = None  # init, push, pushpull: the tensor, or the pushed rows of it
    rows: torch.Tensor | None = None  # push, pull, pushpull of rows: which ones, int64[number of rows]
    options: Mapping[str, Any] = field(default_factory=dict)  # {"name": "sgd", "lr": 0.1}; of a push, {"codec": "half"}
    clock: int = 0  # how many iterations the worker has ended; with op "clock", this one included
    priority: int = 0  # the higher, the sooner, among what waits
    client: int = 0  # the worker's rank
    epoch: int = 0  # which life of this client: one that was lost and comes back has a higher one
    sequence: int = 0  # 1, 2, 3 ... in the order in which this life sends requests to this server; retries keep theirs
    acknowledged: int = 0  # the client has the answers to all sequences below this one
    view: int = 0  # the number of the membership that the client knows
    out: torch.Tensor | None = None  # where the client wants the value: never leaves it

    @property
    def retry_key(self) -> tuple[int, int, int]:
        """What makes two arrivals one request."""
        return self.client, self.epoch, self.sequence


@dataclass(frozen=True, eq=False)
class Lost(_Record):
    """A worker is given up: from now on nobody waits for it, and what it still asks for is refused."""

    worker: int


@dataclass(frozen=True, eq=False)
class Membership(_Record):
    """The coordinator numbers who takes part; a server refuses requests that carry another number than its own."""

    view: int
    workers: Mapping[int, int]  # {rank: epoch of its present life}
    servers: tuple[int, ...]


# ---- effects: what a server wants done, in this order ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Append(_Record):
    """Write the event to the log; the effects after this one must wait until that is done."""

    event: Event


@dataclass(frozen=True, eq=False)
class Send(_Record):
    """Give the event to the backup, which steps with this very record; the effects after this one must wait for its answer."""

    number: int  # 1, 2, 3 ... of the events that a server has executed
    event: Event
    view: int = 0  # of the primary: a backup refuses what is older than its own


@dataclass(frozen=True, eq=False)
class Reply(_Record):
    """Answer a request, or (client -1) a primary's Send by its number."""

    client: int
    epoch: int
    sequence: int
    op: str = ""
    key: str = ""
    value: torch.Tensor | None = None  # pull, pushpull: the tensor as it is now, or the rows asked for; never changed
    error: str = ""  # not empty: the request was refused, for this reason
    clock: int = 0  # join: the clock to begin at
    priority: int = 0  # of the request
    view: int = 0  # of the server
    owner: tuple[int, ...] = ()  # choose: whose first value it is, a worker's rank and which of its lives


Event = Request | Lost | Membership | Send
Effect = Append | Send | Reply


def alike(one: Any, other: Any) -> bool:
    """Deep equality of numbers, strings, tensors (also in dtype), and what is made of them.

    >>> alike({"w": [torch.ones(2)]}, {"w": [torch.ones(2)]}), alike(torch.ones(2), torch.ones(2, dtype=torch.int64))
    (True, False)
    """
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
