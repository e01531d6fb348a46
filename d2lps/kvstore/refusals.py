"""What a server won't do: found out before it does anything, so that a refused request leaves everything as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from d2lps.comm.rank import describe
from d2lps.kvstore.events import OPS, READS, Request
from d2lps.kvstore.optimizers import make_optimizer
from d2lps.kvstore.tiers import Tiers

if TYPE_CHECKING:
    from d2lps.kvstore.server import Server


def refusal(server: Server, request: Request) -> str:
    """Why the server must refuse; empty if it need not."""
    if request.op not in OPS:
        return f"op {request.op!r} is unknown: choose {', '.join(OPS)}"
    if server.broken and request.op != "leave":
        return server.broken
    if request.client not in server.clocks.at and request.op not in ("join", "leave"):
        return f"worker {request.client} is not a member: it must join first"
    if request.op in ("push", *READS):
        return bad_key(server, request) or (_bad_push(server, request) if "push" in request.op else "")
    return _OTHERS[request.op](server, request) if request.op in _OTHERS else ""


def bad_key(server: Server, request: Request) -> str:
    """Whether a push or pull names a key that there is, and rows that it has."""
    if request.op not in ("push", *READS):
        return ""
    if request.key not in server.entries:
        return f"key {request.key!r} is unknown: init comes first"
    rows, value = request.rows, server.entries[request.key].like
    if rows is None:
        return ""
    if rows.dtype != torch.int64 or rows.dim() != 1 or value.dim() == 0:
        return f"rows of {request.key!r} must be int64[n], and it must have rows; not {describe(rows)} of {describe(value)}"
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(value):
        return f"rows of {request.key!r} go from 0 to {len(value) - 1}, not from {int(rows.min())} to {int(rows.max())}"
    return ""


def _bad_push(server: Server, request: Request) -> str:
    held, pushed = server.entries[request.key].like, request.value
    if pushed is None:
        return f"a {request.op} of {request.key!r} needs a value"
    shape = held.shape if request.rows is None else (len(request.rows), *held.shape[1:])
    if pushed.shape != shape or pushed.dtype != held.dtype:
        return f"key {request.key!r} holds {describe(held)}: {describe(pushed)} does not fit {list(shape)}"
    if server.optimizer and not held.dtype.is_floating_point:
        return f"key {request.key!r} holds {describe(held)}: an optimizer needs floating-point values"
    clocks, worker = server.clocks, request.client
    if server.consistency.rounds and clocks.position(worker, request.key) > clocks.at[worker]:
        return f"worker {worker} has ended its round {clocks.at[worker]} of {request.key!r} with a pushpull: clock comes next"
    return ""


def _bad_init(server: Server, request: Request) -> str:
    if request.value is None:
        return f"init of {request.key!r} needs a value"
    if isinstance(server.store, Tiers) and request.value.nbytes > server.store.budget:
        return f"{request.key!r} has {request.value.nbytes} bytes, and this server's memory a budget of {server.store.budget}"
    held = server.entries[request.key].like if request.key in server.entries else request.value
    if (held.shape, held.dtype) != (request.value.shape, request.value.dtype):
        return f"key {request.key!r} already holds {describe(held)}, not {describe(request.value)}"
    return ""


def _bad_clock(server: Server, request: Request) -> str:
    at = server.clocks.at[request.client]
    return f"worker {request.client} is at clock {at}: it cannot go back to {request.clock}" if request.clock < at else ""


def _bad_optimizer(server: Server, request: Request) -> str:
    options = dict(request.options)
    if (reduction := options.pop("reduction", "mean")) not in ("mean", "sum"):
        return f"reduction={reduction!r} is unknown: choose 'mean' or 'sum'"
    try:
        make_optimizer(str(options.pop("name", "")), **options)
    except ValueError as error:
        return str(error)
    return ""


_OTHERS = {"init": _bad_init, "clock": _bad_clock, "set_optimizer": _bad_optimizer}
