"""What goes from one server to another when servers come or go: a file for each pair, whole or not there.

Until all that has to go lies in such files, nothing has changed anywhere. Then each server takes what is for it, in its own
time, and as often as it is killed meanwhile: the files stay until the last one has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace as changed

from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Refused, Reply, Request
from d2lps.kvstore.core.pieces import Pieces, Plain
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.table import MEETING, operation
from d2lps.kvstore.storage.durable import Durable, load_state, logs_in, save_state

Order = dict[str, Any]  # what the coordinator wants of one server: see `Resizing`


def carry_out(word: str, order: Order, server: Server, durable: Durable | None) -> tuple[Order, list[Reply]]:
    """What a server says to an order, when it has carried it out, and the answers that workers get then.

    "settled": what it has, {name: (shape, dtype)}, or that it is too early, or None: it never will be. "resume": workers go on.
    "give": see there. "take": what it was given is safe here. What was done before is not done again, only said.
    """
    said, replies, changed = {"view": order["view"]}, list[Reply](), False
    if word == "settled" and stuck(server):
        said["parts"] = None
    elif word == "settled" and not settled(server):
        said["view"] = server.view
    elif word == "settled":
        likes = {name: entry.like for name, entry in server.entries.items()}
        said["parts"] = {name: (list(like.shape), str(like.dtype).removeprefix("torch.")) for name, like in likes.items()}
    elif word == "resume" and stuck(server):
        replies, changed = resume(server), True
    elif word == "give":
        give(server, order)
    elif word == "take" and server.view < order["view"]:
        replies, changed = take(server, order), True
    if changed and durable is not None:
        durable.checkpoint()
    return said, replies


def give(server: Server, order: Order) -> None:
    """Write the parts that are for others, and what else a newcomer must know; nothing of what is written already."""
    pieces = Pieces(server.entries.values())
    for dst, names in order["gives"].items():
        parcel = Path(order["folder"], f"{order['server']}-{dst}")
        if not logs_in(parcel):
            content = {"parts": {name: pieces.cut(name) for name in names}, "beginning": beginning(server)}
            save_state(parcel, order["view"], content)


def take(server: Server, order: Order) -> list[Reply]:
    """Become what this server is in the new view: the answers that are now due, as soon as that is safe."""
    came = [load_state(Path(order["folder"], f"{src}-{order['server']}")) for src in order["takes"]]
    if order["new"]:
        server.restore(came[0]["beginning"] | {"number": server.number})
    others = [Entry(name, value, None, *rest) for parcel in came for name, (value, *rest) in parcel["parts"].items()]
    pieces = Pieces([*server.entries.values(), *others])
    new = {name: pieces.cut(name) for name in order["parts"] if name not in server.entries}
    for parcel in came:
        server.wholes |= parcel["beginning"]["wholes"]
    return resize(server, order["view"], set(order["parts"]), new)


# ---- a server while others come and go: none of this is in its log, so a checkpoint must come before the answers -----------


@operation(
    "meeting",
    until=lambda server, request: server.clocks.at.keys() <= server.stops.keys(),
    carries=lambda server, request: {"clock": max(server.stops.values(), default=0)},
)
def hold(server: Server, request: Request) -> None:
    """The servers are to change: this worker will go no further than to this clock before it knows where all of them stop."""
    if server.more.get("leases"):
        raise Refused(f"servers can't come or go while the parts of {[*server.more['leases']]} are leased")
    server.stops.setdefault(request.client, request.clock)


@operation("meeting", until=lambda server, request: server.view > request.view)
def settle(server: Server, request: Request) -> None:
    """This worker has the answers to all that it has asked, and asks no more until the servers have changed."""


def settled(server: Server) -> bool:
    """Whether all workers wait for the servers to change, so that nothing else is open: no round, no read."""
    return _all_wait(server, "settle")


def stuck(server: Server) -> bool:
    """Whether some workers wait for the servers to change, and all others in a barrier, for those."""
    return not settled(server) and _all_wait(server, "settle", "barrier") and not _all_wait(server, "barrier")


def _all_wait(server: Server, *ops: str) -> bool:
    waiting = {request.client for request in server.waiting.get(MEETING, ()) if request.op in ops}
    return bool(server.clocks.at) and waiting >= server.clocks.at.keys()


def resize(server: Server, view: int, stay: set[str], come: dict[str, Plain]) -> list[Reply]:
    """Other servers are in force, and other parts are here."""
    for key in server.entries.keys() - stay:
        server.entries.pop(key).drop()
    for key, (value, moments, version, owner) in come.items():
        server.entries[key] = Entry(key, value, server.store, moments, version, owner)
    server.view, server.stops, server.offers = view, {}, {}
    server.clocks.ahead, server.clocks.over = {}, set()
    return server.go_on({MEETING})


def resume(server: Server) -> list[Reply]:
    """A change of servers is called off: who has stopped for it goes on."""
    settling = [request for request in server.waiting[MEETING] if request.op == "settle"]
    server.waiting[MEETING] = [request for request in server.waiting[MEETING] if request.op != "settle"]
    server.stops = {}
    return [Reply(*request.retry_key, op="settle", view=server.view) for request in settling]


def beginning(server: Server) -> dict[str, Any]:
    """What a server that comes now has to know of this one's `state()`: who takes part, and how far they are, but no key."""
    none: dict[str, Any] = {name: {} for name in ("values", "moments", "versions", "open", "offers")}
    none["clocks"] = to_builtins(changed(server.clocks, ahead={}, over=set()))
    none["clients"] = {worker: {"epoch": client.epoch, "over": client.over} for worker, client in server.clients.items()}
    return server.state() | none | {"waiting": []}
