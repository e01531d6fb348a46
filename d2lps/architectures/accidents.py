"""The four things that happen to a machine: it dies, it slows down, its cable is cut, or it is a new one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from d2lps.comm import Communicator, RankDied
from d2lps.kvstore import KVWorker, Lost, Refused
from d2lps.simulator import Cut, Kill, Slow
from d2lps.topology import Topology

ACCIDENTS = ("kill", "slow", "cut", "join")
SLOWER = 4  # times
OUTAGE = 3  # steps that a cable stays cut


@dataclass(frozen=True)
class Accident:
    """In a simulation: what happens to the middle one of the devices, when, and how long it takes to be noticed.

    at: seconds; step: what a step takes undisturbed. Who is silent for a step is taken for dead where somebody listens: by a
    launcher whose rank has died, by a store whose worker is dead or can't be reached. restart: seconds until new programs run.
    """

    kind: str
    at: float
    step: float
    node: Hashable
    link: tuple[Hashable, Hashable]
    restart: float

    @property
    def noticed(self) -> float:
        return self.at + self.step

    def faults(self, nodes: list[Hashable], began: float) -> list[Any]:
        """For a run that begins at this time: what the simulator is told. A launcher whose rank has died ends the others."""
        at = self.at - began
        until = at + OUTAGE * self.step
        if self.node not in nodes or self.kind == "join":
            return []
        if self.kind == "slow":
            return [Slow(self.node, SLOWER, max(at, 0.0))]
        if at < 0:
            return []
        return [Kill(self.node, at)] if self.kind == "kill" else [Cut(self.link, at, until)]

    def ends(self, nodes: list[Hashable], began: float) -> list[Any]:
        """That the launcher ends the others, too, if it has noticed that one has died."""
        killed = self.kind == "kill" and self.node in nodes and self.at >= began
        return [Kill(node, self.noticed - began) for node in nodes if node != self.node] if killed else []

    def given_up(self, nodes: list[Hashable]) -> list[tuple[float, Any]]:
        """What a store is told of a worker who is dead, or silent for too long."""
        return [(self.noticed, Lost(nodes.index(self.node)))] if self.kind in ("kill", "cut") else []


def cable(cluster: Topology, nodes: list[Hashable], node: Hashable) -> tuple[Hashable, Hashable]:
    """The first link on this node's way to the one before it."""
    before = nodes[nodes.index(node) - 1]
    return cluster.links[cluster.route(node, before).links[0]]


def run_rank(comm: Communicator, function: Callable[..., Any], job: Any) -> Any:
    """One rank of a job that may have to stop: who hears that another has died has nothing more to say."""
    try:
        return function(comm, job)
    except RankDied:
        return None


def member(kv: KVWorker, function: Callable[..., Any], job: Any, late: tuple[int, ...], come: Callable[..., bool]) -> Any:
    """One worker of a store: one that comes late waits for its time; one that was given up has nothing more to say.

    come(comm, job): whether to join now, or not at all, as soon as that is known.
    """
    if kv.rank in late:
        if not come(kv.comm, job):
            return None
        kv.join()
    try:
        return function(kv, job)
    except Refused as error:
        if "given up" in str(error):
            return None
        raise
