"""What each request does to a server, one function an op.

Each first finds out whether it may, and raises Refused where it may not, so a refused request leaves everything as it was.
It returns the places whose slowest worker has thereby moved on (see `Clocks`): rounds may end there, and reads go.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from d2lps.comm.rank import describe
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import READS, Refused, Request
from d2lps.kvstore.core.state import BARRIER, State, optimizer_of

Moved = set[Hashable]
# What values may be: what can be added, and what the format of checkpoints has a name for.
KEPT = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
)  # fmt: skip


def offer(state: State, request: Request) -> Moved:
    """A first value of one part, kept until one worker's has been chosen for all parts."""
    value = _first(state, request)
    if request.key not in state.entries:
        state.offers.setdefault(request.key, {}).setdefault((request.client, request.epoch), value.clone())
    return set()


def choose(state: State, request: Request) -> Moved:
    """The first value shall be the one that this life of a worker has offered, or who asks, if nobody is named.

    If that was done before, nothing: the answer says whose value it is.
    """
    wanted = request.options.get("owner", [request.client, request.epoch])
    if request.key not in state.entries:
        offers = state.offers.get(request.key, {})
        found = [owner for owner in offers if list(owner) == wanted]
        if not found:
            raise Refused(f"choose of {request.key!r}: worker and life {wanted!r} have offered no value, only {list(offers)}")
        state.make(request.key, offers[found[0]], found[0])
    return set()


def init(state: State, request: Request) -> Moved:
    """The first writer wins."""
    value = _first(state, request)
    if request.key not in state.entries:
        state.make(request.key, value.clone(), (request.client, request.epoch))
    return set()


def push(state: State, request: Request) -> Moved:
    """Aside, until the round ends, or at once into the value."""
    value = _pushed(state, request)
    entry, worker, contribution = state.entries[request.key], request.client, (request.rows, value)
    if state.consistency.rounds:
        entry.push(state.clocks.at[worker], worker, contribution)
    else:
        entry.apply([contribution], len(state.clocks.at), state.optimizer, state.mean)
    return set()


def pull(state: State, request: Request) -> Moved:
    """The value is read when it is answered; so too for peek."""
    check_key(state, request)
    return set()


def pushpull(state: State, request: Request) -> Moved:
    """A push that ends the worker's round for this key; what comes back is read after that round."""
    push(state, request)
    return state.clocks.done(request.key, request.client)


def clock(state: State, request: Request) -> Moved:
    at = state.clocks.at[request.client]
    if request.clock < at:
        raise Refused(f"worker {request.client} is at clock {at}: it cannot go back to {request.clock}")
    return state.clocks.tick(request.client, request.clock)


def barrier(state: State, request: Request) -> Moved:
    worker = request.client
    return {BARRIER} if state.barriers.move(worker, state.barriers.at[worker] + 1) else set()


def hold(state: State, request: Request) -> Moved:
    """The servers are to change: this worker will go no further than to this clock before it knows where all of them stop."""
    state.stops.setdefault(request.client, request.clock)
    return {BARRIER}


def settle(state: State, request: Request) -> Moved:
    """This worker has the answers to all that it has asked, and asks no more until the servers have changed."""
    return set()


def set_optimizer(state: State, request: Request) -> Moved:
    """Done when it is answered: under bsp, after the rounds before it."""
    if (reduction := request.options.get("reduction", "mean")) not in ("mean", "sum"):
        raise Refused(f"reduction={reduction!r} is unknown: choose 'mean' or 'sum'")
    try:
        optimizer_of(dict(request.options) | {"name": str(request.options.get("name", ""))})
    except ValueError as error:
        raise Refused(str(error)) from error
    return set()


def join(state: State, request: Request) -> Moved:
    if state.stops:
        raise Refused(f"worker {request.client} cannot join while the servers change: try again")
    state.admit(request.client)
    return set()


def leave(state: State, request: Request) -> Moved:
    return state.forget(request.client)


OPERATIONS: dict[str, Callable[[State, Request], Moved]] = {
    "offer": offer,
    "choose": choose,
    "init": init,
    "push": push,
    "pull": pull,
    "peek": pull,
    "pushpull": pushpull,
    "clock": clock,
    "barrier": barrier,
    "hold": hold,
    "settle": settle,
    "set_optimizer": set_optimizer,
    "join": join,
    "leave": leave,
}


# ---- what is refused ------------------------------------------------------------------------------------------------------


def check_key(state: State, request: Request) -> Entry:
    """The entry of a key that there is, if it has the rows that are asked for."""
    if request.key not in state.entries:
        raise Refused(f"key {request.key!r} is unknown: init comes first")
    rows, held = request.rows, state.entries[request.key].like
    if rows is None:
        return state.entries[request.key]
    if rows.dtype != torch.int64 or rows.dim() != 1 or held.dim() == 0:
        found = f"{describe(rows)} of {describe(held)}"
        raise Refused(f"rows of {request.key!r} must be int64[n], and it must have rows; not {found}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(held):
        wrong = f"not from {int(rows.min())} to {int(rows.max())}"
        raise Refused(f"rows of {request.key!r} go from 0 to {len(held) - 1}, {wrong}")
    return state.entries[request.key]


def _first(state: State, request: Request) -> torch.Tensor:
    """The value that a key may begin with."""
    key, value = request.key, request.value
    if value is None:
        raise Refused(f"{request.op} of {key!r} needs a value")
    if value.dtype not in KEPT:
        kept = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEPT)
        raise Refused(f"key {key!r} is {describe(value)}, which cannot be added up or stored: choose one of {kept}")
    if state.store.budget is not None and value.nbytes > state.store.budget:
        raise Refused(f"{key!r} has {value.nbytes} bytes, and this server's memory a budget of {state.store.budget}")
    held = state.entries[key].like if key in state.entries else value
    if (held.shape, held.dtype) != (value.shape, value.dtype):
        raise Refused(f"key {key!r} already holds {describe(held)}, not {describe(value)}")
    return value


def _pushed(state: State, request: Request) -> torch.Tensor:
    """The value of a push that fits."""
    held, pushed, worker = check_key(state, request).like, request.value, request.client
    if pushed is None:
        raise Refused(f"a {request.op} of {request.key!r} needs a value")
    shape = held.shape if request.rows is None else (len(request.rows), *held.shape[1:])
    if pushed.shape != shape or pushed.dtype != held.dtype:
        raise Refused(f"key {request.key!r} holds {describe(held)}: {describe(pushed)} does not fit {list(shape)}")
    if state.optimizer and not held.dtype.is_floating_point:
        raise Refused(f"key {request.key!r} holds {describe(held)}: an optimizer needs floating-point values")
    at = state.clocks.at[worker]
    if state.consistency.rounds and state.clocks.position(worker, request.key) > at:
        raise Refused(f"worker {worker} has ended its round {at} of {request.key!r} with a pushpull: clock comes next")
    return pushed


def place(request: Request) -> Hashable:
    """Where a request waits if it must: None (for all keys), a key, or BARRIER."""
    return BARRIER if request.op in ("barrier", "hold", "settle") else request.key if request.op in READS else None
