"""What each request does to a server, once it is known that it may.

Each function returns the keys whose slowest worker has thereby moved on (see `Clocks`): rounds may end there, and reads go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from d2lps.kvstore.entry import Entry
from d2lps.kvstore.events import Request
from d2lps.kvstore.waiting import BARRIER

if TYPE_CHECKING:
    from d2lps.kvstore.server import Server


def init(server: Server, request: Request) -> set[str]:
    """The first writer wins."""
    if request.key not in server.entries and request.value is not None:
        value = request.value.clone()
        moments = server.optimizer.state(value) if server.optimizer else {}
        server.entries[request.key] = Entry(request.key, value, server.store, moments)
    return set()


def push(server: Server, request: Request) -> set[str]:
    """Aside, until the round ends, or at once into the value."""
    assert request.value is not None
    entry, worker, contribution = server.entries[request.key], request.client, (request.rows, request.value)
    if server.consistency.rounds:
        entry.push(server.clocks.at[worker], worker, contribution)
    else:
        entry.apply([contribution], len(server.clocks.at), server.optimizer, server.mean)
    return set()


def pull(server: Server, request: Request) -> set[str]:
    """The value is read when it is answered; so too for peek."""
    return set()


def pushpull(server: Server, request: Request) -> set[str]:
    """A push that ends the worker's round for this key; what comes back is read after that round."""
    push(server, request)
    return server.clocks.done(request.key, request.client)


def clock(server: Server, request: Request) -> set[str]:
    return server.clocks.tick(request.client, request.clock)


def barrier(server: Server, request: Request) -> set[str]:
    worker = request.client
    return {BARRIER} if server.barriers.move(worker, server.barriers.at[worker] + 1) else set()


def set_optimizer(server: Server, request: Request) -> set[str]:
    """Done when it is answered: under bsp, after the rounds before it."""
    return set()


def join(server: Server, request: Request) -> set[str]:
    admit(server, request.client)
    return set()


def leave(server: Server, request: Request) -> set[str]:
    return forget(server, request.client)


def admit(server: Server, worker: int) -> None:
    """It counts from now on, beginning at the current clock."""
    server.clocks.join(worker)
    server.barriers.add(worker, server.barriers.reached)


def forget(server: Server, worker: int) -> set[str]:
    """Nobody waits for it any more, nor does it; what it has pushed counts, for that was acknowledged."""
    server.waiting.forget(worker)
    moved = server.clocks.leave(worker)
    return moved | {BARRIER} if server.barriers.remove(worker) else moved


OPERATIONS: dict[str, Callable[[Server, Request], set[str]]] = {
    "init": init,
    "push": push,
    "pull": pull,
    "peek": pull,
    "pushpull": pushpull,
    "clock": clock,
    "barrier": barrier,
    "set_optimizer": set_optimizer,
    "join": join,
    "leave": leave,
}
