"""What each request does to a server, one function an op.

Each first finds out whether it may, and raises Refused where it may not, so a refused request leaves everything as it was.
It returns the places whose slowest worker has thereby moved on (see `Clocks`): rounds may end there, and reads go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable

import torch

from d2lps.comm.rank import describe
from d2lps.kvstore.core.events import READS, Refused, Request
from d2lps.kvstore.core.leases import Leases
from d2lps.kvstore.core.refusals import (
    between_rounds,
    check_key,
    check_options,
    first_value,
    leases_of,
    named_tensor,
    pushed,
    whole_of,
)
from d2lps.kvstore.core.state import BARRIER, State

Moved = set[Hashable]


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
    value = first_value(state, request)
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
    value = first_value(state, request)
    if request.key not in state.entries:
        state.make(request.key, value.clone(), (request.client, request.epoch))
    return set()


def push(state: State, request: Request) -> Moved:
    """Aside, until the round ends, or at once into the value."""
    value = pushed(state, request)
    entry, worker, contribution = state.entries[request.key], request.client, (request.rows, value)
    if state.consistency.rounds:
        entry.push(state.clocks.at[worker], worker, contribution)
    else:
        entry.apply({worker: [contribution]}, len(state.clocks.at), state.optimizer, state.rule)
    return set()


def pull(state: State, request: Request) -> Moved:
    """The value is read when it is answered; so too for peek. {"step": 3}: that of a step, of a key with leases."""
    check_key(state, request)
    if type(wanted := request.options.get("step")) is int:
        leases = leases_of(state, request)
        _come_to(state, request.key, wanted)
        if wanted != leases.step:
            raise Refused(f"key {request.key!r} is at step {leases.step}: its value of step {wanted} is not there")
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
    """{"said": "done"}: what all shall hear who come to it; of whoever dies, all of them hear it, or none."""
    number = state.barriers.at[request.client] + 1
    if "said" in request.options:
        state.said = number, str(request.options["said"])
    return {BARRIER} if state.barriers.move(request.client, number) else set()


def hold(state: State, request: Request) -> Moved:
    """The servers are to change: this worker will go no further than to this clock before it knows where all of them stop."""
    if state.leases:
        raise Refused(f"servers can't come or go while the parts of {[*state.leases]} are leased")
    state.stops.setdefault(request.client, request.clock)
    return {BARRIER}


def settle(state: State, request: Request) -> Moved:
    """This worker has the answers to all that it has asked, and asks no more until the servers have changed."""
    return set()


def set_optimizer(state: State, request: Request) -> Moved:
    """Done when it is answered: under bsp, after the rounds before it."""
    if not request.options:
        raise Refused("set_optimizer names no optimizer, nor a reduction")
    check_options(state, request.options)
    return set()


def look(state: State, request: Request) -> Moved:
    """For `kv.save`: what there is, or of one key its value, or one of the optimizer's tensors: {"moment": "exp_avg"}."""
    if request.key:
        named_tensor(state, request)
    return set()


def restore(state: State, request: Request) -> Moved:
    """For `kv.load`: what `set_optimizer` was told, or one key's value, and after it each of the optimizer's tensors."""
    moment, value = request.options.get("moment"), request.value
    if not request.key:
        check_options(state, request.options)
        state.optimize(request.options)
        return set()
    entry = between_rounds(state, request)
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


def share(state: State, request: Request) -> Moved:
    """From now on each step of this key has so many parts: {"parts": 8}. Who says so later finds it done."""
    check_key(state, request)
    parts = request.options.get("parts")
    if type(parts) is not int or parts < 1:
        raise Refused(f"parts={parts!r} of {request.key!r} is no number of parts")
    if state.leases.setdefault(request.key, Leases(parts)).parts != parts:
        raise Refused(f"{request.key!r} has {state.leases[request.key].parts} parts, not {parts}")
    return set()


def lease(state: State, request: Request) -> Moved:
    """Answered when there is a part that nobody has."""
    leases_of(state, request)
    return set()


def bring(state: State, request: Request) -> Moved:
    """A part of a step's gradient, {"step": 3, "part": 5}: kept until all are there, which count in their own order.

    {"last": true}: all servers that have other rows of the key have this part, so the step may end here. There it ends when
    somebody speaks of the next: until then a worker may be lost that has not come here, and another need the old weights.
    """
    value, leases = pushed(state, request), leases_of(state, request)
    step, part = (request.options.get(name) for name in ("step", "part"))
    if type(step) is not int or type(part) is not int or not 0 <= part < leases.parts:
        raise Refused(f"step={step!r}, part={part!r} of {request.key!r}: its steps have {leases.parts} parts")
    _come_to(state, request.key, step)
    leases.bring(step, part, value.clone())
    if request.options.get("last"):
        _come_to(state, request.key, step + 1)
    return {request.key}


def _come_to(state: State, key: str, step: int) -> None:
    """End the step before this one, if all its parts are here."""
    leases = state.leases[key]
    if step == leases.step + 1 and (complete := leases.end()) is not None:
        pushes = {number: [(None, gradient)] for number, gradient in complete.items()}
        state.entries[key].apply(pushes, leases.parts, state.optimizer, state.rule)


_ALL: tuple[Callable[[State, Request], Moved], ...] = (
    declare, offer, choose, init, push, pull, pushpull, clock, barrier, hold, settle, set_optimizer, restore, join, leave,
    share, lease, bring,
)  # fmt: skip
OPERATIONS = {function.__name__: function for function in _ALL} | {"peek": pull, "state": look}


def answer(state: State, request: Request) -> torch.Tensor | None:
    """The tensor that an answer carries: a copy of the value, or for `kv.save` of what it asks for."""
    if request.op == "state" and request.key:
        return named_tensor(state, request).clone()
    if request.op == "state":
        parts = {}
        for key, entry in state.entries.items():
            parts[key] = str(entry.like.dtype).removeprefix("torch."), list(entry.like.shape), entry.names, bool(entry.open)
        found = {"workers": sorted(state.clocks.at), "options": state.options, "parts": parts}
        return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)
    if request.op not in READS:
        return None
    return check_key(state, request).read(request.rows, only_look=request.op == "peek", lend=state.lends)


def owner_of(state: State, request: Request) -> tuple[int, ...]:
    """Whose first value a key has; which step's part a worker has leased."""
    if request.op == "lease" and (part := state.leases[request.key].held.get(request.client)) is not None:
        return state.leases[request.key].step, part
    return state.entries[request.key].owner if request.op == "choose" else ()


def said_in(state: State, request: Request) -> str:
    """What somebody has told all in the barrier that a worker has come to last."""
    number, said = state.said
    return said if request.op == "barrier" and state.barriers.at.get(request.client) == number else ""


def place(request: Request) -> Hashable:
    """Where a request waits if it must: None (for all keys), a key, or BARRIER."""
    return BARRIER if request.op in ("barrier", "hold", "settle") else request.key if request.op in (*READS, "lease") else None
