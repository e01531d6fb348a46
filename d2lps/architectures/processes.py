"""A job on processes of this machine, of which one can be killed, and to which more can come."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from d2lps import kvstore, launch
from d2lps.architectures.accidents import member, run_rank
from d2lps.architectures.elastic import elastic
from d2lps.architectures.job import Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.replica import noted, somebody_waits
from d2lps.architectures.six import COLLECTIVE, STORED, count, known
from d2lps.comm import Communicator, RankDied
from d2lps.cost.numbers import named, whole
from d2lps.result import Run

AFTER = 2  # steps, something happens
LOOK = 0.002  # seconds between two looks at how far the job is


def run(
    architecture: str, job: Job, ranks: int, accident: str | None = None,
    servers: int = 2, timeout: float = 60.0, trace: bool = False,
) -> Outcome:  # fmt: skip
    """Do the job on processes; with an accident, as soon as two steps are done.

    >>> run("cloud-native", Job(), 4, "kill").losses[3] == run("cloud-native", Job(), 4).losses[3]      # doctest: +SKIP

    accident: "kill", the middle one of the processes is killed (SIGKILL) when it has done them, or "join": it begins with as
    many as can share the batch without the last one, which comes then. A job of collectives is ended and started again from its
    last checkpoint, by a launcher that has noticed. Time begins with the first launch, which it includes. servers: of a store;
    that of "cloud-native" has backups, the other a log. timeout, trace: as of `d2lps.run`. ValueError for another accident;
    else as d2lps.run and kvstore.run, but that a death is not the end.
    """
    known(architecture)
    if accident is not None:
        named("accident", accident, {"kill": None, "join": None})
    if accident and job.steps < AFTER + 2:
        raise ValueError(f"steps={job.steps}: an accident after {AFTER} needs some after it, at least {AFTER + 2}")
    if (at_work := count(architecture, job, whole("ranks", ranks))) < 2 and accident:
        raise ValueError(f"ranks={ranks}, of which {at_work} would work: an accident needs 2")
    outcome = Outcome(architecture, job)
    with tempfile.TemporaryDirectory(prefix="d2lps-job-") as folder:
        job, options = replace(job, folder=folder), {"timeout": timeout, "trace": trace}
        if architecture in STORED:
            _stored(outcome, job, at_work, accident, servers, options)
        else:
            _elastic(outcome, job, ranks, accident, options)
    return outcome


# ---- collectives --------------------------------------------------------------------------------------------------------------


def _elastic(outcome: Outcome, job: Job, ranks: int, accident: str | None, options: dict[str, Any]) -> None:
    began, still = time.monotonic(), accident

    def attempt(there: list[int]) -> tuple[str, list[int]]:
        nonlocal still
        happens, still = still, None
        Path(job.folder, "comes").unlink(missing_ok=True)
        try:
            with _somebody_comes(job, happens == "join"):
                doomed = dying(job, len(there), happens)
                found = launch.run(run_rank, len(there), COLLECTIVE[outcome.architecture], doomed, **options)
        except RankDied as error:
            if len(there) == 1:
                raise
            return f"{time.monotonic() - began:.2f} s: {str(error).splitlines()[0]}", there[:-1]
        outcome.add(found, -began, there)
        stopped = found[0].stopped
        return (f"{time.monotonic() - began:.2f} s: somebody has come; all stop", [*range(ranks)]) if stopped else ("", there)

    elastic(outcome, job, [*range(ranks - (accident == "join"))], attempt)


def dying(job: Job, ranks: int, accident: str | None) -> Job:
    """The job, in which the middle one of the ranks dies if that is the accident."""
    return replace(job, dies=(ranks // 2, AFTER) if accident == "kill" else None)


@contextmanager
def _somebody_comes(job: Job, comes: bool) -> Iterator[None]:
    """As soon as some steps are done, and if that is the accident."""
    over = threading.Event()

    def watch() -> None:
        while noted(job).get("done", 0) < AFTER:
            if over.wait(LOOK):
                return
        Path(job.folder, "comes").touch()

    thread = threading.Thread(target=watch, name="accident", daemon=True)
    if comes:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if comes:
            thread.join()


# ---- stores -------------------------------------------------------------------------------------------------------------------


def _stored(outcome: Outcome, job: Job, ranks: int, accident: str | None, servers: int, options: dict[str, Any]) -> None:
    late = (ranks - 1,) if accident == "join" else ()
    rules: dict[str, Any] = {"consistency": "bsp", "durability": "log"}
    if outcome.architecture == "cloud-native":
        rules = {"consistency": "asp", "durability": "replica"}

    def saboteur(cluster: kvstore.Cluster) -> None:
        while noted(job).get("done", 0) < AFTER:
            cluster.sleep(LOOK)
        Path(job.folder, "comes").touch()

    began = time.monotonic()
    found: Run = kvstore.run(
        member, ranks, servers, STORED[outcome.architecture], dying(job, ranks, accident), late, as_soon_as_told,
        absent=late, saboteur=saboteur if late else None, **rules, **options,
    )  # fmt: skip
    outcome.add(found, -began, [*range(ranks)])
    outcome.history += found.history  # type: ignore[attr-defined]
    outcome.history += [f"worker {rank} has come, to step {min(found[rank].ended)}" for rank in late if found[rank]]


def as_soon_as_told(comm: Communicator, job: Job) -> bool:
    """Return when somebody has said that there is work to do; False if that is over by then."""
    while not somebody_waits(comm, job):
        if noted(job).get("done") == job.steps:
            return False
        time.sleep(LOOK)
    return True
