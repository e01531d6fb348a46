"""All that a server knows. A log that is played again rebuilds it, and a checkpoint holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from d2lps.kvstore.clocks import Clocks, Front
from d2lps.kvstore.consistency import make_consistency
from d2lps.kvstore.duplicates import Client, Filter
from d2lps.kvstore.entry import Entry
from d2lps.kvstore.events import Request
from d2lps.kvstore.optimizers import Optimizer, make_optimizer

BARRIER = 0  # where those stand that wait for everybody; all others stand at the key that they wait for, or at ALL
Life = tuple[int, int]  # a worker's rank, and which of its lives


class State:
    """The state of a `Server`, which see; what it is made with (consistency, on_loss ...) is not in `state()`."""

    def __init__(
        self,
        workers: Iterable[int],
        consistency: str = "bsp",
        staleness: int = 0,
        on_loss: str = "continue",
        replicate: bool = False,
        store: MutableMapping[Hashable, torch.Tensor] | None = None,
    ) -> None:
        if on_loss not in ("continue", "raise"):
            raise ValueError(f"on_loss={on_loss!r} is unknown: choose 'continue' or 'raise'")
        epochs = dict(workers) if isinstance(workers, dict) else dict.fromkeys(workers, 0)
        self.consistency = make_consistency(consistency, staleness)
        self.on_loss, self.replicate = on_loss, replicate
        self.store: MutableMapping[Hashable, torch.Tensor] = {} if store is None else store
        self.entries: dict[str, Entry] = {}
        self.offers: dict[str, dict[Life, torch.Tensor]] = {}  # first values of which none has been chosen yet
        self.clocks, self.barriers = Clocks(epochs), Front(dict.fromkeys(epochs, 0))
        self.filter = Filter(epochs)
        self.waiting: dict[Hashable, list[Request]] = {}  # executed, but not answered yet: by place, in order
        self.optimizer: Optimizer | None = None
        self.options: dict[str, Any] = {}  # from which the optimizer was made
        self.view = self.number = 0  # of the membership; of the last event that was executed
        self.broken = ""  # why nothing can be asked any more
        self.seen: Counter[int] = Counter()  # reads, by clocks behind; no part of the state: to be looked at

    @property
    def mean(self) -> bool:
        """Whether the optimizer gets the mean of the workers' gradients, or their sum."""
        return self.options.get("reduction", "mean") == "mean"

    def make(self, key: str, value: torch.Tensor, owner: Life) -> None:
        """A key begins, with the value that this life of a worker has brought."""
        self.offers.pop(key, None)
        self.entries[key] = Entry(key, value, self.store, self.optimizer.state(value) if self.optimizer else {}, owner=owner)

    def admit(self, worker: int) -> None:
        """It counts from now on, beginning at the current clock."""
        self.clocks.join(worker)
        self.barriers.add(worker, self.barriers.reached)

    def forget(self, worker: int) -> set[Hashable]:
        """Nobody waits for it any more, nor does it; what it has pushed counts, for that was acknowledged."""
        for where, requests in self.waiting.items():
            self.waiting[where] = [request for request in requests if request.client != worker]
        moved = self.clocks.leave(worker)
        return moved | {BARRIER} if self.barriers.remove(worker) else moved

    def optimize(self, options: Mapping[str, Any]) -> None:
        """A new learning rate keeps the state that there is; another optimizer begins with its own."""
        same = options["name"] == self.options.get("name")
        self.options, self.optimizer = dict(options), optimizer_of(options)
        for entry in self.entries.values():
            begin = self.optimizer.state(entry.value) if self.optimizer else {}
            entry.moments = begin | (entry.moments if same else {})

    # ---- as plain data ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that counts, as plain numbers, strings, tensors and Requests; its tensors are the server's own.

        Requests that wait beyond a gap are left out: they are in no log, and their clients will send them again.
        """
        entries = self.entries.items()
        tensors = {key: entry.peeked() for key, entry in entries}
        return {
            "view": self.view,
            "number": self.number,
            "broken": self.broken,
            "values": {key: value for key, (value, _) in tensors.items()},
            "moments": {key: moments for key, (_, moments) in tensors.items()},
            "versions": {key: {"version": entry.version, "owner": entry.owner} for key, entry in entries},
            "open": {k: {r: {w: list(p) for w, p in pushes.items()} for r, pushes in e.open.items()} for k, e in entries},
            "offers": {key: dict(offers) for key, offers in self.offers.items()},
            "options": dict(self.options),
            "clocks": dict(self.clocks.at),
            "fronts": {key: dict(front.at) for key, front in self.clocks.keys.items()},
            "reached": [self.clocks.all.reached, {key: front.reached for key, front in self.clocks.keys.items()}],
            "barriers": [dict(self.barriers.at), self.barriers.reached],
            "staleness": (self.consistency.staleness, self.consistency.waited),
            "clients": {w: [c.epoch, c.next, c.answered, dict(c.errors), c.over] for w, c in self.filter.clients.items()},
            "waiting": [(where, replace(r, out=None)) for where, requests in self.waiting.items() for r in requests],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the server that gave this `state()`; the tensors are copied."""
        state = deepcopy(state)
        self.view, self.number, self.broken = state["view"], state["number"], state["broken"]
        self.store.clear()
        self.entries = {
            key: Entry(key, value, self.store, state["moments"][key], open=state["open"][key], **state["versions"][key])
            for key, value in state["values"].items()
        }
        self.offers, self.options = state["offers"], state["options"]
        self.optimizer = optimizer_of(self.options)
        reached, fronts = state["reached"]
        self.clocks.all = Front(state["clocks"], reached)
        self.clocks.keys = {key: Front(at, fronts[key]) for key, at in state["fronts"].items()}
        self.barriers = Front(*state["barriers"])
        self.consistency.staleness, self.consistency.waited = state["staleness"]
        self.filter.clients = {worker: Client(*known) for worker, known in state["clients"].items()}
        self.waiting = {}
        for where, request in state["waiting"]:
            self.waiting.setdefault(where, []).append(request)


def optimizer_of(options: Mapping[str, Any]) -> Optimizer | None:
    """The optimizer that `set_optimizer` has named, if it has."""
    hyper = {name: value for name, value in options.items() if name != "reduction"}
    return make_optimizer(**hyper) if hyper else None
