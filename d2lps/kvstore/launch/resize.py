"""Servers come and go while a run goes on: the coordinator's part (see `growth` for the workers')."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from d2lps.comm import RankDied
from d2lps.kvstore.core.events import Membership
from d2lps.kvstore.launch.chaos import RunIsOver
from d2lps.kvstore.launch.node import Node


class Resizing:
    """The changes of servers that are wished for, one after the other; `look` is to be called several times a second."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator, self.plan = coordinator, coordinator.plan  # a Coordinator, which has one of us
        self.wishes = deque[tuple[int | None, Future[int]]]()  # which server is to go, or None: one is to come
        self.change: Generator[None] | None = None  # which is under way; with each `yield` it waits
        self.wanted: Membership | None = None  # what the first server is to tell all workers
        self.coming: Node | None = None  # which workers may ask before it serves
        self.changes, self.left, self.over = 0, list[Node](), False

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
        """The workers are done: what they have not brought to its end will never be."""
        self.look()
        self.over, self.change = True, None
        while self.wishes:
            self.wishes.popleft()[1].set_exception(RunIsOver())

    def look(self) -> None:
        if self.change is None and self.wishes:
            self.change = self._change(*self.wishes[0])
        if self.change is not None:
            for _ in self.change:
                return
            self.change = None

    def tell(self) -> None:
        """Tell the first server what is wanted; it may have been away when it was told before."""
        if self.wanted is not None:
            self.coordinator.event(self.coordinator.serving[0], self.wanted)

    def _change(self, gone: int | None, wished: Future[int]) -> Generator[None]:
        nodes, before = self.coordinator.nodes, {node.number for node in self.coordinator.serving}
        number = len(nodes) if gone is None else gone
        failed: Exception | None = None
        if gone is not None and (gone not in before or before == {gone}):
            failed = ValueError(f"server {gone} cannot go: there are servers {sorted(before)}")
        elif gone is None and (death := (yield from self._started(number))):
            failed = RankDied(f"server {number} {death}, before it had anything: the others go on without it")
        if failed is None:
            failed = yield from self._changed(sorted(before ^ {number}), "come" if gone is None else "gone", number)
        self.coming = None
        if failed is not None and gone is None:
            nodes.pop(number).end()
        self.wishes.popleft()
        wished.set_exception(failed) if failed is not None else wished.set_result(number)

    def _started(self, number: int) -> Generator[None, None, str]:
        """Let a newcomer begin. If it can't, why: that is the end of the wish, and not of the run."""
        node = self.coming = self.coordinator.nodes[number] = Node(self.plan, number, self.coordinator.live, needed=False)
        try:
            node.start()
        except OSError as error:
            return f"cannot be started: {error}"
        while not node.ready.is_set() and not node.death:
            yield
        node.needed = True
        return node.death

    def _changed(self, after: list[int], how: str, number: int) -> Generator[None, None, Exception | None]:
        """Wait until the workers have let these servers serve; or what has gone wrong."""
        coordinator, nodes = self.coordinator, self.coordinator.nodes
        self.changes += 1
        self.wanted = Membership(self.changes, tuple(after), wanted=True)
        self.tell()
        story = Path(self.plan.room) / f"change-{self.changes}.json"
        while not story.exists():
            yield
        self.wanted = None
        told = json.loads(story.read_text())
        story.with_suffix(".safetensors").unlink(missing_ok=True)
        if "failed" in told:
            return RuntimeError(f"server {number} has not {how}: {told['failed']}")
        self.left += [node for node in coordinator.serving if node.number not in after]
        coordinator.serving = [nodes[server] for server in after]
        for node in self.left:
            coordinator.serves(node)  # it may not know yet that it has left
        coordinator.mark()
        coordinator.say(f"server {number} has {how}: {told['keys']} keys have moved, {told['nbytes']:,} bytes of their values")
        return None
