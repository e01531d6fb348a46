"""The server: a pure state machine. It is given events, changes its state, and says what it wants done.

No clock, no sockets, no threads, no chance: the same events give the same values, in a simulation, in a process, and when
a log is played again. A driver carries out the effects in their order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from d2lps.kvstore.core.clocks import ALL
from d2lps.kvstore.core.compression import decoded
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import OPS, READS, Append, Effect, Event, Lost, Membership, Refused, Reply, Request, Send, replace
from d2lps.kvstore.core.operations import OPERATIONS, answer, owner_of, place, said_in
from d2lps.kvstore.core.pieces import Plain
from d2lps.kvstore.core.state import BARRIER, State


class Server(State):
    """Tensors by key, for workers that push and pull.

    >>> import torch
    >>> server = Server(workers=[0], consistency="asp")
    >>> server.step(Request("init", key="w", value=torch.zeros(2), sequence=1))[-1].error
    ''
    >>> [type(effect).__name__ for effect in server.step(Request("push", key="w", value=torch.ones(2), sequence=2))]
    ['Append', 'Reply']
    >>> server.step(Request("pull", key="w", sequence=3))[-1].value
    tensor([1., 1.])
    >>> server.step(Request("pull", key="v", sequence=4))[-1].error
    "key 'v' is unknown: init comes first"

    workers: the ranks of those who take part from the start, or {rank: epoch}. consistency, staleness: see `consistency`.
    replicate: every event goes to a backup too. store: where its tensors lie, such as `Tiers`; by default all are in memory.

    Each request is executed once, in the order of its client's sequence, and is in the log before it is answered. An answer
    may have to wait for other workers; the request then stays in `waiting`. Each server of a run goes by what it sees alone.
    Without an optimizer, what is pushed is added to the value. With one, a push is a gradient: the optimizer gets what a rule
    (see `reductions`) makes of a round's. Without rounds (all but bsp) each push is a step; of a mean, it is its share.
    Memory: the values, the optimizer's state, and under bsp the pushes of open rounds, up to m n bytes.
    """

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
        if error := self.filter.stale(request):
            return [self._reply(request, error)]
        client = self.filter.begin(request.client, request.epoch, request.acknowledged)
        if request.sequence < client.next:
            return self._again(request)
        client.hold(request)
        effects: list[Effect] = []
        while (ready := client.pop()) is not None:
            effects += self._execute(ready)
        return effects

    def _again(self, request: Request) -> list[Effect]:
        """It was executed: only the answer is due once more, if it has not arrived. A read is read anew."""
        client, waiting = self.filter.clients[request.client], self.waiting.get(place(request), ())
        if request.sequence < client.answered or any(request.retry_key == other.retry_key for other in waiting):
            return []
        error = client.errors.get(request.sequence, "")
        try:
            return [self._reply(request, error)]
        except Refused as reason:
            return [self._reply(request, str(reason))]

    def _execute(self, request: Request) -> list[Effect]:
        effects = self._logged(request)
        try:
            if request.op not in OPS:
                raise Refused(f"op {request.op!r} is unknown: choose {', '.join(OPS)}")
            if request.client not in self.clocks.at and request.op not in ("join", "leave"):
                raise Refused(f"worker {request.client} is not a member: it must join first")
            if "codec" in request.options:
                request = decoded(request, self.entries)
            moved = OPERATIONS[request.op](self, request)
            if request.op in (*READS, "set_optimizer"):  # for the clock at which it was asked, however far the worker goes on
                request = replace(request, clock=self.clocks.position(request.client, place(request)))
            return effects + self._go_on(moved, request)
        except Refused as reason:
            self.filter.clients[request.client].errors[request.sequence] = str(reason)
            return [*effects, self._reply(request, str(reason))]

    def _lost(self, event: Lost) -> list[Effect]:
        if event.worker not in self.clocks.at:
            return []
        effects = self._logged(event)
        self.filter.end(event.worker)
        return effects + self._go_on(self.forget(event.worker))

    def _membership(self, event: Membership) -> list[Effect]:
        if event.view <= self.view:
            return []
        self.view = event.view
        self.filter.drop_held()
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

    def resize(self, view: int, stay: set[str], come: dict[str, Plain]) -> list[Reply]:
        """Other servers are in force, and other parts are here. It is in no log: a checkpoint must come before the answers."""
        for key in self.entries.keys() - stay:
            self.entries.pop(key).drop()
        for key, (value, moments, version, owner) in come.items():
            self.entries[key] = Entry(key, value, self.store, moments, version, owner)
        self.view, self.stops, self.offers, self.clocks.keys = view, {}, {}, {}
        return self._go_on({BARRIER})

    def resume(self) -> list[Reply]:
        """A change of servers is called off: who has stopped for it goes on. It is in no log, either."""
        settling = [request for request in self.waiting[BARRIER] if request.op == "settle"]
        self.waiting[BARRIER] = [request for request in self.waiting[BARRIER] if request.op != "settle"]
        self.stops = {}
        return [self._reply(request) for request in settling]

    # ---- answers ----------------------------------------------------------------------------------------------------------

    def _go_on(self, moved: set[Hashable], new: Request | None = None) -> list[Reply]:
        """Where the slowest worker has moved on, close rounds; then answer all who need wait no longer."""
        if ALL in moved:
            changed = self.consistency.round_ended(self.clocks.spread())
            moved = moved | {*self.entries} - (set() if changed else self.clocks.keys.keys())
        free: list[Request] = []
        for where in [at for at in (moved if len(moved) < 2 else self.waiting) if at in moved and at in self.waiting]:
            waiting = self.waiting.pop(where)
            free += filter(self._may_go, waiting)
            if stay := [request for request in waiting if not self._may_go(request)]:
                self.waiting[where] = stay
        if new is not None and self._may_go(new):
            free.append(new)
        elif new is not None:
            self.waiting.setdefault(place(new), []).append(new)
            self.consistency.waited |= place(new) != BARRIER
        # A read sees the rounds before its own clock, however far the slowest has come at one go, as when another one leaves.
        replies = [self._answer(request) for request in sorted(free, key=lambda request: request.clock) if request.op in READS]
        # One key is looked up; of many, all that there are are looked at, in their order, the same in every process.
        for key in moved if len(moved) < 2 else self.entries:
            if isinstance(key, str) and key in moved and key in self.entries:
                self._close(key, self.clocks.slowest(key))
        replies += [self._answer(request) for request in free if request.op not in READS]
        return sorted(replies, key=lambda reply: -reply.priority)

    def _close(self, key: str, before: float) -> None:
        """End the rounds of a key before this clock."""
        if (entry := self.entries[key]).open:
            entry.close(before, self.clocks.front(key).members, self.optimizer, self.rule)

    def _may_go(self, request: Request) -> bool:
        worker, where = request.client, place(request)
        if worker not in self.clocks.at:  # it has left, or was given up: it waits for nobody
            return True
        if request.op == "hold":
            return self.clocks.at.keys() <= self.stops.keys()
        if request.op == "settle":
            return self.view > request.view
        if request.op == "lease":
            return self.leases[where].take(worker) is not None  # type: ignore[index]
        if where == BARRIER:
            return self.barriers.slowest >= self.barriers.at[worker]
        if request.op in (*READS, "set_optimizer"):
            return self.consistency.may_read(request.clock, self.clocks.slowest(where))
        return True

    def _answer(self, request: Request) -> Reply:
        if request.client not in self.clocks.at and (given_up := self.filter.stale(request)):
            return self._reply(request, given_up)
        if request.op == "set_optimizer":
            self.optimize(request.options)
        elif request.op in READS:
            slowest = self.clocks.slowest(request.key)
            self._close(request.key, min(request.clock, slowest))
            self.seen[int(max(0, request.clock - slowest))] += 1
        return self._reply(request)

    def _reply(self, request: Request, error: str = "") -> Reply:
        """An answer; a read's carries a copy of the value, or the value itself, lent (see `Entry.read`)."""
        return Reply(
            *request.retry_key,
            op=request.op,
            key=request.key,
            value=None if error else answer(self, request),
            error=error,
            clock=max(self.stops.values(), default=0) if request.op == "hold" else self.clocks.at.get(request.client, 0),
            priority=request.priority,
            view=self.view,
            owner=() if error else owner_of(self, request),
            said="" if error else said_in(self, request),
        )

    # ---- and the rest -----------------------------------------------------------------------------------------------------

    def _logged(self, event: Request | Lost | Membership) -> list[Effect]:
        self.number += 1
        return [Append(event), *([Send(self.number, event, self.view)] if self.replicate else [])]


_STEPS: dict[type, Any] = {
    Request: Server._request,
    Lost: Server._lost,
    Membership: Server._membership,
    Send: Server._copied,
}
