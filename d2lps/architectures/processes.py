"""A job on processes of this machine, of which one can be killed, and to which more can come."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import Any

from d2lps import kvstore, launch
from d2lps.architectures.accidents import run_rank, run_worker
from d2lps.architectures.harness import Harness
from d2lps.architectures.job import AFTER, Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.six import COLLECTIVE, CONSISTENCY, STORED
from d2lps.arguments import whole
from d2lps.result import Run

SERVERS = 2
DURABILITY = {"parameter server": "log", "cloud-native": "replica"}


def run(
    architecture: str, job: Job, ranks: int, accident: str | None = None, timeout: float = 60.0, trace: bool = False
) -> Outcome:
    """Do the job on processes; with an accident, as soon as two steps are done.

    >>> run("cloud-native", Job(), 4, "kill").losses[3] == run("cloud-native", Job(), 4).losses[3]      # doctest: +SKIP

    accident: "kill", the middle one of the processes is killed (SIGKILL) when it has done them, or "join": it begins with as
    many as can share the batch without the last one, which comes then. A job of collectives is ended and started again from its
    last checkpoint, by a launcher that has noticed. Time begins with the first launch, which it includes. A store has two
    servers; those of "cloud-native" have backups, the others a log. timeout, trace: as of `d2lps.run`. ValueError for another
    accident; else as d2lps.run and kvstore.run, but that a death is not the end.
    """
    return Processes(architecture, job, ranks, accident, {"timeout": timeout, "trace": trace}).carry_out()


class Processes(Harness):
    """On this machine; the numbers of processes are their places."""

    def __init__(self, architecture: str, job: Job, ranks: int, accident: str | None, options: dict[str, Any]) -> None:
        super().__init__(architecture, job, range(whole("ranks", ranks)), accident == "join")
        if accident is not None:
            self.check(accident, ("kill", "join"))
        self.comes = AFTER if accident == "join" else inf
        self.job = replace(job, dies=len(self.at_work) // 2 if accident == "kill" else None)
        self.options, self.began = options, time.monotonic()

    def collective(self, job: Job, there: list[int]) -> Run:
        try:
            run = launch.run(run_rank, len(there), COLLECTIVE[self.architecture], job, **self.options)
        finally:
            self.now = time.monotonic() - self.began
        self.outcome.attempts.append((run, -self.began, there))
        return run

    def survivors(self, there: list[int]) -> list[int]:
        return there[:-1]

    def store(self, job: Job, late: tuple[int, ...]) -> None:
        name, workers = self.architecture, len(self.at_work)
        rules: dict[str, Any] = {"consistency": CONSISTENCY[name], "durability": DURABILITY[name], "absent": late}
        run: Any = kvstore.run(run_worker, workers, SERVERS, STORED[name], job, late, **rules, **self.options)
        self.outcome.attempts.append((run, -self.began, self.at_work))
        self.outcome.history += run.history
        self.outcome.history += [f"worker {rank} has come, to step {min(run[rank].ended)}" for rank in late if run[rank]]
