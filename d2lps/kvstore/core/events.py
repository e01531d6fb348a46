"""What can happen to a server, and what it then wants done: the whole vocabulary of `Server.step`.

Events and effects are frozen records of numbers, strings and tensors, so a driver can carry them over a wire, write them into
a log, and play them again. Their types say what is allowed: whatever arrives is held against them (see `frame`), and so is
what leaves.

>>> push = Request("push", key="w", value=torch.ones(2), client=0, epoch=1, sequence=3)
>>> push.op, push.retry_key, push.value.tolist()
('push', (0, 1, 3), [1.0, 1.0])
>>> replace(push, value=None)
Request(op='push', key='w', epoch=1, sequence=3)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, field
from msgspec.structs import astuple
from msgspec.structs import replace as replace

Op = Annotated[str, Meta(pattern="^[a-z_]{1,32}$")]  # what a client can ask for: a name in the table of operations
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Rank = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Plain = bool | int | float | str
Options = Mapping[str, Plain | Sequence[Plain]]

LOSS = "acknowledged requests are lost"  # what an answer begins with that names such a loss


class Refused(RuntimeError):
    """A server answered that it won't: an unknown key, another shape, a client that was given up; its state is as before."""


# ---- events: what a server can be given -----------------------------------------------------------------------------------


class _Record(Struct, frozen=True, eq=False, tag=True, forbid_unknown_fields=True, omit_defaults=True, repr_omit_defaults=True):
    """Two records are equal if they are of one kind and all their fields are, tensors element by element."""

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and alike(astuple(self), astuple(other))

    def __ne__(self, other: object) -> bool:  # Struct has one of its own
        return not self == other


class Request(_Record, frozen=True):
    """One client asks one server for something.

    The server owns `value` and `rows` from now on: who gives them keeps no tensor that shares their memory.
    """

    op: Op
    key: str = ""
    value: torch.Tensor | None = None  # init, push, pushpull: the tensor, or the pushed rows of it
    rows: torch.Tensor | None = None  # push, pull, pushpull of rows: which ones, int64[number of rows]
    options: Options = field(default_factory=dict)  # {"name": "sgd", "lr": 0.1}; of a push, its codec's: {"codec": "half"}
    clock: Count = 0  # how many iterations the worker has ended; with op "clock", this one included
    priority: int = 0  # the higher, the sooner, among what waits
    client: Rank = 0  # the worker's
    epoch: Count = 0  # which life of this client: one that was lost and comes back has a higher one
    sequence: Count = 0  # 1, 2, 3 ... in the order in which this life sends requests to this server; retries keep theirs
    acknowledged: Count = 0  # the client has the answers to all sequences below this one
    view: Count = 0  # the number of the membership that the client knows

    @property
    def retry_key(self) -> tuple[int, int, int]:
        """What makes two arrivals one request."""
        return self.client, self.epoch, self.sequence


class Lost(_Record, frozen=True):
    """A worker is given up: from now on nobody waits for it, and what it still asks for is refused."""

    worker: Rank


class Membership(_Record, frozen=True):
    """The coordinator numbers who serves; a server refuses requests that carry another number than its own."""

    view: Count
    servers: tuple[Count, ...]
    wanted: bool = False  # these servers are not there yet: workers let them come, or go, at their next barrier


# ---- effects: what a server wants done, in this order ---------------------------------------------------------------------


class Append(_Record, frozen=True):
    """Write the event to the log; the effects after this one must wait until that is done."""

    event: Executed


class Send(_Record, frozen=True):
    """Give the event to the backup, which steps with this very record; the effects after this one must wait for its answer."""

    number: Count  # 1, 2, 3 ... of the events that a server has executed
    event: Executed
    view: Count = 0  # of the primary: a backup refuses what is older than its own


class Reply(_Record, frozen=True):
    """Answer a request, or (client -1) a primary's Send by its number."""

    client: Annotated[int, Meta(ge=-1)]
    epoch: Count
    sequence: Count
    op: Annotated[str, Meta(pattern="^[a-z_]{0,32}$")] = ""
    key: str = ""
    value: torch.Tensor | None = None  # pull, pushpull: the tensor as it is now, or the rows asked for; never changed
    error: str = ""  # not empty: the request was refused, for this reason
    clock: Count = 0  # join: the clock to begin at
    priority: int = 0  # of the request
    view: Count = 0  # of the server
    owner: tuple[Count, ...] = ()  # choose: whose first value it is, a worker's rank and which of its lives; lease: step, part
    said: str = ""  # barrier: what one of the workers has told all others in it


Executed = Request | Lost | Membership  # what changes a server, and is logged
Event = Executed | Send
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
