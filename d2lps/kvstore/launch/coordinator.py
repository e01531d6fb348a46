"""The coordinator: the caller's process, which starts servers, watches them, and says who serves.

It is what ps-lite calls the scheduler, and a single point of failure: when it goes, all that it has started goes with it.
A server that is killed is started again where it has a log to start from, or its backup takes its place under a new view;
otherwise the run ends and says so. A worker that is killed is given up: the servers are told, and the others go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zmq

from d2lps.comm import RankDied, RankHung
from d2lps.kvstore.core.events import Event, Lost, Membership
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.launch.node import Node
from d2lps.kvstore.launch.resize import Resizing
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.heartbeat import BEAT, PULSE
from d2lps.kvstore.network.monitor import EVERY, Monitor
from d2lps.kvstore.network.sockets import listen, new_socket, readable
from d2lps.kvstore.storage.frame import frame

ATTEMPTS = 3  # to start a server


class Coordinator:
    """All servers of a run; `look` is to be called whenever something may have happened, and several times a second."""

    def __init__(self, plan: Deployment, timeout: float, live: bool = False, monitor: Monitor | None = None) -> None:
        self.plan, self.timeout, self.live, self.monitor = plan, timeout, live, monitor
        self.history, self.begin = list[str](), time.monotonic()
        self.nodes = {number: Node(plan, number, live) for number in range(plan.servers * (1 + plan.replicated))}
        self.serving = [self.nodes[server] for server in range(plan.servers)]  # by server: the node that answers workers
        self.backups = [self.nodes.get(server + plan.servers) for server in range(plan.servers)]
        self.promoted: dict[int, str] = {}  # by server: why its backup is to serve, as long as that has not said that it does
        self.view, self.lost, self.announced, self.measured, self.finishing = 0, list[int](), 0.0, 0.0, False
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.control = listen(self.context, plan.coordinator, plan.largest, None)
        self.news = new_socket(self.context, zmq.PUB, plan.largest, {})
        self.news.bind(plan.news)
        self.resizing = Resizing(self)

    def say(self, text: str) -> None:
        """For the run's history."""
        self.history.append(f"{time.monotonic() - self.begin:.2f} s: {text}")

    # ---- the beginning and the end ----------------------------------------------------------------------------------------

    def start(self) -> dict[int, str]:
        """Start all nodes, and return where each server listens as soon as all do."""
        for node in self.nodes.values():
            node.start()
        self._until(lambda: all(node.ready.is_set() for node in self.nodes.values()), "all servers had started")
        for backup in filter(None, self.backups):
            backup.needed = False
        self.mark()
        self.begin = time.monotonic()
        return {server: node.endpoint for server, node in enumerate(self.serving)}

    def finish(self) -> list[ServerReport]:
        """The workers are done: what the servers have to report."""
        self.finishing = True
        for node in self.serving:
            self.tell(node, b"finish")
        nodes = sorted([*self.serving, *self.resizing.left], key=lambda node: node.server)
        # A report comes by a pipe, and may overtake the last word, which comes by a socket, with the monitor's last numbers.
        self._until(lambda: all(node.over and node.report is not None for node in nodes), "all servers had reported")
        reports = [node.report for node in nodes if node.report is not None]
        self.mark(numbers={report.node: report.number for report in reports})
        return reports

    def mark(self, **more: Any) -> None:
        """Note in the folder how a later run is to read what the servers leave there."""
        numbers = [node.number for node in self.serving]
        servers = len(numbers) if numbers == [*range(len(numbers))] else numbers  # it may be that servers have come and gone
        self.plan.note(servers=servers, **more)

    def end(self) -> None:
        """Nothing is left of what was started."""
        for node in self.nodes.values():
            node.end()
        self.context.destroy(linger=0)

    def _until(self, met: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not met():
            if time.monotonic() > deadline:
                raise RankHung(f"timeout={self.timeout:g} s have passed before {what}")
            zmq.select([self.control, *self.lines()], [], [], 0.05)
            self.look()

    # ---- in between -------------------------------------------------------------------------------------------------------

    def lines(self) -> list[Connection]:
        """What can be read when a server has ended."""
        return [line for node in self.nodes.values() for line in node.lines()]

    def look(self) -> None:
        """Hear what the servers say, and see to those that have ended."""
        self._hear()
        for node in list(self.nodes.values()):
            if death := node.look():
                self._died(node, death)
        self.resizing.look()
        if self.plan.replicated:
            self._watch()
        if self.monitor is not None:
            self._measure()

    def lose(self, worker: int) -> None:
        """A worker is no more."""
        self.lost.append(worker)
        for node in filter(None, [*self.serving, self.resizing.coming]):
            self.event(node, Lost(worker))

    def _hear(self) -> None:
        while readable(self.control):
            name, word, *parts = self.control.recv_multipart()
            if (number := name.removeprefix(PULSE)).isdigit():
                self._heard(self.nodes[int(number)], word, *map(bytes.decode, parts))
            # else a killed server's last words, which zmq gives another name, once the one that was started for it has connected

    def _heard(self, node: Node, word: bytes, text: str = "", *more: str) -> None:
        node.heard = time.monotonic()
        if word == b"ready":
            node.endpoint = text
            self._started(node, *map(int, more))
            self.serves(node)
        elif word == b"serves" and node in self.serving and node.server in self.promoted:
            self.say(f"node {node.number} serves as server {node.server} in view {text}")
            del self.promoted[node.server]
            self.serves(node)
            self._announce()
            self._renew(node.server)
        elif word == b"handed" and not self.finishing:
            self._start_spare(self.nodes[int(text)])
        elif word == b"unhanded":
            self.backups[node.server] = None
            self.say(f"server {node.server} goes on without a backup: {text}")
        elif word == b"measured" and self.monitor is not None and node in self.serving:
            self.monitor.heard(node.server, text)
        elif word == b"over":
            node.over = True
        elif word == b"deposed":
            self.say(f"node {node.number} is no server any more: {text}")

    def _started(self, node: Node, cut: int) -> None:
        """What a server has found on the disk. Had it missed anything that was acknowledged, it would have raised that."""
        who, earlier = f"server {node.server}", self.plan.earlier
        if self.plan.replicated and not node.needed:
            self.say(f"node {node.number} is the backup of {who}")
        elif node.starts > 1:
            self.say(f"{who} runs again, with all that was acknowledged")
        elif earlier and ("numbers" in earlier or earlier["durability"] == "fsync"):
            self.say(f"{who} goes on with all that an earlier run had acknowledged")
        elif earlier:  # on "log": a power cut takes the end of the log, and the note of what was promised with it
            self.say(f"{who} goes on with what an earlier run has left, and cannot vouch that it is all: that run did not end")
        if cut:
            self.say(f"{who} has cut off {cut} bytes of an unfinished record, of which nobody had been told")

    def serves(self, node: Node) -> None:
        """It may have been away when the others were told something."""
        for worker in self.lost if node in [*self.serving, self.resizing.coming] else ():
            self.event(node, Lost(worker))
        self.resizing.tell()
        if self.finishing or node in self.resizing.left:
            self.tell(node, b"finish")
        node.failed = 0
        node.ready.set()

    def tell(self, node: Node, *parts: bytes | memoryview | bytearray) -> None:
        self.control.send_multipart([str(node.number).encode(), *parts])

    def event(self, node: Node, event: Event) -> None:
        self.tell(node, b"event", *frame(event))

    # ---- deaths -----------------------------------------------------------------------------------------------------------

    def _died(self, node: Node, death: str) -> None:
        if self.plan.replicated:
            self._replace(node, death)
        elif not node.needed:
            self.say(f"server {node.server} {death} before it had anything")
        elif self.plan.durability == "memory":
            raise RankDied(f"server {node.server} {death}, and what it had is lost: durability='log' would have kept it")
        elif node.failed == ATTEMPTS:
            raise RankDied(f"server {node.server} {death}, and so it did when it was started again")
        else:
            self.say(f"server {node.server} {death}")
            node.start()

    def _replace(self, node: Node, death: str) -> None:
        """Of two nodes there is one left."""
        server, backup = node.server, self.backups[node.server]
        if node is self.serving[server]:
            if backup is None or not backup.ready.is_set():
                raise RankDied(f"server {server} {death}, and it has no backup any more")
            self.say(f"server {server} {death}")
            self._promote(backup, death)
        elif node is backup:
            self.say(f"the backup of server {server} {death}")
            self.backups[server] = None
            self.tell(self.serving[server], b"alone")
            if not node.failed:  # else the next one might well die as it starts, too
                self._renew(server)

    def _promote(self, backup: Node, why: str) -> None:
        """A new view, in which the backup serves: it is told first, then, when it has obeyed, the workers are.

        It may be that it sleeps, and never obeys: `_watch` waits for its pulse. The other servers enter the view, too: if two
        are replaced at once, workers may hear of both together, and ask both in the later view.
        """
        server, self.view = backup.server, self.view + 1
        self.serving[server].needed, backup.needed = False, True
        self.serving[server], self.backups[server], self.promoted[server] = backup, None, why
        backup.ready.clear()
        for node in self.serving:
            self.event(node, Membership(self.view, tuple(other.number for other in self.serving)))

    def _renew(self, server: int) -> None:
        """A new backup: the primary writes down all that it has, and says so; then the new one begins with that."""
        if not self.finishing:
            number = max(number for number, node in self.nodes.items() if node.server == server) + self.plan.servers
            self.backups[server] = self.nodes[number] = Node(self.plan, number, self.live, needed=False)
            self.tell(self.serving[server], b"handover", str(number).encode())

    def _start_spare(self, node: Node) -> None:
        try:
            node.start()
        except OSError as error:  # no memory, no descriptors, no room on the disk
            node.end()
            self._replace(node, f"cannot be started: {error}")

    def _watch(self) -> None:
        """Is everybody awake? Who has been silent for too long may be dead, or only asleep: nobody can tell."""
        now, silence = time.monotonic(), f"has not answered for {self.plan.patience:g} s"
        latest = now - self.plan.patience
        for first, second in zip(self.serving, self.backups, strict=True):
            if first.heard < latest and (why := self.promoted.get(first.server)):
                raise RankDied(f"server {first.server} {why}, and its backup, node {first.number}, {silence}")
            if second is None or first.over or not (first.ready.is_set() and second.ready.is_set()):
                continue  # one that is over packs its report, however long that takes
            if first.heard < latest <= second.heard:
                self._replace(first, silence)
            elif second.heard < latest <= first.heard:
                second.end()
                self._replace(second, silence)
        if now > self.announced + BEAT:
            self.announced = now
            self._announce()

    def _measure(self) -> None:
        """Ask those that serve for their counters, now and then."""
        if (now := time.monotonic()) > self.measured + EVERY:
            self.measured = now
            for node in self.serving:
                if node.ready.is_set():
                    self.tell(node, b"measure")

    def _announce(self) -> None:
        """Over and over: who was not there the last time hears it now."""
        if all(node.ready.is_set() for node in self.serving):
            members = Membership(self.view, tuple(node.number for node in self.serving))
            where = json.dumps([node.endpoint for node in self.serving])
            self.news.send_multipart([where.encode(), *frame(members)])
