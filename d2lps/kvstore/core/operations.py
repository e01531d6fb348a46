"""What clients can ask of a server, one function an operation; what else belongs to it stands above it (see `Operation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from d2lps.comm.rank import describe
from d2lps.kvstore.core.clocks import Moved
from d2lps.kvstore.core.entry import Entry, Offer
from d2lps.kvstore.core.events import Refused, Request
from d2lps.kvstore.core.optimizers import made_of
from d2lps.kvstore.core.reductions import COMPARE, total
from d2lps.kvstore.core.saving import Contents, Held
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.table import MEETING, operation

# What values may be: what can be added (bools are or-ed), and what the format of checkpoints has a name for.
KEPT = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
)  # fmt: skip


# ---- what answers wait for, and carry -------------------------------------------------------------------------------------


def fresh(server: Server, request: Request) -> bool:
    """The slowest worker is near enough."""
    return server.consistency.may_read(request.clock, server.clocks.slowest(request.key))


def met(server: Server, request: Request) -> bool:
    """All live workers are there."""
    waiting = server.waiting[MEETING]
    if len(waiting) < len(server.clocks.at):  # as it is but for the last one who comes
        return False
    return {other.client for other in waiting} >= server.clocks.at.keys()


def read(server: Server, request: Request) -> None:
    """It sees the rounds before its own clock, no more and no less."""
    slowest = server.clocks.slowest(request.key)
    server.close(request.key, min(request.clock, slowest))
    server.seen[int(max(0, request.clock - slowest))] += 1


def value(server: Server, request: Request) -> Mapping[str, Any]:
    """A copy of the value, as it is now."""
    return {"value": check_key(server, request).read(request.rows, only_look=request.op == "peek")}


def content(server: Server, request: Request) -> Mapping[str, Any]:
    """For `kv.save`: what there is, or of one key its value, or one of the optimizer's tensors: {"moment": "exp_avg"}."""
    if request.key:
        return {"value": named_tensor(server, request).clone()}
    parts = {}
    for key, entry in server.entries.items():
        parts[key] = Held(str(entry.like.dtype).removeprefix("torch."), [*entry.like.shape], [*entry.names], bool(entry.open))
    open_yet = server.clocks.ahead or server.waiting.keys() - {MEETING} or any(entry.open for entry in server.entries.values())
    contents = Contents(sorted(server.clocks.at), dict(server.options), parts, bool(open_yet))
    return {"value": torch.frombuffer(bytearray(msgspec.json.encode(contents)), dtype=torch.uint8)}


# ---- first values ---------------------------------------------------------------------------------------------------------


@operation()
def declare(server: Server, request: Request) -> None:
    """What a key is as a whole, where it lies in parts, or elsewhere: kept by its home, which its name alone determines.

    options: {"whole": "float32[100, 2]"}. Who is the first to say so is right.
    """
    whole = str(request.options.get("whole"))
    if (known := whole_of(server, request.key)) not in ("", whole):
        raise Refused(f"key {request.key!r} is {known}, not {whole}")
    server.wholes[request.key] = whole


@operation()
def offer(server: Server, request: Request) -> None:
    """A first value of one part, kept until one worker's has been chosen for all parts."""
    first, mine = first_value(server, request), (request.client, request.epoch)
    if request.key not in server.entries:
        offers = server.offers.setdefault(request.key, [])
        if all(offer.owner != mine for offer in offers):
            offers.append(Offer(mine, first.clone()))


@operation(carries=lambda server, request: {"owner": server.entries[request.key].owner})
def choose(server: Server, request: Request) -> None:
    """The first value shall be the one that this life of a worker has offered, or who asks, if nobody is named.

    If that was done before, nothing: the answer says whose value it is.
    """
    wanted = request.options.get("owner", [request.client, request.epoch])
    if request.key not in server.entries:
        offers = server.offers.get(request.key, [])
        found = [offer for offer in offers if list(offer.owner) == wanted]
        if not found:
            there = [offer.owner for offer in offers]
            raise Refused(f"choose of {request.key!r}: worker and life {wanted!r} have offered no value, only {there}")
        server.make(request.key, found[0].value, found[0].owner)


@operation()
def init(server: Server, request: Request) -> None:
    """The first writer wins."""
    first = first_value(server, request)
    if request.key not in server.entries:
        server.make(request.key, first.clone(), (request.client, request.epoch))


# ---- pushes and reads -----------------------------------------------------------------------------------------------------


@operation()
def push(server: Server, request: Request) -> None:
    """Aside, until the round ends, or at once into the value."""
    contribution = request.rows, pushed(server, request)
    entry, worker = server.entries[request.key], request.client
    if server.consistency.rounds:
        entry.push(server.clocks.at[worker], worker, contribution)
    else:
        entry.apply({worker: [contribution]}, len(server.clocks.at), server.optimizer, server.rule)


@operation("key", until=fresh, then=read, carries=value)
@operation("key", until=fresh, then=read, carries=value, name="peek")
def pull(server: Server, request: Request) -> None:
    """The value is read when it is answered; so too for peek."""
    check_key(server, request)


@operation("key", until=fresh, then=read, carries=value)
def pushpull(server: Server, request: Request) -> Moved:
    """A push that ends the worker's round for this key; what comes back is read after that round."""
    push(server, request)
    return server.clocks.end(request.client, request.key)


@operation(until=fresh, then=lambda server, request: server.optimize(request.options))
def set_optimizer(server: Server, request: Request) -> None:
    """Done when it is answered: under bsp, after the rounds before it."""
    if not request.options:
        raise Refused("set_optimizer names no optimizer, nor a reduction")
    check_options(server, request.options)


# ---- files ----------------------------------------------------------------------------------------------------------------


@operation(carries=content)
def state(server: Server, request: Request) -> None:
    """For `kv.save`: see `content`."""
    if request.key:
        named_tensor(server, request)


@operation()
def restore(server: Server, request: Request) -> None:
    """For `kv.load`: what `set_optimizer` was told, or one key's value, and after it each of the optimizer's tensors."""
    moment, given = request.options.get("moment"), request.value
    if not request.key:
        check_options(server, request.options)
        return server.optimize(request.options)
    entry, told = between_rounds(server, request), "nothing" if given is None else describe(given)
    if given is None or (told != describe(entry.like) and (given.dim() or not moment)):
        raise Refused(f"{request.key!r} is {describe(entry.like)}, not {told}")
    if moment:
        entry.moments = entry.moments | {str(moment): given.clone()}
    else:
        entry.moments = server.optimizer.state(given) if server.optimizer else {}
        entry.put(given.clone())
    return None


# ---- iterations, and who takes part ---------------------------------------------------------------------------------------


@operation()
def clock(server: Server, request: Request) -> Moved:
    """This worker has ended so many iterations."""
    at = server.clocks.at[request.client]
    if request.clock < at:
        raise Refused(f"worker {request.client} is at clock {at}: it cannot go back to {request.clock}")
    return server.clocks.tick(request.client, request.clock)


@operation("meeting", until=met, carries=lambda server, request: {"said": server.clients[request.client].said})
def barrier(server: Server, request: Request) -> None:
    """{"said": "done"}: a word for all who come to it. If the speaker dies, either all of them hear the word or none."""


@operation()
def join(server: Server, request: Request) -> None:
    """This worker counts from now on, beginning at the current clock."""
    if server.changing or request.options.get("changes", 0) != server.changes:
        raise Refused(f"worker {request.client} cannot join while the servers change: try again")
    server.clocks.join(request.client)


@operation()
def leave(server: Server, request: Request) -> set[Any]:
    """Nobody waits for this worker from now on."""
    return server.forget(request.client)


# ---- what is refused ------------------------------------------------------------------------------------------------------


def check_key(server: Server, request: Request) -> Entry:
    """The entry of a key that there is, if it has the rows that are asked for."""
    if request.key not in server.entries:
        known = f"{server.wholes[request.key]}, and does not lie here" if request.key in server.wholes else "unknown"
        raise Refused(f"key {request.key!r} is {known}: init comes first")
    entry, rows = server.entries[request.key], request.rows
    if rows is None:
        return entry
    if rows.dtype != torch.int64 or rows.dim() != 1 or entry.like.dim() == 0:
        found = f"{describe(rows)} of {describe(entry.like)}"
        raise Refused(f"rows of {request.key!r} must be int64[n], and it must have rows; not {found}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(entry.like):
        wrong = f"not from {int(rows.min())} to {int(rows.max())}"
        raise Refused(f"rows of {request.key!r} go from 0 to {len(entry.like) - 1}, {wrong}")
    return entry


def first_value(server: Server, request: Request) -> torch.Tensor:
    """The value that a key may begin with."""
    key, given, budget = request.key, request.value, server.store.budget
    if given is None:
        raise Refused(f"{request.op} of {key!r} needs a value")
    if given.dtype not in KEPT:
        kept = ", ".join(str(dtype).removeprefix("torch.") for dtype in KEPT)
        raise Refused(f"key {key!r} is {describe(given)}, which cannot be added up or stored: choose one of {kept}")
    if budget is not None and given.nbytes > budget:
        raise Refused(f"{key!r} has {given.nbytes} bytes, and this server's memory a budget of {budget}")
    if (known := whole_of(server, key)) not in ("", describe(given)):
        raise Refused(f"key {key!r} already holds {known}, not {describe(given)}")
    return given


def whole_of(server: Server, key: str) -> str:
    """What a key is, as far as this server knows: "float32[100, 2]"; "float32[3] everywhere"; empty if it does not."""
    offered = [offer.value for offer in server.offers.get(key, [])]
    there = [server.entries[key].like] if key in server.entries else offered
    return server.wholes.get(key) or (describe(there[0]) if there else "")


def pushed(server: Server, request: Request) -> torch.Tensor:
    """The value of a push that fits."""
    key, given, worker, held = request.key, request.value, request.client, check_key(server, request).like
    if given is None:
        raise Refused(f"a {request.op} of {key!r} needs a value")
    shape = held.shape if request.rows is None else (len(request.rows), *held.shape[1:])
    if given.shape != shape or given.dtype != held.dtype:
        raise Refused(f"key {key!r} holds {describe(held)}: {describe(given)} does not fit {list(shape)}")
    if (server.optimizer or server.rule is not total) and not held.dtype.is_floating_point:
        needs = "an optimizer, and any reduction but 'sum', needs floating-point values"
        raise Refused(f"key {key!r} holds {describe(held)}: {needs}")
    at = server.clocks.at[worker]
    if server.consistency.rounds and server.clocks.position(worker, key) > at:
        raise Refused(f"worker {worker} has ended its round {at} of {key!r} with a pushpull: clock comes next")
    return given


def check_options(server: Server, options: Mapping[str, Any]) -> None:
    """What `set_optimizer` may be given."""
    try:
        made_of(options)
    except ValueError as error:
        raise Refused(str(error)) from error
    reduction, workers = options.get("reduction"), len(server.clocks.at)
    if reduction in COMPARE and not server.consistency.rounds:
        raise Refused(f"reduction={reduction!r} compares the pushes of a round: choose consistency 'bsp', which has rounds")
    if reduction == "trimmed_mean" and 2 * (trim := options.get("trim", 1)) >= workers:
        raise Refused(f"trim={trim} at either end leaves nothing of {workers} workers' pushes")


def between_rounds(server: Server, request: Request) -> Entry:
    """A key's entry, of which no round has begun."""
    if (entry := check_key(server, request)).open:
        raise Refused(f"{request.key!r} has pushes of a round that is not over: all workers' clock() comes first")
    return entry


def named_tensor(server: Server, request: Request) -> torch.Tensor:
    """The value, or the optimizer's tensor that is named."""
    entry, name = between_rounds(server, request), request.options.get("moment", "")
    if name not in ["", *entry.names]:
        raise Refused(f"{request.key!r} has no {name!r}, only {entry.names}")
    return entry.peek(name)
