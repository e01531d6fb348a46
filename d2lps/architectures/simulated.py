"""A job on a described cluster, undisturbed or with an accident."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import inf
from typing import Any

from d2lps import kvstore, simulator
from d2lps.architectures.accidents import ACCIDENTS, Accident, run_rank, run_worker
from d2lps.architectures.harness import Harness
from d2lps.architectures.job import Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.six import COLLECTIVE, CONSISTENCY, STORED
from d2lps.arguments import whole
from d2lps.comm import RankDied
from d2lps.parallel.prediction.search import machine_size
from d2lps.result import Run
from d2lps.topology import Topology

RESTART = 5.0  # seconds from a job's end to its next beginning, as described; on processes it is measured


def simulate(
    architecture: str, job: Job, cluster: Topology, ranks: int | None = None, accident: str | None = None,
    servers: list[Hashable] | None = None, trace: bool = True, quiet: Outcome | None = None,
) -> Outcome:  # fmt: skip
    """Do the job in virtual time; with an accident, in the middle of the third step, or where it would have been.

    >>> simulate("ring", Job(), dgx_a100_pod(1)).losses[0]                              # doctest: +SKIP
    4.602

    ranks: on the first devices, by default on all. accident: "kill", "slow" (4 times) or "cut" (for three steps) of the device in
    the middle, or "join" of the last one: it begins with as many as can share the batch without it. servers: where the store's
    live, by default on the last device of each machine, and for "cloud-native" on every second one. Links have what collectives
    reach of them. quiet: the same without the accident, if that is known (see `alone`), from which the time of the third step
    follows. Compare the times of described jobs: a small one's are made of latencies and of what `predict` takes for overhead.
    ValueError for a name that is none, or a job of less than 4 steps with an accident.
    """
    world = Simulated(architecture, job, cluster, ranks, accident == "join", servers, trace)
    if accident is not None:
        world.check(accident, ACCIDENTS)
        world.cause(accident, quiet or alone(architecture, replace(job, steps=3), cluster, ranks, accident, servers, trace=False))
    return world.carry_out()


def alone(
    architecture: str, job: Job, cluster: Topology, ranks: int | None, accident: str,
    servers: list[Hashable] | None = None, trace: bool = True,
) -> Outcome:  # fmt: skip
    """The same without the accident: where somebody would have joined, without the one."""
    return Simulated(architecture, job, cluster, ranks, accident == "join", servers, trace).carry_out()


class Simulated(Harness):
    """On a cluster whose links have what collectives reach of them; where some join, they never do, unless that is caused."""

    began = 0.0  # the next attempt
    accident: Accident | None = None

    def __init__(
        self, architecture: str, job: Job, cluster: Topology, ranks: int | None, joins: bool,
        servers: list[Hashable] | None, trace: bool,
    ) -> None:  # fmt: skip
        if not 0 < whole("ranks", len(cluster.devices) if ranks is None else ranks) <= len(cluster.devices):
            raise ValueError(f"ranks={ranks}: the cluster has {len(cluster.devices)} devices")
        super().__init__(architecture, job, cluster.devices[:ranks], joins)
        every = 2 if architecture == "cloud-native" else machine_size(cluster)
        self.cluster, self.servers = cluster.reached(), servers or self.places[min(every, len(self.places)) - 1 :: every]
        self.options: dict[str, Any] = {"device": "meta" if job.described else "cpu", "trace": trace}

    def cause(self, kind: str, quiet: Outcome) -> None:
        """Let it happen in the middle of the third step, or where that would have been.

        In a store's job it happens to none of the devices that servers are on: in a simulation nothing replaces these.
        """
        ends = next(iter(quiet.ended.values()))
        free = [node for node in self.at_work if self.architecture not in STORED or node not in self.servers]
        if not free:
            raise ValueError(f"servers={self.servers} are on all devices: whichever has an accident, one of them would")
        node, step = free[len(free) // 2], ends[2] - ends[1]
        way = self.cluster.route(node, self.places[self.places.index(node) - 1]).links
        self.accident = Accident(kind, ends[1] + step / 2, step, node, self.cluster.links[way[0]])
        self.comes = self.accident.at if kind == "join" else inf

    def collective(self, job: Job, there: list[Hashable]) -> Run:
        faults = self.accident.faults(there, self.began) + self.accident.ends(there, self.began) if self.accident else []
        function = COLLECTIVE[self.architecture]
        run = simulator.simulate(run_rank, self.cluster, function, job, ranks=there, faults=faults, **self.options)
        self.outcome.attempts.append((run, self.began, there))
        dead = self.accident is not None and any(record is None for record in run)
        self.now = self.accident.noticed if self.accident and dead else self.began + run.time
        self.began = self.now + RESTART
        if self.accident and dead:
            raise RankDied(f"{self.accident.node} is dead, and the job is ended")
        return run

    def survivors(self, there: list[Hashable]) -> list[Hashable]:
        assert self.accident is not None
        return [node for node in self.places if node != self.accident.node]

    def store(self, job: Job, late: tuple[int, ...]) -> None:
        function, happens = STORED[self.architecture], self.accident
        run = kvstore.simulate(
            run_worker, self.cluster, self.at_work, self.servers, function, job, late,
            faults=happens.faults(self.at_work, 0.0) if happens else (),
            events=happens.given_up(self.at_work) if happens else (),
            consistency=CONSISTENCY[self.architecture], absent=late, **self.options,
        )  # fmt: skip
        self.outcome.attempts.append((run, 0.0, self.at_work))
        if happens and happens.kind in ("kill", "cut"):
            self.outcome.history.append(f"{happens.noticed:.3g} s: {happens.node} is given up; the others go on")
        if happens and late:
            self.outcome.history.append(f"{happens.at:.3g} s: {len(late)} more join")
