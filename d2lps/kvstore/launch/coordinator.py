"""The coordinator: the caller's process, which starts servers, watches them, and says who serves.

It is what ps-lite calls the scheduler, and a single point of failure: when it goes, all that it has started goes with it.
A server that is killed is started again where it has a log to start from, or its backup takes its place under a new view;
otherwise the run ends and says so. A worker that is killed is given up: the servers are told, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from d2lps.comm import RankDied, RankHung
from d2lps.kvstore.core.events import Event, Lost, Membership
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.launch.monitor import EVERY, Monitor
from d2lps.kvstore.launch.node import Node
from d2lps.kvstore.launch.resize import Resizing
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.pulse import BEAT, PULSE
from d2lps.kvstore.network.sockets import new_socket, readable
from d2lps.kvstore.storage.frame import frame

ATTEMPTS = 3  # to start a server
Say = Callable[[str], None]


class Coordinator:
    """All servers of a run; `look` is to be called whenever something may have happened, and several times a second."""

    def __init__(self, plan: Deployment, timeout: float, live: bool, say: Say, monitor: Monitor | None) -> None:
        self.plan, self.timeout, self.say, self.monitor = plan, timeout, say, monitor
        self.live = live
        self.nodes = {number: Node(plan, number, live) for number in range(plan.servers * (1 + plan.replicated))}
        self.serving = [self.nodes[server] for server in range(plan.servers)]  # by server: the node that answers workers
        self.backups = [self.nodes.get(server + plan.servers) for server in range(plan.servers)]
        self.view, self.lost, self.announced, self.measured, self.finishing = 0, list[int](), 0.0, 0.0, False
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.control = self._bound(zmq.ROUTER, plan.coordinator)
        self.news = self._bound(zmq.PUB, plan.news)
        self.resizing = Resizing(self)

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = new_socket(self.context, kind, self.plan.largest, {zmq.ROUTER_HANDOVER: 1} if kind == zmq.ROUTER else {})
        socket.bind(endpoint)
        return socket

    # ---- the beginning and the end ----------------------------------------------------------------------------------------

    def start(self) -> dict[int, str]:
        """Start all nodes, and return where each listens as soon as all do."""
        for node in self.nodes.values():
            node.start()
        self._until(lambda: all(node.ready.is_set() for node in self.nodes.values()), "all servers had started")
        return {number: node.endpoint for number, node in self.nodes.items()}

    def finish(self) -> list[ServerReport]:
        """The workers are done: what the servers have to report."""
        self._until(lambda: self.resizing.change is None, "a change of servers was over")
        self.finishing = True
        for node in self.serving:
            self.tell(node, b"finish")
        nodes = sorted([*self.serving, *self.resizing.left], key=lambda node: node.server)
        # A report comes by a pipe, and may overtake the last word, which comes by a socket, with the monitor's last numbers.
        self._until(lambda: all(node.over and node.report is not None for node in nodes), "all servers had reported")
        return [node.report for node in nodes if node.report is not None]

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
            zmq.select([self.control, *self.waited_for()], [], [], 0.05)
            self.look()

    # ---- in between -------------------------------------------------------------------------------------------------------

    def waited_for(self) -> list[int]:
        """Descriptors that can be read when a server has ended."""
        return [descriptor for node in self.nodes.values() for descriptor in node.descriptors()]

    def look(self) -> None:
        """Hear what the servers say, and see to those that have ended."""
        while readable(self.control):
            name, word, *parts = self.control.recv_multipart()
            self._heard(self.nodes[int(name.removeprefix(PULSE))], word, b"".join(parts).decode())
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
        for node in self.serving:
            self._event(node, Lost(worker))

    def _heard(self, node: Node, word: bytes, text: str) -> None:
        node.heard = time.monotonic()
        if word == b"ready":
            node.endpoint = text
            if node.starts > 1:
                self.say(f"server {node.number} runs again, with all that is in its log")
            self.serves(node)
            if self.plan.replicated and node.number >= 2 * self.plan.servers:
                self.say(f"node {node.number} is the backup of server {node.server}")
        elif word == b"serves":
            self.say(f"node {node.number} serves as server {node.server} in view {text}")
            self.serves(node)
            self._announce()
            self._renew(node.server)
        elif word == b"handed" and not self.finishing:
            self.nodes[int(text)].start()
        elif word == b"measured" and self.monitor is not None and node in self.serving:
            self.monitor.heard(node.server, text)
        elif word in (b"settled", b"give", b"take"):
            self.resizing.heard(node.number, word.decode(), text)
        elif word == b"over":
            node.over = True
        elif word == b"deposed":
            self.say(f"node {node.number} is no server any more: {text}")

    def serves(self, node: Node) -> None:
        """It may have been away when the others were told something."""
        for worker in self.lost if node in self.serving else ():
            self._event(node, Lost(worker))
        if self.finishing or node in self.resizing.left:
            self.tell(node, b"finish")
        node.failed = 0
        node.ready.set()

    def tell(self, node: Node, *parts: bytes | memoryview | bytearray) -> None:
        self.control.send_multipart([str(node.number).encode(), *parts])

    def _event(self, node: Node, event: Event) -> None:
        self.tell(node, b"event", *frame(event))

    # ---- deaths -----------------------------------------------------------------------------------------------------------

    def _died(self, node: Node, death: str) -> None:
        if self.plan.replicated:
            self._replace(node, death)
        elif self.plan.durability == "memory":
            raise RankDied(f"server {node.server} {death}, and what it had is lost: durability='log' would have kept it")
        elif node.failed == ATTEMPTS:
            raise RankDied(f"server {node.server} {death}, and so it did when it was started again")
        else:
            self.say(f"server {node.server} {death}")
            node.start()

    def _replace(self, node: Node, death: str) -> None:
        """Of two nodes there is one left."""
        backup = self.backups[node.server]
        if node is self.serving[node.server]:
            if backup is None or not backup.ready.is_set():
                raise RankDied(f"server {node.server} {death}, and it has no backup any more")
            self.say(f"server {node.server} {death}")
            self._promote(node.server, backup)
        elif node is backup:
            self.say(f"the backup of server {node.server} {death}")
            self.backups[node.server] = None
            self.tell(self.serving[node.server], b"alone")
            if not node.failed:  # else the next one might well die as it starts, too
                self._renew(node.server)

    def _promote(self, server: int, backup: Node) -> None:
        """A new view, in which the backup serves: it is told first, then, when it has obeyed, the workers are."""
        self.view += 1
        self.serving[server], self.backups[server] = backup, None
        backup.ready.clear()
        self._event(backup, Membership(self.view, {}, tuple(node.number for node in self.serving)))

    def _renew(self, server: int) -> None:
        """A new backup: the primary writes down all that it has, and says so; then the new one begins with that.

        Over tcp there is none: workers know only the ports of the first nodes.
        """
        if self.plan.address == "ipc" and not self.finishing:
            number = max(number for number, node in self.nodes.items() if node.server == server) + self.plan.servers
            self.backups[server] = self.nodes[number] = Node(self.plan, number, self.live)
            self.tell(self.serving[server], b"handover", str(number).encode())

    def _watch(self) -> None:
        """Is everybody awake? Who has been silent for too long may be dead, or only asleep: nobody can tell."""
        now, silence = time.monotonic(), f"has not answered for {self.plan.patience:g} s"
        for server, (first, second) in enumerate(zip(self.serving, self.backups, strict=True)):
            if second is None or first.over or not (first.ready.is_set() and second.ready.is_set()):
                continue  # one that is over packs its report, however long that takes
            silent = [node for node in (first, second) if now - node.heard > self.plan.patience]
            if silent == [first]:
                self.say(f"server {server} {silence}")
                self._promote(server, second)
            elif silent == [second]:
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
            members = Membership(self.view, {}, tuple(node.number for node in self.serving))
            self.news.send_multipart(frame(members))
