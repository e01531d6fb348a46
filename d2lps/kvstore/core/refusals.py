"""What a request must be for a server to carry it out: each of these raises Refused, in words, where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from d2lps.comm.rank import describe
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Refused, Request
from d2lps.kvstore.core.leases import Leases
from d2lps.kvstore.core.reductions import COMPARE, total
from d2lps.kvstore.core.state import State, made_of

# What values may be: what can be added (bools are or-ed), and what the format of checkpoints has a name for.
KEPT = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
)  # fmt: skip

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


def first_value(state: State, request: Request) -> torch.Tensor:
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


def leases_of(state: State, request: Request) -> Leases:
    """Of a key that is shared out."""
    check_key(state, request)
    if request.key not in state.leases:
        raise Refused(f"{request.op} of {request.key!r}, whose steps have no parts: share comes first")
    return state.leases[request.key]


def whole_of(state: State, key: str) -> str:
    """What a key is, as far as this server knows: "float32[100, 2]"; "float32[3] everywhere"; empty if it does not."""
    there = [state.entries[key].like] if key in state.entries else [*state.offers.get(key, {}).values()]
    return state.wholes.get(key) or (describe(there[0]) if there else "")


def pushed(state: State, request: Request) -> torch.Tensor:
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


def check_options(state: State, options: Mapping[str, Any]) -> None:
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


def between_rounds(state: State, request: Request) -> Entry:
    """A key's entry, of which no round has begun."""
    if (entry := check_key(state, request)).open:
        raise Refused(f"{request.key!r} has pushes of a round that is not over: all workers' clock() comes first")
    return entry


def named_tensor(state: State, request: Request) -> torch.Tensor:
    """The value, or the optimizer's tensor that is named."""
    entry, name = between_rounds(state, request), request.options.get("moment", "")
    if name not in ["", *entry.names]:
        raise Refused(f"{request.key!r} has no {name!r}, only {entry.names}")
    return entry.peek(name)
