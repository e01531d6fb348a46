"""A job on a described cluster, undisturbed or with an accident."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from dataclasses import replace
from math import inf
from typing import Any

from d2lps import kvstore, simulator
from d2lps.architectures.accidents import ACCIDENTS, Accident, cable, member, run_rank
from d2lps.architectures.elastic import elastic
from d2lps.architectures.job import Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.six import COLLECTIVE, STORED, count, known
from d2lps.comm import Communicator
from d2lps.cost.numbers import named, whole
from d2lps.parallel.prediction.search import machine_size
from d2lps.topology import Topology

RESTART = 5.0  # seconds from a job's end to its next beginning, as described; on processes it is measured


def simulate(
    architecture: str, job: Job, cluster: Topology, ranks: int | None = None, accident: str | None = None,
    servers: list[Hashable] | None = None, restart: float = RESTART, trace: bool = True, quiet: Outcome | None = None,
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
    known(architecture)
    cluster = cluster.reached()
    nodes = _nodes(cluster, ranks)
    if accident is None:
        return _world(architecture, job, cluster, nodes, None, servers, trace)
    named("accident", accident, dict.fromkeys(ACCIDENTS))
    if job.steps < 4:
        raise ValueError(f"steps={job.steps}: an accident in the third step needs some after it, at least 4")
    at_work = nodes[: count(architecture, job, len(nodes))]
    if len(at_work) < 2:
        raise ValueError(f"ranks={len(nodes)}, of which {len(at_work)} would work: an accident needs 2")
    quiet = quiet or alone(architecture, replace(job, steps=3), cluster, ranks, accident, servers=servers, trace=False)
    ends = next(iter(quiet.ended.values()))
    step, node = ends[2] - ends[1], _victim(at_work, _homes(architecture, cluster, nodes, servers))
    happens = Accident(accident, ends[1] + step / 2, step, node, cable(cluster, nodes, node), restart)
    return _world(architecture, job, cluster, nodes, happens, servers, trace)


def alone(architecture: str, job: Job, cluster: Topology, ranks: int | None, accident: str, **options: Any) -> Outcome:
    """The same without the accident: where somebody would have joined, without the one."""
    nodes = _nodes(cluster, ranks)
    if accident == "join" and architecture in STORED:
        never = Accident("join", inf, inf, nodes[0], cable(cluster, nodes, nodes[0]), 0.0)
        return _world(architecture, job, cluster.reached(), nodes, never, options.get("servers"), options.get("trace", True))
    before = _before(architecture, job, nodes) if accident == "join" else nodes
    return simulate(architecture, job, cluster, len(before), **options)


def _nodes(cluster: Topology, ranks: int | None) -> list[Hashable]:
    """The first devices, as many as there shall be ranks; ValueError where there are not so many."""
    if not 0 < whole("ranks", len(cluster.devices) if ranks is None else ranks) <= len(cluster.devices):
        raise ValueError(f"ranks={ranks}: the cluster has {len(cluster.devices)} devices")
    return cluster.devices[:ranks]


def _homes(architecture: str, cluster: Topology, nodes: list[Hashable], servers: list[Hashable] | None) -> list[Hashable]:
    """Where a store's servers are."""
    if architecture not in STORED:
        return []
    every = 2 if architecture == "cloud-native" else machine_size(cluster)
    return servers or nodes[min(every, len(nodes)) - 1 :: every]


def _victim(nodes: list[Hashable], homes: list[Hashable]) -> Hashable:
    """The middle one of those whose death is not that of a server: nothing replaces these in a simulation."""
    free = [node for node in nodes if node not in homes]
    if not free:
        raise ValueError(f"servers={homes} are on all devices: whichever has an accident, one of them would")
    return free[len(free) // 2]


def _before(architecture: str, job: Job, nodes: list[Hashable]) -> list[Hashable]:
    """Who is there before the last one comes."""
    return nodes[: count(architecture, job, len(nodes) - 1)]


def _world(
    architecture: str, job: Job, cluster: Topology, nodes: list[Hashable], accident: Accident | None,
    servers: list[Hashable] | None, trace: bool,
) -> Outcome:  # fmt: skip
    options: dict[str, Any] = {"device": "meta" if job.described else "cpu", "trace": trace}
    outcome = Outcome(architecture, job)
    if architecture in STORED:
        _stored(outcome, cluster, nodes, accident, servers, options)
    else:
        with tempfile.TemporaryDirectory(prefix="d2lps-job-") as folder:
            _elastic(outcome, replace(job, folder=folder), cluster, nodes, accident, options)
    return outcome


# ---- collectives --------------------------------------------------------------------------------------------------------------


def _elastic(
    outcome: Outcome, job: Job, cluster: Topology, nodes: list[Hashable], accident: Accident | None, options: dict[str, Any]
) -> None:
    began, waits = 0.0, accident is not None and accident.kind == "join"

    def attempt(there: list[Hashable]) -> tuple[str, list[Hashable]]:
        nonlocal began, waits
        faults = [*accident.faults(there, began), *accident.ends(there, began)] if accident else []
        coming = replace(job, comes=accident.at if accident and waits else None)
        function = COLLECTIVE[outcome.architecture]
        run = simulator.simulate(run_rank, cluster, function, coming, ranks=there, faults=faults, **options)
        outcome.add(run, began, there)
        if accident is not None and any(record is None for record in run):
            ended, told = accident.noticed, f"{accident.node} is dead, and the job is ended"
            there = [node for node in nodes if node != accident.node]
        elif accident is not None and any(record.stopped for record in run):
            ended, told, there, waits = began + run.time, "somebody has come; all stop", nodes, False
        else:
            return "", there
        began = ended + accident.restart
        return f"{ended:.3g} s: {told}", there

    elastic(outcome, job, _before(outcome.architecture, job, nodes) if waits else nodes, attempt)


# ---- stores: who is gone is gone, and the others go on ------------------------------------------------------------------------


def _stored(
    outcome: Outcome, cluster: Topology, nodes: list[Hashable], accident: Accident | None, servers: list[Hashable] | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    job, function = outcome.job, STORED[outcome.architecture]
    homes = _homes(outcome.architecture, cluster, nodes, servers)
    nodes = nodes[: count(outcome.architecture, job, len(nodes))]
    late: tuple[int, ...] = ()
    if accident is not None and accident.kind == "join":
        late = tuple(range(len(_before(outcome.architecture, job, nodes)), len(nodes)))
        job = replace(job, comes=accident.at)
    faults = accident.faults(nodes, 0.0) if accident else []
    events = accident.given_up(nodes) if accident else []
    consistency = {"parameter server": "bsp", "cloud-native": "asp"}[outcome.architecture]
    rules: dict[str, Any] = {"consistency": consistency, "absent": late, "events": events}
    run = kvstore.simulate(member, cluster, nodes, homes, function, job, late, at_its_time, faults=faults, **rules, **options)
    outcome.add(run, 0.0, nodes)
    if accident is not None and events:
        outcome.history.append(f"{accident.noticed:.3g} s: {accident.node} is given up; the others go on")
    if accident is not None and late and accident.at < inf:
        outcome.history.append(f"{accident.at:.3g} s: {len(late)} more join")


def at_its_time(comm: Communicator, job: Job) -> bool:
    """Return when it is time to come; False if that will never be."""
    if job.comes == inf:
        return False
    comm.sleep(job.comes or 0.0)
    return True
