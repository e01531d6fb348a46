"""All that a server knows. A log that is played again rebuilds it, and a checkpoint holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from d2lps.kvstore.core.clocks import Clocks, Front
from d2lps.kvstore.core.consistency import make_consistency
from d2lps.kvstore.core.entry import Entry, Memory, Store
from d2lps.kvstore.core.events import LOSS, Request
from d2lps.kvstore.core.leases import Leases
from d2lps.kvstore.core.optimizers import Optimizer, make_optimizer
from d2lps.kvstore.core.reductions import Rule, make_rule

WINDOW = 1024  # requests beyond a gap that are kept; further ones are dropped, and will come again
BARRIER = 0  # where those stand that wait for everybody; all others stand at the key that they wait for, or at ALL
Life = tuple[int, int]  # a worker's rank, and which of its lives


# ---- exactly once ---------------------------------------------------------------------------------------------------------
#
# A client numbers its requests to a server, and sends again, under the same number, what has not been answered (see `Session`).
# The server executes them in the order of their numbers, each once; whatever comes again is answered again, not executed
# again. So nothing depends on messages arriving once, or in order: the server's side of TCP, kept in the log with the values.

@dataclass
class Known:
    """What a server knows of one life of one client. Errors, kept to be told again, go as the client acknowledges them."""

    epoch: int = 0
    next: int = 1  # the sequence to execute next
    answered: int = 0  # answers to sequences below this one have arrived: the client's low-water mark
    errors: dict[int, str] = field(default_factory=dict)  # of executed requests that were refused, by sequence
    over: bool = False  # it was given up: only a life of a higher epoch can come back
    held: dict[int, Request] = field(default_factory=dict)  # beyond a gap; not in the log, so a crash forgets them

    def hold(self, request: Request) -> None:
        """Keep a request until its turn."""
        if request.sequence < self.next + WINDOW:
            self.held.setdefault(request.sequence, request)

    def pop(self) -> Request | None:
        """The request whose turn it is, if it is here; it counts as executed from now on."""
        request = self.held.pop(self.next, None)
        if request is not None:
            self.next += 1
            self.answered = max(self.answered, request.acknowledged)
            self.errors = {number: text for number, text in self.errors.items() if number >= self.answered}
        return request


class Filter:
    """The server's half.

    >>> filter = Filter({0: 0})
    >>> client = filter.clients[0]
    >>> client.hold(Request("clock", sequence=2))
    >>> client.pop()                                            # its turn has not come
    >>> client.hold(Request("push", sequence=1))
    >>> client.pop().op, client.pop().op, client.next
    ('push', 'clock', 3)
    """

    def __init__(self, epochs: Mapping[int, int]) -> None:
        self.clients = {worker: Known(epoch) for worker, epoch in epochs.items()}

    def stale(self, request: Request) -> str:
        """Why a request is of a life that is over, or not yet announced, or that knows more than we do; empty if it is not."""
        client = self.clients.get(request.client)
        if client and (request.epoch < client.epoch or (client.over and request.epoch == client.epoch)):
            return f"stale epoch: worker {request.client} of epoch {request.epoch} was given up"
        if request.op != "join" and (client is None or request.epoch > client.epoch):
            return f"worker {request.client} of epoch {request.epoch} is not a member: it must join first"
        if client and request.epoch == client.epoch and request.acknowledged > client.next:
            answers, known = request.acknowledged - 1, client.next - 1
            return (
                f"{LOSS}: worker {request.client} has the answers to {answers}, this server knows of "
                f"{known}, and of nothing that the others changed: its log was damaged, or not on the disk when power failed"
            )
        return ""

    def begin(self, worker: int, epoch: int, next: int = 1) -> Known:
        """A life of this epoch, if it is a newer one than the one known; what is known of it. next: its first sequence here."""
        if worker not in self.clients or epoch > self.clients[worker].epoch:
            self.clients[worker] = Known(epoch, max(1, next))
        return self.clients[worker]

    def end(self, worker: int) -> None:
        """This life is over: its requests are stale from now on."""
        if worker in self.clients:
            self.clients[worker] = Known(self.clients[worker].epoch, over=True)

    def drop_held(self) -> None:
        """Forget what waits beyond gaps: it will come again, under the new membership."""
        for client in self.clients.values():
            client.held.clear()


# ---- all of it -------------------------------------------------------------------------------------------------------------


class State:
    """The state of a `Server`, which see; what it is made with (consistency ...) is not in `state()`."""

    lends = False  # whether its answers may hold values themselves, for a driver that sees to it that nobody changes them

    def __init__(
        self,
        workers: Iterable[int],
        consistency: str = "bsp",
        staleness: int = 0,
        replicate: bool = False,
        store: Store | None = None,
    ) -> None:
        epochs = dict(workers) if isinstance(workers, dict) else dict.fromkeys(workers, 0)
        self.consistency = make_consistency(consistency, staleness)
        self.replicate = replicate
        self.store: Store = Memory() if store is None else store
        self.entries: dict[str, Entry] = {}
        self.offers: dict[str, dict[Life, torch.Tensor]] = {}  # first values of which none has been chosen yet
        self.wholes: dict[str, str] = {}  # of keys that lie elsewhere, or in parts: what the whole is, as `declare` has it
        self.leases: dict[str, Leases] = {}  # of keys whose batch is shared out part by part
        self.clocks, self.barriers = Clocks(epochs), Front(dict.fromkeys(epochs, 0))
        self.said = 0, ""  # the last word that somebody had for all: in which barrier, and what
        self.filter = Filter(epochs)
        self.waiting: dict[Hashable, list[Request]] = {}  # executed, but not answered yet: by place, in order
        self.stops: dict[int, int] = {}  # before the servers change: how far each worker will go, and the furthest goes for all
        self.options: dict[str, Any] = {}  # of `set_optimizer`, from which these two are made
        self.optimizer, self.rule = made_of(self.options)
        self.view = self.number = 0  # of the membership; of the last event that was executed
        self.seen: Counter[int] = Counter()  # reads, by clocks behind; no part of the state: to be looked at

    def make(self, key: str, value: torch.Tensor, owner: Life) -> None:
        """A key begins, with the value that this life of a worker has brought."""
        self.offers.pop(key, None)
        self.entries[key] = Entry(key, value, self.store, self.optimizer.state(value) if self.optimizer else {}, owner=owner)

    def admit(self, worker: int) -> None:
        """It counts from now on, beginning at the current clock."""
        self.clocks.join(worker)
        self.barriers.add(worker, self.barriers.reached)

    def forget(self, worker: int) -> set[Hashable]:
        """Nobody waits for it any more, nor does it (see `_may_go`); what it has pushed counts, for that was acknowledged."""
        waits = {where for where, requests in self.waiting.items() if any(request.client == worker for request in requests)}
        self.barriers.remove(worker)
        for leases in self.leases.values():
            leases.give_back(worker)
        return self.clocks.leave(worker) | {BARRIER} | self.leases.keys() | waits

    @property
    def settled(self) -> bool:
        """Whether all workers wait for the servers to change, so that nothing else is open: no round, no read."""
        return self._all_wait("settle")

    @property
    def stuck(self) -> bool:
        """Whether some workers wait for the servers to change, and all others in a barrier, for those."""
        return not self.settled and self._all_wait("settle", "barrier") and not self._all_wait("barrier")

    def _all_wait(self, *ops: str) -> bool:
        waiting = {request.client for request in self.waiting.get(BARRIER, ()) if request.op in ops}
        return bool(self.clocks.at) and waiting >= self.clocks.at.keys()

    def optimize(self, options: Mapping[str, Any]) -> None:
        """A new learning rate keeps the state that there is; another optimizer begins with its own."""
        same = options.get("name") == self.options.get("name")
        self.options, (self.optimizer, self.rule) = dict(options), made_of(options)
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
            "values": {key: value for key, (value, _) in tensors.items()},
            "moments": {key: moments for key, (_, moments) in tensors.items()},
            "versions": {key: {"version": entry.version, "owner": entry.owner} for key, entry in entries},
            "open": {k: {r: {w: list(p) for w, p in pushes.items()} for r, pushes in e.open.items()} for k, e in entries},
            "offers": {key: list(offers.items()) for key, offers in self.offers.items()},
            "wholes": dict(self.wholes),
            "leases": {key: leases.state() for key, leases in self.leases.items()},
            "options": dict(self.options),
            "clocks": dict(self.clocks.at),
            "fronts": {key: dict(front.at) for key, front in self.clocks.keys.items()},
            "past": [self.clocks.all.past(), {key: front.past() for key, front in self.clocks.keys.items()}],
            "stops": dict(self.stops),
            "barriers": [dict(self.barriers.at), self.barriers.reached],
            "said": self.said,
            "staleness": (self.consistency.staleness, self.consistency.waited),
            "clients": {w: [c.epoch, c.next, c.answered, dict(c.errors), c.over] for w, c in self.filter.clients.items()},
            "waiting": [(where, r) for where, requests in self.waiting.items() for r in requests],
        }

    def beginning(self) -> dict[str, Any]:
        """What a server that comes now has to know of this one's `state()`: who takes part, and how far they are, but no key."""
        clients = {worker: [client.epoch, 1, 0, {}, client.over] for worker, client in self.filter.clients.items()}
        none: dict[str, Any] = {name: {} for name in ("values", "moments", "versions", "open", "offers", "fronts")}
        return self.state() | none | {"past": [self.clocks.all.past(), {}], "clients": clients, "waiting": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Become the server that gave this `state()`; the tensors are copied."""
        state = deepcopy(state)
        self.view, self.number = state["view"], state["number"]
        self.store.clear()
        self.entries = {
            key: Entry(key, value, self.store, state["moments"][key], open=state["open"][key], **state["versions"][key])
            for key, value in state["values"].items()
        }
        self.offers = {key: dict(offers) for key, offers in state["offers"].items()}
        self.wholes, self.options = state["wholes"], state["options"]
        self.leases = {key: Leases(*leases) for key, leases in state["leases"].items()}
        self.optimizer, self.rule = made_of(self.options)
        past, fronts = state["past"]
        self.clocks.all = Front(state["clocks"], *past)
        self.clocks.keys = {key: Front(at, *fronts[key]) for key, at in state["fronts"].items()}
        self.barriers, self.said, self.stops = Front(*state["barriers"]), state["said"], state["stops"]
        self.consistency.staleness, self.consistency.waited = state["staleness"]
        self.filter.clients = {worker: Known(*known) for worker, known in state["clients"].items()}
        self.waiting = {}
        for where, request in state["waiting"]:
            self.waiting.setdefault(where, []).append(request)


def made_of(options: Mapping[str, Any]) -> tuple[Optimizer | None, Rule]:
    """The optimizer that `set_optimizer` has named, if it has, and the rule of what it gets; ValueError."""
    hyper = dict(options)
    name = hyper.pop("name", None)
    rule = make_rule(hyper.pop("reduction", "mean" if options else "sum"), hyper.pop("trim", None))
    if name is None and hyper:
        raise ValueError(f"{hyper} without an optimizer: name one")
    return None if name is None else make_optimizer(str(name), **hyper), rule
