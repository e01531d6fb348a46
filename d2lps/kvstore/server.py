"""The server: a pure state machine. It is given events, changes its state, and says what it wants done.

No clock, no sockets, no threads, no chance: the same events give the same values, in a simulation, in a process, and when
a log is played again. A driver carries out the effects in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from d2lps.kvstore.clocks import Clocks, Front
from d2lps.kvstore.compression import decoded
from d2lps.kvstore.consistency import make_consistency
from d2lps.kvstore.duplicates import Filter
from d2lps.kvstore.entry import Entry
from d2lps.kvstore.events import READS, Append, Effect, Event, Lost, Membership, Reply, Request, Send
from d2lps.kvstore.operations import OPERATIONS, admit, forget
from d2lps.kvstore.optimizers import Optimizer, make_optimizer
from d2lps.kvstore.refusals import bad_key, refusal
from d2lps.kvstore.snapshot import restore, snapshot
from d2lps.kvstore.waiting import Waiting


class Server:
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
    on_loss: what becomes of the others when a worker is lost: "continue", or "raise": all that they ask is refused, and says
    why. replicate: every event goes to a backup too. store: where its tensors lie, such as `Tiers`; by default all are in memory.

    Each request is executed once, in the order of its client's sequence, and is in the log before it is answered. An answer
    may have to wait for other workers; the request then stays in `waiting`. Each server of a run goes by what it sees alone.
    Without an optimizer, what is pushed is added to the value. With one, a push is a gradient: the optimizer gets the sum of
    a round's divided by the number of workers ("mean", so that the learning rate means the same for any number of them), or
    not divided ("sum"). Without rounds (all but bsp) each push is a step, of a gradient divided in the same way.
    Memory: the values, the optimizer's state, and under bsp the pushes of open rounds, up to m n bytes.
    """

    def __init__(
        self,
        workers: Iterable[int],
        consistency: str = "bsp",
        staleness: int = 0,
        on_loss: str = "continue",
        replicate: bool = False,
        store: MutableMapping[str, torch.Tensor] | None = None,
    ) -> None:
        if on_loss not in ("continue", "raise"):
            raise ValueError(f"on_loss={on_loss!r} is unknown: choose 'continue' or 'raise'")
        epochs = dict(workers) if isinstance(workers, dict) else dict.fromkeys(workers, 0)
        self.consistency = make_consistency(consistency, staleness)
        self.on_loss, self.replicate = on_loss, replicate
        self.store: MutableMapping[str, torch.Tensor] = {} if store is None else store
        self.entries: dict[str, Entry] = {}
        self.clocks, self.barriers = Clocks(epochs), Front(dict.fromkeys(epochs, 0))
        self.filter = Filter(epochs)
        self.waiting = Waiting()
        self.optimizer: Optimizer | None = None
        self.options: dict[str, Any] = {}  # from which the optimizer was made
        self.view = self.number = 0  # of the membership; of the last event that was executed
        self.broken = ""  # why nothing can be asked any more
        # What follows is no part of the state: to be looked at, and lost with the process.
        self.seen: Counter[int] = Counter()  # by how many clocks the slowest worker was behind a read

    def step(self, event: Event) -> list[Effect]:
        """Let something happen; what is now to be done, in order."""
        effects: list[Effect] = _STEPS[type(event)](self, event)
        return effects

    def state(self) -> dict[str, Any]:
        """All that counts, as plain numbers, strings, tensors and Requests; its tensors are the server's own."""
        return snapshot(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Become the server that gave this `state()`; the tensors are copied."""
        restore(self, state)

    # ---- events -----------------------------------------------------------------------------------------------------------

    def _request(self, request: Request) -> list[Effect]:
        if request.sequence < 1:
            return [self._reply(request, f"sequence {request.sequence}: a client's requests are numbered from 1")]
        if request.view != self.view:
            return [self._reply(request, f"stale view: this server is in view {self.view}, the request in {request.view}")]
        if error := self.filter.stale(request):
            return [self._reply(request, error)]
        client = self.filter.begin(request.client, request.epoch)
        if request.sequence < client.next:
            return self._again(request)
        client.hold(request)
        effects: list[Effect] = []
        while (ready := client.pop()) is not None:
            effects += self._execute(ready)
        return effects

    def _again(self, request: Request) -> list[Effect]:
        """It was executed: only the answer is due once more. A read is read anew; its worker has seen no answer to it.

        Or it has, and this request is a late one: then its place may have been given to another, so nothing goes there.
        """
        client = self.filter.clients[request.client]
        if request in self.waiting or request.sequence < client.answered:
            return []
        return [self._reply(replace(request, out=None), client.errors.get(request.sequence, "") or bad_key(self, request))]

    def _execute(self, request: Request) -> list[Effect]:
        effects = self._logged(request)
        request, error = decoded(request, self.entries)
        if error := error or refusal(self, request):
            self.filter.clients[request.client].errors[request.sequence] = error
            return [*effects, self._reply(request, error)]
        return effects + self._go_on(OPERATIONS[request.op](self, request), request)

    def _lost(self, event: Lost) -> list[Effect]:
        if event.worker not in self.clocks.at:
            return []
        effects = self._logged(event)
        return effects + self._go_on(self._give_up(event.worker))

    def _give_up(self, worker: int) -> set[str]:
        self.filter.end(worker)
        if self.on_loss == "raise":
            self.broken = f"worker {worker} was lost"
        return forget(self, worker)

    def _membership(self, event: Membership) -> list[Effect]:
        if event.view <= self.view:
            return []
        effects = self._logged(event)
        self.view = event.view
        self.filter.drop_held()
        known = {worker: self.filter.clients[worker].epoch for worker in self.clocks.at}
        moved: set[str] = set()
        for worker in [worker for worker, epoch in known.items() if event.workers.get(worker) != epoch]:
            moved |= self._give_up(worker)
        for worker, epoch in event.workers.items():
            self.filter.begin(worker, epoch)
            admit(self, worker)
        return effects + self._go_on(moved)

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

    # ---- answers ----------------------------------------------------------------------------------------------------------

    def _go_on(self, moved: set[str], new: Request | None = None) -> list[Effect]:
        """Where the slowest worker has moved on, close rounds; then answer all who need wait no longer."""
        if "" in moved:
            changed = self.consistency.round_ended(self.clocks.spread())
            moved = moved | {"", *self.entries} - (set() if changed else self.clocks.keys.keys())
        if self.broken:
            moved = moved | self.waiting.at.keys()
        for key in self.entries if moved else ():
            if key in moved:
                self._close(key)
        free = self.waiting.take([where for where in self.waiting.at if where in moved], self._may_go) if moved else []
        if new is not None and self._may_go(new):
            free.append(new)
        elif new is not None:
            self.waiting.add(new)
            self.consistency.waited |= new.op != "barrier"
        return [self._answer(request) for request in sorted(free, key=lambda request: -request.priority)]

    def _close(self, key: str) -> None:
        entry = self.entries[key]
        if entry.open:
            entry.close(self.clocks.slowest(key), set(self.clocks.at), self.optimizer, self.mean)

    def _may_go(self, request: Request) -> bool:
        worker, key = request.client, request.key
        if request.op == "barrier":
            return bool(self.broken) or self.barriers.slowest >= self.barriers.at[worker]
        if request.op in (*READS, "set_optimizer"):
            return bool(self.broken) or self.consistency.may_read(self.clocks.position(worker, key), self.clocks.slowest(key))
        return True

    def _answer(self, request: Request) -> Reply:
        if self.broken and request.op != "leave":
            self.filter.clients[request.client].errors[request.sequence] = self.broken
            return self._reply(request, self.broken)
        if request.op == "set_optimizer":
            self._set_optimizer(dict(request.options))
        elif request.op in READS:
            behind = self.clocks.position(request.client, request.key) - self.clocks.slowest(request.key)
            self.seen[max(0, int(behind))] += 1
        return self._reply(request)

    def _reply(self, request: Request, error: str = "") -> Reply:
        """An answer; a read's carries a copy of the value."""
        value = None
        if request.op in READS and not error:
            value = self.entries[request.key].read(request.rows, request.out, only_look=request.op == "peek")
        return Reply(
            *request.retry_key,
            op=request.op,
            key=request.key,
            value=value,
            error=error,
            clock=self.clocks.at.get(request.client, 0),
            priority=request.priority,
            view=self.view,
        )

    # ---- and the rest -----------------------------------------------------------------------------------------------------

    def _logged(self, event: Event) -> list[Effect]:
        self.number += 1
        return [Append(event), *([Send(self.number, event, self.view)] if self.replicate else [])]

    @property
    def mean(self) -> bool:
        """Whether the optimizer gets the mean of the workers' gradients, or their sum."""
        return self.options.get("reduction", "mean") == "mean"

    def _set_optimizer(self, options: dict[str, Any]) -> None:
        """A new learning rate keeps the state that there is; another optimizer begins with its own."""
        same = options["name"] == self.options.get("name")
        self.options = options
        self.optimizer = make_optimizer(**{name: value for name, value in options.items() if name != "reduction"})
        for entry in self.entries.values():
            entry.moments = self.optimizer.state(entry.value) | (entry.moments if same else {})


_STEPS: dict[type, Any] = {
    Request: Server._request,
    Lost: Server._lost,
    Membership: Server._membership,
    Send: Server._copied,
}
