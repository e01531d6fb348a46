"""The server: a pure state machine. It is given events, changes its state, and says what it wants done.

No clock, no sockets, no threads, no chance: the same events give the same values, in a simulation, in a process, and when
a log is played again. A driver carries out the effects in their order. What clients can ask for stands in `operations`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from msgspec import convert, to_builtins
from msgspec.structs import replace as changed

from d2lps.kvstore.core.clocks import ALL, Clocks, Consistency, make_consistency
from d2lps.kvstore.core.compression import decoded
from d2lps.kvstore.core.entry import Entry, Memory, Offer, Store
from d2lps.kvstore.core.events import Append, Effect, Event, Lost, Membership, Refused, Reply, Request, Send, replace
from d2lps.kvstore.core.exactly_once import ClientRecord, Life, stale
from d2lps.kvstore.core.optimizers import made_of
from d2lps.kvstore.core.table import MEETING, MORE, OPERATIONS, at_once

# What a checkpoint holds beside the entries, each an attribute of a Server; a log that is played again rebuilds it.
STATE: dict[str, Any] = {
    "view": int,  # of the membership
    "number": int,  # of the last event that was executed
    "options": dict[str, Any],  # of `set_optimizer`, from which the optimizer and the rule are made
    "wholes": dict[str, str],  # of keys that lie elsewhere, or in parts: what the whole is, as `declare` has it
    "offers": dict[str, list[Offer]],  # first values of which none has been chosen yet
    "clocks": Clocks,
    "consistency": Consistency,
    "clients": dict[int, ClientRecord],
    "wanted": Membership,  # other servers, of which workers hear in their next barrier
    "changing": bool,  # whether they have heard, and have not said yet what came of it
    "changes": int,  # how often servers have come or gone
    "more": dict[str, Any],  # by name, what `MORE` says
}


class Server:
    """Tensors by key, for workers that push and pull.

    >>> server = Server(workers=[0], consistency="asp")
    >>> server.step(Request("init", key="w", value=torch.zeros(2), sequence=1))[-1].error
    ''
    >>> [type(effect).__name__ for effect in server.step(Request("push", key="w", value=torch.ones(2), sequence=2))]
    ['Append', 'Reply']
    >>> server.step(Request("pull", key="w", sequence=3))[-1].value
    tensor([1., 1.])
    >>> server.step(Request("pull", key="v", sequence=4))[-1].error
    "key 'v' is unknown: init comes first"

    workers: the ranks of those who take part from the start, or {rank: epoch}. consistency, staleness: see `clocks`.
    replicate: every event goes to a backup too. store: where its tensors lie, such as `Tiers`; by default all are in memory.

    Each request is executed once, in the order of its client's sequence, and is in the log before it is answered. An answer
    may have to wait for other workers; the request then stays in `waiting`. Each server of a run goes by what it sees alone.
    Without an optimizer, what is pushed is added to the value. With one, a push is a gradient: the optimizer gets what a rule
    (see `reductions`) makes of a round's. Without rounds (all but bsp) each push is a step; of a mean, it is its share.
    Memory: the values, the optimizer's state, and under bsp the pushes of open rounds, up to m n bytes.
    """

    def __init__(
        self, workers: Iterable[int], consistency: str = "bsp", staleness: int = 0, replicate: bool = False,
        store: Store | None = None,
    ) -> None:  # fmt: skip
        epochs = dict(workers) if isinstance(workers, dict) else dict.fromkeys(workers, 0)
        self.replicate, self.entries = replicate, dict[str, Entry]()
        self.store: Store = Memory() if store is None else store
        self.offers: dict[str, list[Offer]] = {}
        self.wholes: dict[str, str] = {}
        self.clocks, self.consistency = Clocks(dict.fromkeys(epochs, 0)), make_consistency(consistency, staleness)
        self.clients = {worker: ClientRecord(epoch) for worker, epoch in epochs.items()}
        self.waiting: dict[Hashable, list[Request]] = {}  # by place, in order
        self.wanted, self.changing, self.changes = Membership(0, ()), False, 0
        self.options, self.more = dict[str, Any](), {name: kind() for name, kind in MORE.items()}
        self.view, self.number, (self.optimizer, self.rule) = 0, 0, made_of(self.options)
        self.seen: Counter[int] = Counter()  # reads, by clocks behind; no part of the state: to be looked at

    def step(self, event: Event) -> list[Effect]:
        """Let something happen; what is now to be done, in order."""
        effects: list[Effect] = _STEPS[type(event)](self, event)
        return effects

    # ---- events -----------------------------------------------------------------------------------------------------------

    def _request(self, request: Request) -> list[Effect]:
        if request.sequence < 1:
            return [self._reply(request, f"sequence {request.sequence}: a client's requests are numbered from 1")]
        if request.view != self.view:
            return [self._reply(request, f"stale view: this server is in view {self.view}, the request in {request.view}")]
        if error := stale(self.clients.get(request.client), request):
            return [self._reply(request, error)]
        if request.client not in self.clients or request.epoch > self.clients[request.client].epoch:
            self.clients[request.client] = ClientRecord(request.epoch, max(1, request.acknowledged))
        client = self.clients[request.client]
        if request.sequence < client.next:
            return self._again(request, client)
        client.hold(request)
        effects: list[Effect] = []
        while (ready := client.pop()) is not None:
            effects += self._execute(ready)
        return effects

    def _again(self, request: Request, client: ClientRecord) -> list[Effect]:
        """It was executed: only the answer is due once more, if it has not arrived. A read is read anew."""
        waiting = self.waiting.get(OPERATIONS[request.op].place(request), ()) if request.op in OPERATIONS else ()
        if request.sequence < client.answered or any(request.retry_key == other.retry_key for other in waiting):
            return []
        try:
            return [self._reply(request, client.errors.get(request.sequence, ""))]
        except Refused as reason:
            return [self._reply(request, str(reason))]

    def _execute(self, request: Request) -> list[Effect]:
        effects = self._logged(request)
        try:
            if request.op not in OPERATIONS:
                raise Refused(f"op {request.op!r} is unknown: choose {', '.join(OPERATIONS)}")
            if request.client not in self.clocks.at and request.op not in ("join", "leave"):
                raise Refused(f"worker {request.client} is not a member: it must join first")
            if "codec" in request.options:
                request = decoded(request, self.entries)
            asked = OPERATIONS[request.op]
            moved = asked.do(self, request) or set()
            if asked.until is not at_once:  # it waits for the clock at which it was asked, however far its worker goes on
                request = replace(request, clock=self.clocks.position(request.client, request.key))
            return effects + self._go_on(moved, request)
        except Refused as reason:
            self.clients[request.client].errors[request.sequence] = str(reason)
            return [*effects, self._reply(request, str(reason))]

    def _lost(self, event: Lost) -> list[Effect]:
        if event.worker not in self.clocks.at and event.worker in self.clients:
            return []
        effects = self._logged(event)
        epoch = self.clients.get(event.worker, ClientRecord()).epoch  # it may be lost before it is heard for the first time
        self.clients[event.worker] = ClientRecord(epoch, over=True)
        return effects + self._go_on(self.forget(event.worker))

    def _membership(self, event: Membership) -> list[Effect]:
        if event.wanted and event.view > max(self.wanted.view, self.changes):
            self.wanted = event
        elif not event.wanted and event.view > self.view:
            self.view = event.view
            for client in self.clients.values():
                client.held.clear()  # it will come again, under the new membership
        else:
            return []
        return self._logged(event)

    def _copied(self, send: Send) -> list[Effect]:
        """A backup does what its primary did, in that order, without answering anybody but the primary."""
        error, effects = "", []
        if send.view < self.view:
            error = f"stale view: this backup is in view {self.view}, its primary in {send.view}"
        elif send.number > self.number + 1:
            error = f"event {send.number} came after {self.number}: some are missing"
        elif send.number == self.number + 1:
            effects = [effect for effect in self.step(send.event) if isinstance(effect, Append)]
        return [*effects, Reply(-1, 0, send.number, op="send", error=error, view=self.view)]

    def _logged(self, event: Request | Lost | Membership) -> list[Effect]:
        self.number += 1
        return [Append(event), *([Send(self.number, event, self.view)] if self.replicate else [])]

    # ---- answers ----------------------------------------------------------------------------------------------------------

    def _go_on(self, moved: set[Any], new: Request | None = None) -> list[Reply]:
        """Where the slowest worker has moved on, close rounds; then answer all who need wait no longer."""
        if new is not None and OPERATIONS[new.op].at == "meeting":
            self.waiting.setdefault(MEETING, []).append(new)
            moved, new = moved | ({MEETING} if self._may_go(new) else set()), None
        if ALL in moved:
            self.consistency.round_ended(self.clocks.spread())
            moved = {*moved, *self.entries}
        free: list[Request] = []
        for where in [at for at in (moved if len(moved) < 2 else self.waiting) if at in moved and at in self.waiting]:
            free += self._freed(where)
        if new is not None and self._may_go(new):
            free.append(new)
        elif new is not None:
            self.waiting.setdefault(OPERATIONS[new.op].place(new), []).append(new)
            self.consistency.waited = True
        # A read sees the rounds before its own clock, however far the slowest has come at one go, as when another one leaves.
        reads = [request for request in free if OPERATIONS[request.op].at == "key"]
        replies = [self._answer(request) for request in sorted(reads, key=lambda request: request.clock)]
        # One key is looked up; of many, all that there are are looked at, in their order, the same in every process.
        for key in moved if len(moved) < 2 else self.entries:
            if isinstance(key, str) and key in moved and key in self.entries:
                self.close(key, self.clocks.slowest(key))
        replies += [self._answer(request) for request in free if OPERATIONS[request.op].at != "key"]
        return sorted(replies, key=lambda reply: -reply.priority)

    def _may_go(self, request: Request) -> bool:
        """Who has left, or was given up, waits for nobody."""
        return request.client not in self.clocks.at or OPERATIONS[request.op].until(self, request)

    def _freed(self, where: Hashable) -> list[Request]:
        """Those who need wait here no longer."""
        looked_at = [(request, self._may_go(request)) for request in self.waiting[where]]
        self.waiting[where] = [request for request, goes in looked_at if not goes]
        if not self.waiting[where]:
            del self.waiting[where]
        free = [request for request, goes in looked_at if goes]
        if where == MEETING:
            self._tell(free)
        return free

    def _tell(self, met: list[Request]) -> None:
        """All who go from a barrier together hear what one of them has said, or nobody does; or which servers are wanted."""
        words = [str(request.options["said"]) for request in met if "said" in request.options]
        said = next(filter(None, words), "")
        if not words and self.wanted.servers:
            said, self.changing = json.dumps([self.wanted.view, *self.wanted.servers]), True
        for request in met:
            self.clients[request.client].said = said

    def _answer(self, request: Request) -> Reply:
        if request.client not in self.clocks.at and (given_up := stale(self.clients.get(request.client), request)):
            return self._reply(request, given_up)
        OPERATIONS[request.op].then(self, request)
        return self._reply(request)

    def _reply(self, request: Request, error: str = "") -> Reply:
        told: dict[str, Any] = {"clock": self.clocks.at.get(request.client, 0), "priority": request.priority, "view": self.view}
        if not error:
            told |= OPERATIONS[request.op].carries(self, request)
        return Reply(*request.retry_key, op=request.op, key=request.key, error=error, **told)

    # ---- what operations do -----------------------------------------------------------------------------------------------

    def make(self, key: str, value: torch.Tensor, owner: Life) -> None:
        """A key begins, with the value that this life of a worker has brought."""
        self.offers.pop(key, None)
        self.entries[key] = Entry(key, value, self.store, self.optimizer.state(value) if self.optimizer else {}, owner=owner)

    def close(self, key: str, before: float) -> None:
        """End the rounds of a key before this clock."""
        if (entry := self.entries[key]).open:
            entry.close(before, lambda round: self.clocks.members(round, key), self.optimizer, self.rule)

    def forget(self, worker: int) -> set[Any]:
        """Nobody waits for it any more, nor does it (see `_may_go`); what it has pushed counts, for that was acknowledged."""
        return {*self.clocks.leave(worker), MEETING, *self.waiting}

    def optimize(self, options: Mapping[str, Any]) -> None:
        """A new learning rate keeps the state that there is; another optimizer begins with its own."""
        same = options.get("name") == self.options.get("name")
        self.options, (self.optimizer, self.rule) = dict(options), made_of(options)
        for entry in self.entries.values():
            begin = self.optimizer.state(entry.value) if self.optimizer else {}
            entry.moments = begin | (entry.moments if same else {})

    # ---- as plain data ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that counts, as plain numbers, strings and tensors; its tensors are the server's own.

        Requests that wait beyond a gap are left out: they are in no log, and their clients will send them again.
        """
        entries, tensors = self.entries.items(), {key: entry.peeked() for key, entry in self.entries.items()}
        kept = {name: getattr(self, name) for name in STATE}
        kept["clients"] = {worker: changed(client, held={}) for worker, client in self.clients.items()}
        kept["waiting"] = [request for requests in self.waiting.values() for request in requests]
        return to_builtins(kept, builtin_types=[torch.Tensor]) | {
            "values": {key: value for key, (value, _) in tensors.items()},
            "moments": {key: moments for key, (_, moments) in tensors.items()},
            "versions": {key: {"version": entry.version, "owner": entry.owner} for key, entry in entries},
            "open": {k: {r: {w: list(p) for w, p in pushes.items()} for r, pushes in e.open.items()} for k, e in entries},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the server that gave this `state()`; the tensors are copied."""
        state = deepcopy(state)
        typed: Any = partial(convert, dec_hook=lambda kind, tensor: tensor)
        for name, kind in STATE.items():
            setattr(self, name, typed(state[name], kind))
        self.more = {name: typed(found, MORE[name]) for name, found in self.more.items()}
        self.waiting = {}
        for request in typed(state["waiting"], list[Request]):
            self.waiting.setdefault(OPERATIONS[request.op].place(request), []).append(request)
        self.optimizer, self.rule = made_of(self.options)
        self.store.clear()
        self.entries = {
            key: Entry(key, value, self.store, state["moments"][key], open=state["open"][key], **state["versions"][key])
            for key, value in state["values"].items()
        }


_STEPS: dict[type, Any] = {
    Request: Server._request, Lost: Server._lost, Membership: Server._membership, Send: Server._copied,
}  # fmt: skip
