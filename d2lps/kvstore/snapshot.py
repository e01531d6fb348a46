"""A server's state as plain data: to be compared, written to a checkpoint, or given to another server."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from d2lps.kvstore.clocks import Front
from d2lps.kvstore.duplicates import Client
from d2lps.kvstore.entry import Entry
from d2lps.kvstore.optimizers import make_optimizer
from d2lps.kvstore.waiting import Waiting

if TYPE_CHECKING:
    from d2lps.kvstore.server import Server


def snapshot(server: Server) -> dict[str, Any]:
    """Dictionaries of numbers, strings and tensors, and a list of Requests.

    Requests that wait beyond a gap are left out: they are in no log, and their clients will send them again.
    """
    entries, fronts = server.entries.items(), {"": server.clocks.all} | server.clocks.keys
    tensors = {key: entry.peeked() for key, entry in entries}
    return {
        "view": server.view,
        "number": server.number,
        "broken": server.broken,
        "values": {key: value for key, (value, _) in tensors.items()},
        "moments": {key: moments for key, (_, moments) in tensors.items()},
        "versions": {key: entry.version for key, entry in entries},
        "open": {key: {r: {w: list(p) for w, p in pushes.items()} for r, pushes in entry.open.items()} for key, entry in entries},
        "options": dict(server.options),
        "clocks": {key: dict(front.at) for key, front in fronts.items()},
        "reached": {key: front.reached for key, front in fronts.items()},
        "barriers": [dict(server.barriers.at), server.barriers.reached],
        "staleness": server.consistency.staleness,
        "waited": server.consistency.waited,
        "clients": {w: [c.epoch, c.next, c.answered, dict(c.errors), c.over] for w, c in server.filter.clients.items()},
        "waiting": [replace(request, out=None) for request in server.waiting.requests()],
    }


def restore(server: Server, state: dict[str, Any]) -> None:
    """The other way round; what a server is made with (consistency, on_loss ...) is not in the state."""
    state = deepcopy(state)
    server.view, server.number, server.broken = state["view"], state["number"], state["broken"]
    server.store.clear()
    server.entries = {
        key: Entry(key, value, server.store, state["moments"][key], state["versions"][key], state["open"][key])
        for key, value in state["values"].items()
    }
    server.options = state["options"]
    hyper = {name: value for name, value in server.options.items() if name != "reduction"}
    server.optimizer = make_optimizer(**hyper) if hyper else None
    fronts = {key: Front(at, state["reached"][key]) for key, at in state["clocks"].items()}
    server.clocks.all = fronts.pop("")
    server.clocks.keys = fronts
    server.barriers = Front(*state["barriers"])
    server.consistency.staleness, server.consistency.waited = state["staleness"], state["waited"]
    server.filter.clients = {worker: Client(*known) for worker, known in state["clients"].items()}
    server.waiting = Waiting(state["waiting"])
