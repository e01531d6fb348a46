"""A step's batch in parts that workers lease one by one: each part counts once, whoever brings it.

Elsewhere a round sums what each worker has pushed, and a worker that is gone takes its share of the batch along. Here the shares
belong to the key: what a lost worker had leased is leased again, and a step's sum is the same, whoever has come or gone.
They are operations of this architecture's own, which it puts into the table of the store (see `kvstore.core.table`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from msgspec import Struct, field

from d2lps.kvstore.core.events import Refused, Request
from d2lps.kvstore.core.operations import check_key, pushed, value
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.table import MORE, operation


class Leases(Struct):
    """
    >>> leases = Leases(parts=2)
    >>> [leases.take(worker, live=[7, 8, 9]) for worker in (7, 8, 9)]
    [0, 1, None]
    >>> leases.take(worker=9, live=[8, 9])                      # worker 7 is gone
    0
    >>> leases.bring(0, 1, torch.ones(1)), leases.end(), leases.bring(0, 0, torch.ones(1)), leases.end(), leases.step
    (None, None, None, {0: tensor([1.]), 1: tensor([1.])}, 1)

    A worker has at most one lease, and keeps it until it has brought that part, or is gone.
    """

    parts: int
    step: int = 0  # how many have ended
    held: dict[int, int] = field(default_factory=dict)  # by worker: the part that it works on
    came: dict[int, torch.Tensor] = field(default_factory=dict)  # of this step, by part

    def take(self, worker: int, live: Collection[int]) -> int | None:
        """The part that this worker has leased, or the first that nobody who lives has; None if there is none now."""
        self.held = {holder: part for holder, part in self.held.items() if holder in live}
        if worker not in self.held:
            taken = self.came.keys() | set(self.held.values())
            free = next((part for part in range(self.parts) if part not in taken), None)
            if free is None:
                return None
            self.held[worker] = free
        return self.held[worker]

    def bring(self, step: int, part: int, gradient: torch.Tensor) -> None:
        """Take a part in, unless it is here, or of a step that is over."""
        if step == self.step and part not in self.came:
            self.came[part] = gradient
            self.held = {worker: mine for worker, mine in self.held.items() if mine != part}

    def end(self) -> dict[int, torch.Tensor] | None:
        """If all parts are here, the step is over: they, in order."""
        if len(self.came) < self.parts:
            return None
        complete, self.came, self.held, self.step = dict(sorted(self.came.items())), {}, {}, self.step + 1
        return complete


MORE["leases"] = dict[str, Leases]  # by key


# ---- the operations -------------------------------------------------------------------------------------------------------


@operation()
def share(server: Server, request: Request) -> None:
    """From now on each step of this key has so many parts: {"parts": 8}. Who says so later finds it done."""
    check_key(server, request)
    parts, leases = request.options.get("parts"), server.more["leases"]
    if type(parts) is not int or parts < 1:
        raise Refused(f"parts={parts!r} of {request.key!r} is no number of parts")
    if leases.setdefault(request.key, Leases(parts)).parts != parts:
        raise Refused(f"{request.key!r} has {leases[request.key].parts} parts, not {parts}")


def has_one(server: Server, request: Request) -> bool:
    """There is a part that nobody has."""
    return leases_of(server, request).take(request.client, server.clocks.at) is not None


def leased(server: Server, request: Request) -> Mapping[str, Any]:
    """(step, part)"""
    leases = leases_of(server, request)
    part = leases.held.get(request.client)
    return {} if part is None else {"owner": (leases.step, part)}


@operation("key", until=has_one, carries=leased)
def lease(server: Server, request: Request) -> None:
    """Answered when there is a part that nobody has."""
    leases_of(server, request)


@operation()
def bring(server: Server, request: Request) -> set[str]:
    """A part of a step's gradient, {"step": 3, "part": 5}: kept until all are there, which count in their own order.

    {"last": true}: all servers that have other rows of the key have this part, so the step may end here. There it ends when
    somebody speaks of the next: until then a worker may be lost that has not come here, and another need the old weights.
    """
    gradient, leases = pushed(server, request), leases_of(server, request)
    step, part = (request.options.get(name) for name in ("step", "part"))
    if type(step) is not int or type(part) is not int or not 0 <= part < leases.parts:
        raise Refused(f"step={step!r}, part={part!r} of {request.key!r}: its steps have {leases.parts} parts")
    come_to(server, request.key, step)
    leases.bring(step, part, gradient.clone())
    if request.options.get("last"):
        come_to(server, request.key, step + 1)
    return {request.key}


@operation("key", carries=value)
def fetch(server: Server, request: Request) -> None:
    """The value of a step: {"step": 3}."""
    wanted, leases = request.options.get("step"), leases_of(server, request)
    if type(wanted) is int:
        come_to(server, request.key, wanted)
    if wanted != leases.step:
        raise Refused(f"key {request.key!r} is at step {leases.step}: its value of step {wanted} is not there")


def come_to(server: Server, key: str, step: int) -> None:
    """End the step before this one, if all its parts are here."""
    leases = server.more["leases"][key]
    if step == leases.step + 1 and (complete := leases.end()) is not None:
        pushes = {number: [(None, gradient)] for number, gradient in complete.items()}
        server.entries[key].apply(pushes, leases.parts, server.optimizer, server.rule)


def leases_of(server: Server, request: Request) -> Leases:
    """Of a key that is shared out."""
    check_key(server, request)
    if request.key not in (leases := server.more["leases"]):
        raise Refused(f"{request.op} of {request.key!r}, whose steps have no parts: share comes first")
    found: Leases = leases[request.key]
    return found
