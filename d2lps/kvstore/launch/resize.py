"""Servers come and go while a run goes on: the coordinator's part.

All that it says it says over and over, until it is answered, so it does not matter who is killed and started again meanwhile:

    settled     all workers have stopped at the same clock, and wait; what each server has      (see `Changes`)
    resume      or one of them waits in a barrier, for one that has stopped: they go on, and all is tried anew
    give        what goes to other servers is written to files; nothing has changed yet         (see `parcels`)
    take        each server takes what is for it, saves that, and lets the workers go on
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from d2lps.comm import RankDied
from d2lps.kvstore.core.events import Membership
from d2lps.kvstore.core.placement import Move, Placement, name_of
from d2lps.kvstore.launch.chaos import RunIsOver
from d2lps.kvstore.launch.node import Node
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.pulse import BEAT
from d2lps.kvstore.storage.frame import frame
from d2lps.kvstore.storage.parcels import Order

Said = dict[int, dict[str, Any]]  # by server


class Resizing:
    """The changes of servers that are wished for, one after the other; `look` is to be called several times a second."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator, self.plan = coordinator, coordinator.plan  # a Coordinator, which has one of us
        self.wishes = deque[tuple[int | None, Future[int]]]()  # which server is to go, or None: one is to come
        self.change: Generator[None] | None = None  # which is under way; with each `yield` it waits
        self.word, self.said, self.due = "", Said(), 0.0  # what the servers are being asked, and have answered
        self.view, self.left, self.over = 0, list[Node](), False

    def wish(self, gone: int | None) -> Node:
        """For another thread: wait until server `gone` has gone, or a new one has come."""
        if self.plan.replicated or self.plan.address != "ipc":
            how = "durability='replica'" if self.plan.replicated else f"address={self.plan.address!r}"
            raise ValueError(f"{how}: servers come and go only where durability is 'memory', 'log' or 'fsync', and address 'ipc'")
        future = Future[int]()
        self.wishes.append((gone, future))
        if self.over:
            raise RunIsOver
        return self.coordinator.nodes[future.result()]

    def stop(self) -> None:
        """The workers are done. Where servers have begun to take, all of them must, before they finish."""
        self.over = True
        while self.wishes:
            self.wishes.popleft()[1].set_exception(RunIsOver())
        if self.word != "take":
            self.change = None

    def look(self) -> None:
        if self.change is None and self.wishes:
            self.change = self._change(*self.wishes[0])
        if self.change is not None and time.monotonic() > self.due:
            self.due = time.monotonic() + BEAT
            for _ in self.change:
                return
            self.change = None

    def heard(self, server: int, word: str, text: str) -> None:
        """An answer; it may be one to what was asked before."""
        said = json.loads(text)
        if (word, said["view"]) == (self.word, self.view):
            self.said[server] = said
            self.due = 0.0

    def _change(self, gone: int | None, wished: Future[int]) -> Generator[None]:
        nodes, before = self.coordinator.nodes, {node.number for node in self.coordinator.serving}
        number = len(nodes) if gone is None else gone
        after = before ^ {number}
        if gone is not None and (gone not in before or not after):
            self.wishes.popleft()
            wished.set_exception(ValueError(f"server {gone} cannot go: there are servers {sorted(before)}"))
            return
        if gone is None and (failed := (yield from self._started(number))):
            del nodes[number]
            self.wishes.popleft()
            wished.set_exception(RankDied(f"server {number} {failed}, before it had anything: the others go on without it"))
            return
        common, found = yield from self._settled(before, after)
        orders, moves = plan_orders(self.plan, {server: found[server]["parts"] for server in before}, after)
        orders = {server: order | common for server, order in orders.items()}
        yield from self._answers("give", {server: orders[server] for server in before})
        self.coordinator.mark(servers=f"{sorted(before)} becoming {sorted(after)}")  # if all ends now, no later run can go on
        yield from self._answers("take", orders)
        self.coordinator.serving = [nodes[server] for server in sorted(after)]
        self.left += [nodes[server] for server in before - after]
        for server in orders:
            self.coordinator.serves(nodes[server])  # it may not know yet that it has left, or who was lost
        self.coordinator.mark()
        keys, nbytes = len({move.key for move in moves}), sum(move.nbytes for move in moves)
        how = "come" if gone is None else "gone"
        self.coordinator.say(f"server {number} has {how}: {keys} keys have moved, {nbytes:,} bytes of their values")
        shutil.rmtree(common["folder"], ignore_errors=True)
        self.word = ""
        if self.wishes:
            self.wishes.popleft()[1].set_result(number)

    def _started(self, number: int) -> Generator[None, None, str]:
        """Let a newcomer begin. If it can't, why: that is the end of the wish, and not of the run."""
        node = self.coordinator.nodes[number] = Node(self.plan, number, self.coordinator.live, needed=False)
        try:
            node.start()
        except OSError as error:
            return f"cannot be started: {error}"
        while not node.ready.is_set() and not node.death:
            yield
        node.needed = True
        return node.death

    def _settled(self, before: set[int], after: set[int]) -> Generator[None, None, tuple[Order, Said]]:
        """Try until all workers have stopped, at longer and longer intervals: what all servers are told, and what they have."""
        pause, called_off = BEAT, 0
        while True:
            self.view += 1
            common: Order = {"view": self.view, "folder": str(Path(self.plan.room) / f"view-{self.view}")}
            wanted = Membership(self.view, tuple(sorted(after)), called_off)
            found = yield from self._answers("settled", dict.fromkeys(before, common), wanted)
            if all(said["parts"] is not None for said in found.values()):
                return common, found
            yield from self._answers("resume", dict.fromkeys(before, common))
            self.word, self.due = "", time.monotonic() + pause
            yield
            pause, called_off = 2 * pause, self.view

    def _answers(self, word: str, orders: Mapping[int, Order], wanted: Membership | None = None) -> Generator[None, None, Said]:
        """Tell servers, and workers what is wanted, until all servers have answered."""
        self.word, self.said = word, {}
        while waited_for := orders.keys() - self.said.keys():
            if wanted is not None:
                self.coordinator.news.send_multipart([b"", *frame(wanted)])
            for server in waited_for:
                self.coordinator.tell(self.coordinator.nodes[server], word.encode(), json.dumps(orders[server]).encode())
            yield
        return self.said


def plan_orders(
    plan: Deployment, found: Mapping[int, Mapping[str, Any]], after: set[int]
) -> tuple[dict[int, Order], list[Move]]:
    """What each server is to give, to take, and to have then; and all that moves. found: what each has now."""
    placement = Placement(found, plan.split, plan.placement)
    for server in sorted(found):  # in the order of their blocks
        for name, (shape, dtype) in found[server].items():
            placement.found(server, name, shape, getattr(torch, dtype))
    moves, new = placement.follow(after), after - {*found}
    # What else a newcomer must know comes from all; and what one that goes knows of keys that lie elsewhere goes to all.
    gives = {(src, dst): list[str]() for src in found for dst in after - {src} if dst in new or src not in after}
    for move in moves:
        gives.setdefault((move.src, move.dst), []).append(name_of(move.key, move.first, move.last))
    orders: dict[int, Order] = {}
    for server in {*found} | after:
        parts = [part.name for parts in placement.parts.values() for part in parts if part.server == server]
        given = {dst: names for (src, dst), names in gives.items() if src == server}
        taken = [src for src, dst in gives if dst == server]
        orders[server] = {"server": server, "new": server in new, "gives": given, "takes": taken, "parts": parts}
    return orders, moves
