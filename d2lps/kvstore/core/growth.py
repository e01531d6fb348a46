"""Servers come and go at a barrier: all that they have goes into a file, and from there to the new servers.

The coordinator tells the first server which servers it wants, and that tells all workers together, in their next barrier. There
they do as follows, all at the same line. Where an iteration has begun already, they leave it for a later barrier.

    1. The first live worker writes the file, as kv.save does. Nothing has changed yet.
    2. All join the server that has come, and begin to reckon where keys lie now.
    3. The first live worker lets all servers forget their keys, and gives these to those that there are now, as kv.load does.

Whatever a worker does here for all, the next one does anew if it is killed; a server that is killed finds all of it in its log.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from d2lps.kvstore.core import saving
from d2lps.kvstore.core.events import Membership, Refused, Request
from d2lps.kvstore.core.placement import Part
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.table import operation

# ---- the workers' part ----------------------------------------------------------------------------------------------------


def change(kv: Any, number: int, servers: Sequence[int]) -> None:
    """For a KVWorker, of which all others do the same: from now on there are these servers. number: of the change."""
    before, path = list(kv.placement.servers), kv.transport.room / f"change-{number}.safetensors"
    told: dict[str, Any] = {"servers": before}
    try:
        kv.alone("barrier", partial(_take, path))
    except (Refused, OSError, ValueError) as error:  # on all of them
        put_off = isinstance(error, Refused)
        kv.ask_all(Request("changed", options={"changes": number - put_off})).wait()
        told["failed"] = "" if put_off else str(error)
    else:
        kv.transport.follow({*before, *servers})
        new = [server for server in servers if server not in before]
        join(kv, new, changes=0)
        kv.meet("")  # before all have come to the new server, none of them waits there for the others, or goes ahead
        begin(kv, new)
        moves = kv.placement.follow(servers)
        kv.alone("barrier", partial(_give, kv, number, before, path))
        kv.transport.follow(servers)
        told = {"servers": [*servers], "keys": len({move.key for move in moves}), "nbytes": sum(move.nbytes for move in moves)}
    if told.get("failed") != "":
        _tell(kv, number, told)


def _tell(kv: Any, number: int, told: dict[str, Any]) -> None:
    """The change is over: all workers write down the same, for the coordinator, and for those who come later."""
    kv.transport.changes, draft = number, kv.transport.room / f"change-{number}.by-{kv.rank}"
    draft.write_text(json.dumps(told))
    draft.rename(draft.with_suffix(".json"))


def catch_up(kv: Any) -> None:
    """Follow the changes that this worker has missed, one after the other, as where a key lies depends on it."""
    transport = kv.transport
    while transport.room and (path := transport.room / f"change-{transport.changes + 1}.json").exists():
        servers = json.loads(path.read_text())["servers"]
        kv.placement.follow(servers)
        transport.follow(servers)
        transport.changes += 1


def join(kv: Any, servers: Sequence[int], changes: int) -> int:
    """Become a member of these servers, which know of so many changes; the latest clock at which one of them begins."""
    clock, options = 0, {"changes": changes} if changes else {}
    for server in servers:  # one after the other: while servers change, the first one refuses
        [reply] = kv.ask("join", "", [(Part(server, "", 0), Request("join", options=options))])
        clock = max(clock, reply.clock)
    return clock


def begin(kv: Any, servers: Sequence[int]) -> None:
    """Let these servers know how many iterations have ended here."""
    kv.work("clock", "", [(Part(server, "", 0), Request("clock")) for server in servers])


def _take(path: Path, ask: saving.Ask, found: saving.Found) -> None:
    if any(one.open for one in found.values()):
        raise Refused("an iteration has begun")
    saving.write(path, *saving.collect(ask, found))


def _give(kv: Any, number: int, before: Sequence[int], path: Path, ask: saving.Ask, found: saving.Found) -> None:
    every = [Part(server, "", 0) for server in sorted({*before, *kv.placement.servers})]
    kv.transport.note(f"{before} becoming {kv.placement.servers}")
    ask([(server, Request("clear")) for server in every])
    kv.give(path, ask, saving.look(ask, kv.placement.servers))
    kv.declare("", list(kv.placement.parts))
    ask([(server, Request("changed", options={"changes": number})) for server in every])


# ---- the servers' part ----------------------------------------------------------------------------------------------------


@operation()
def clear(server: Server, request: Request) -> None:
    """All keys go: what they have has been written to a file."""
    if told := [key for found in server.more.values() for key in found]:
        raise Refused(f"servers can't come or go while the parts of {told} are leased")
    for key in [*server.entries]:
        server.entries.pop(key).drop()
    server.offers = {}


@operation()
def changed(server: Server, request: Request) -> None:
    """The servers have changed so often, {"changes": 1}; or still as often as before: then workers could not let them yet."""
    changes = request.options.get("changes")
    if type(changes) is not int:
        raise Refused(f"changes={changes!r} is no number of changes")
    server.changes, server.changing = changes, False
    if server.changes >= server.wanted.view:
        server.wanted = Membership(0, ())
