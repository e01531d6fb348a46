"""The four things that happen to a machine: it dies, it slows down, its cable is cut, or it is a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any

from d2lps.architectures.job import Job
from d2lps.architectures.replica import somebody_waits
from d2lps.comm import Communicator, RankDied
from d2lps.kvstore import KVWorker, Lost, Refused
from d2lps.simulator import Cut, Kill, Slow

ACCIDENTS = ("kill", "slow", "cut", "join")
SLOWER = 4  # times
OUTAGE = 3  # steps that a cable stays cut
LOOK = 0.002  # seconds between two looks at how far the job is


@dataclass(frozen=True)
class Accident:
    """In a simulation: what happens to one of the devices, when, and how long it takes to be noticed.

    at: seconds; step: what a step takes undisturbed. Who is silent for a step is taken for dead where somebody listens: by a
    launcher whose rank has died, by a store whose worker is dead or can't be reached. link: the first on the node's way.
    """

    kind: str
    at: float
    step: float
    node: Hashable
    link: tuple[Hashable, Hashable]

    @property
    def noticed(self) -> float:
        return self.at + self.step

    def faults(self, nodes: list[Hashable], began: float) -> list[Any]:
        """For a run on these nodes that begins at this time: what the simulator is told. A device that is slow stays so."""
        at = self.at - began
        if self.node not in nodes or self.kind == "join" or (at < 0 and self.kind != "slow"):
            return []
        if self.kind == "slow":
            return [Slow(self.node, SLOWER, max(at, 0.0))]
        return [Kill(self.node, at) if self.kind == "kill" else Cut(self.link, at, at + OUTAGE * self.step)]

    def ends(self, nodes: list[Hashable], began: float) -> list[Any]:
        """That the launcher ends the others, too, once it has noticed that one has died."""
        killed = self.kind == "kill" and self.node in nodes and self.at >= began
        return [Kill(node, self.noticed - began) for node in nodes if node != self.node] if killed else []

    def given_up(self, nodes: list[Hashable]) -> list[tuple[float, Any]]:
        """What a store is told of a worker who is dead, or silent for too long."""
        return [(self.noticed, Lost(nodes.index(self.node)))] if self.kind in ("kill", "cut") else []


def run_rank(comm: Communicator, function: Callable[..., Any], job: Job) -> Any:
    """One rank of a job that may have to stop: who hears that another has died has nothing more to say."""
    try:
        return function(comm, job)
    except RankDied:
        return None


def run_worker(kv: KVWorker, function: Callable[..., Any], job: Job, late: tuple[int, ...]) -> Any:
    """One worker of a store: one that comes late waits for its time; one that was given up has nothing more to say."""
    if kv.rank in late:
        if job.comes == inf:
            return None
        _wait_for_its_time(kv.comm, job)
        kv.join()
    try:
        return function(kv, job)
    except Refused as error:
        if "given up" in str(error):
            return None
        raise


def _wait_for_its_time(comm: Communicator, job: Job) -> None:
    if comm.topology:
        comm.sleep(job.comes)
    while not somebody_waits(comm, job):
        time.sleep(LOOK)
