"""Servers come and go while a run goes on: the coordinator's part.

All that it says it says over and over, until it is answered, so it does not matter who is killed and started again meanwhile:

    settled     all workers have stopped at the same clock, and wait; what each server has      (see `Changes`)
    give        what goes to other servers is written to files; nothing has changed yet         (see `parcels`)
    take        each server takes what is for it, saves that, and lets the workers go on
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import zmq

from d2lps.kvstore.core.events import Membership
from d2lps.kvstore.core.placement import Move, Placement, name_of
from d2lps.kvstore.launch.chaos import RunIsOver
from d2lps.kvstore.launch.node import Node
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.pulse import BEAT
from d2lps.kvstore.storage.frame import frame
from d2lps.kvstore.storage.parcels import Order


class Servers(Protocol):
    """What is needed of the coordinator."""

    plan: Deployment
    live: bool
    nodes: dict[int, Node]
    serving: list[Node]
    news: zmq.Socket[bytes]

    def say(self, text: str) -> None: ...

    def tell(self, node: Node, *parts: bytes) -> None: ...

    def serves(self, node: Node) -> None: ...

    def mark(self) -> None: ...


class Resizing:
    """The changes of servers that are wished for, one after the other; `look` is to be called several times a second."""

    def __init__(self, coordinator: Servers) -> None:
        self.coordinator, self.plan = coordinator, coordinator.plan
        self.wishes = deque[tuple[int | None, Future[int]]]()  # which server is to go, or None: one is to come
        self.over = False
        self.stage, self.asked, self.said = "", 0.0, dict[int, Any]()  # said: what the servers have answered
        self.before, self.after, self.left = set[int](), set[int](), list[Node]()
        self.view, self.orders, self.moves = 0, dict[int, Order](), list[Move]()

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
        """The workers are done. What has begun to be in force will be, at the latest when the servers finish."""
        self.over = True
        for _, future in self.wishes:
            future.set_exception(RunIsOver())
        self.wishes.clear()
        if self.stage != "take":
            for number in self.after - self.before:
                self.coordinator.nodes.pop(number).end()
            self.stage, self.before, self.after = "", set(), set()

    def look(self) -> None:
        if not self.stage and self.wishes:
            self._begin(*self.wishes[0])
        elif self.stage and time.monotonic() > self.asked + BEAT:
            self._ask()

    def heard(self, node: Node, word: str, text: str) -> None:
        """An answer; it may be one to what was asked before."""
        said = json.loads(text)
        if (word, said["view"]) == (self.stage, self.view) and (word != "settled" or "parts" in said):
            self.said[node.number] = said
            if self.said.keys() >= self._concerned():
                self._next()

    # ---- stages -----------------------------------------------------------------------------------------------------------

    def _begin(self, gone: int | None, wished: Future[int]) -> None:
        nodes, servers = self.coordinator.nodes, {node.number for node in self.coordinator.serving}
        if gone is not None and (gone not in servers or len(servers) == 1):
            self.wishes.popleft()
            wished.set_exception(ValueError(f"server {gone} cannot go: there are servers {sorted(servers)}"))
            return
        number = len(nodes)
        if gone is None:
            nodes[number] = Node(self.plan, number, self.coordinator.live)
            nodes[number].start()
        self.before, self.after = servers, servers | {number} if gone is None else servers - {gone}
        self.view += 1
        self.folder = Path(self.plan.room) / f"view-{self.view}"
        self.stage, self.said = "settled", {}
        self.orders = {server: {"server": server, "view": self.view, "folder": str(self.folder)} for server in servers | {number}}

    def _concerned(self) -> set[int]:
        return self.before | self.after if self.stage == "take" else self.before

    def _ask(self) -> None:
        self.asked = time.monotonic()
        if not all(self.coordinator.nodes[number].ready.is_set() for number in self._concerned() | self.after):
            return
        if self.stage == "settled":
            self.coordinator.news.send_multipart([b"", *frame(Membership(self.view, {}, tuple(sorted(self.after))))])
        for number in self._concerned() - self.said.keys():
            self.coordinator.tell(self.coordinator.nodes[number], self.stage.encode(), json.dumps(self.orders[number]).encode())

    def _next(self) -> None:
        said, self.said = self.said, {}
        if self.stage == "settled":
            self.moves = plan_moves(self.plan, {server: said[server]["parts"] for server in said}, self.after, self.orders)
            self.stage = "give"
        elif self.stage == "give":
            self.stage = "take"
        else:
            return self._in_force()
        return self._ask()

    def _in_force(self) -> None:
        coordinator, [*numbers] = self.coordinator, self.before ^ self.after
        coordinator.serving = [coordinator.nodes[number] for number in sorted(self.after)]
        for number in self.before - self.after:
            self.left.append(coordinator.nodes[number])
        for number in self.before | self.after:
            coordinator.serves(coordinator.nodes[number])  # it may not know yet who was lost
        coordinator.mark()
        keys, nbytes = len({move.key for move in self.moves}), sum(move.nbytes for move in self.moves)
        how = "has gone" if numbers[0] in self.before else "has come"
        coordinator.say(f"server {numbers[0]} {how}: {keys} keys have moved, {nbytes:,} bytes of their values")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.stage, self.before, self.after = "", set(), set()
        if self.wishes:
            self.wishes.popleft()[1].set_result(numbers[0])


def plan_moves(
    plan: Deployment, found: Mapping[int, Mapping[str, Any]], after: set[int], orders: Mapping[int, Order]
) -> list[Move]:
    """Write into the orders what each server is to give, to take, and to have then. found: what each has now."""
    placement = Placement(found, plan.split, plan.placement)
    for server, parts in sorted(found.items()):  # in the order of their blocks
        for name, (shape, dtype) in parts.items():
            placement.found(server, name, shape, getattr(torch, dtype))
    moves, new = placement.follow(after), after - {*found}
    # What else a newcomer must know comes from all; and what one that goes knows of keys that lie elsewhere goes to all.
    gives = {(src, dst): list[str]() for src in found for dst in after - {src} if dst in new or src not in after}
    for move in moves:
        gives.setdefault((move.src, move.dst), []).append(name_of(move.key, move.first, move.last))
    held = [part for parts in placement.parts.values() for part in parts]
    for server, order in orders.items():
        order["gives"] = {dst: names for (src, dst), names in gives.items() if src == server}
        order["takes"] = [src for src, dst in gives if dst == server]
        order["parts"] = [part.name for part in held if part.server == server]
        order["new"] = server in new
    return moves
