"""What each request does to a server, one function an op.

Each first finds out whether it may, and raises Refused where it may not, so a refused request leaves everything as it was.
It returns the places whose slowest worker has thereby moved on (see `Clocks`): rounds may end there, and reads go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from d2lps.comm.rank import describe
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import READS, Refused, Request
from d2lps.kvstore.core.reductions import COMPARE, total
from d2lps.kvstore.core.state import BARRIER, State, made_of

Moved = set[Hashable]
# What values may be: what can be added (bools are or-ed), and what the format of checkpoints has a name for.
KEPT = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
)  # fmt: skip


def declare(state: State, request: Request) -> Moved:
    """What a key is as a whole, where it lies in parts, or elsewhere: kept by its home, which its name alone determines.

    options: {"whole": "float32[100, 2]"}. Who is the first to say so is right.
    """
    whole = str(request.options.get("whole"))
    if (known := whole_of(state, request.key)) not in ("", whole):
        raise Refused(f"key {request.key!r} is {known}, not {whole}")
    state.wholes[request.key] = whole
    return set()


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
        entry.apply({worker: [contribution]}, len(state.clocks.at), state.optimizer, state.rule)
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
    if not request.options:
        raise Refused("set_optimizer names no optimizer, nor a reduction")
    _check_options(state, request.options)
    return set()


def look(state: State, request: Request) -> Moved:
    """For `kv.save`: what there is, or of one key its value, or one of the optimizer's tensors: {"moment": "exp_avg"}."""
    if request.key:
        _named(state, request)
    return set()


def restore(state: State, request: Request) -> Moved:
    """For `kv.load`: what `set_optimizer` was told, or one key's value, and after it each of the optimizer's tensors."""
    moment, value = request.options.get("moment"), request.value
    if not request.key:
        _check_options(state, request.options)
        state.optimize(request.options)
        return set()
    entry = _between_rounds(state, request)
    told = "nothing" if value is None else describe(value)
    if value is None or (told != describe(entry.like) and (value.dim() or not moment)):
        raise Refused(f"{request.key!r} is {describe(entry.like)}, not {told}")
    if moment:
        entry.moments = entry.moments | {str(moment): value.clone()}
    else:
        entry.moments = state.optimizer.state(value) if state.optimizer else {}
        entry.put(value.clone())
    return set()


def join(state: State, request: Request) -> Moved:
    if state.stops:
        raise Refused(f"worker {request.client} cannot join while the servers change: try again")
    state.admit(request.client)
    return set()


def leave(state: State, request: Request) -> Moved:
    return state.forget(request.client)


_ALL: tuple[Callable[[State, Request], Moved], ...] = (
    declare, offer, choose, init, push, pull, pushpull, clock, barrier, hold, settle, set_optimizer, restore, join, leave
)  # fmt: skip
OPERATIONS = {function.__name__: function for function in _ALL} | {"peek": pull, "state": look}


def answer(state: State, request: Request) -> torch.Tensor | None:
    """The tensor that an answer carries: a copy of the value, or for `kv.save` of what it asks for."""
    if request.op == "state" and request.key:
        return _named(state, request).clone()
    if request.op == "state":
        parts = {}
        for key, entry in state.entries.items():
            parts[key] = str(entry.like.dtype).removeprefix("torch."), list(entry.like.shape), entry.names
        found = {"workers": sorted(state.clocks.at), "options": state.options, "parts": parts}
        return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)
    if request.op not in READS:
        return None
    return check_key(state, request).read(request.rows, only_look=request.op == "peek", lend=state.lends)


# ---- what is refused ------------------------------------------------------------------------------------------------------


def check_key(state: State, request: Request) -> Entry:
    """The entry of a key that there is, if it has the rows that are asked for."""
    if request.key not in state.entries:
        known = f"{state.wholes[request.key]}, and does not lie here" if request.key in state.wholes else "unknown"
        raise Refused(f"key {request.key!r} is {known}: init comes first")
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
    if (known := whole_of(state, key)) not in ("", describe(value)):
        raise Refused(f"key {key!r} already holds {known}, not {describe(value)}")
    return value


def whole_of(state: State, key: str) -> str:
    """What a key is, as far as this server knows: "float32[100, 2]"; "float32[3] everywhere"; empty if it does not."""
    there = [state.entries[key].like] if key in state.entries else [*state.offers.get(key, {}).values()]
    return state.wholes.get(key) or (describe(there[0]) if there else "")


def _pushed(state: State, request: Request) -> torch.Tensor:
    """The value of a push that fits."""
    held, pushed, worker = check_key(state, request).like, request.value, request.client
    if pushed is None:
        raise Refused(f"a {request.op} of {request.key!r} needs a value")
    shape = held.shape if request.rows is None else (len(request.rows), *held.shape[1:])
    if pushed.shape != shape or pushed.dtype != held.dtype:
        raise Refused(f"key {request.key!r} holds {describe(held)}: {describe(pushed)} does not fit {list(shape)}")
    if (state.optimizer or state.rule is not total) and not held.dtype.is_floating_point:
        needs = "an optimizer, and any reduction but 'sum', needs floating-point values"
        raise Refused(f"key {request.key!r} holds {describe(held)}: {needs}")
    at = state.clocks.at[worker]
    if state.consistency.rounds and state.clocks.position(worker, request.key) > at:
        raise Refused(f"worker {worker} has ended its round {at} of {request.key!r} with a pushpull: clock comes next")
    return pushed


def _check_options(state: State, options: Mapping[str, Any]) -> None:
    """What `set_optimizer` may be given."""
    try:
        made_of(options)
    except ValueError as error:
        raise Refused(str(error)) from error
    reduction, workers = options.get("reduction"), len(state.clocks.at)
    if reduction in COMPARE and not state.consistency.rounds:
        raise Refused(f"reduction={reduction!r} compares the pushes of a round: choose consistency 'bsp', which has rounds")
    if reduction == "trimmed_mean" and 2 * (trim := options.get("trim", 1)) >= workers:
        raise Refused(f"trim={trim} at either end leaves nothing of {workers} workers' pushes")


def _between_rounds(state: State, request: Request) -> Entry:
    """A key's entry, of which no round has begun."""
    if (entry := check_key(state, request)).open:
        raise Refused(f"{request.op}: {request.key!r} has pushes of a round that is not over: all workers' clock() comes first")
    return entry


def _named(state: State, request: Request) -> torch.Tensor:
    """The value, or the optimizer's tensor that is named."""
    entry, name = _between_rounds(state, request), request.options.get("moment", "")
    if name not in ["", *entry.names]:
        raise Refused(f"{request.key!r} has no {name!r}, only {entry.names}")
    return entry.peek(name)


def place(request: Request) -> Hashable:
    """Where a request waits if it must: None (for all keys), a key, or BARRIER."""
    return BARRIER if request.op in ("barrier", "hold", "settle") else request.key if request.op in READS else None
