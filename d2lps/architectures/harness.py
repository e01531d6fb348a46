"""How a job is started, and started again: alike in both worlds, which only say how ranks are made and what happens to them.

A job of collectives is elastic: what happens to one rank happens to all, and they begin again with those who are there. In a job
around a store who is gone is gone, and the others go on.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from d2lps.architectures.job import AFTER, Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.replica import noted
from d2lps.architectures.six import ARCHITECTURES, STORED, count
from d2lps.arguments import named
from d2lps.comm import RankDied
from d2lps.result import Run


class Harness(ABC):
    """A job that is put together in one way, on these places: nodes of a cluster, or the numbers of processes.

    joins: whether the last one is to come later, with all that can't share the batch without it. comes: when (see `Job`).
    at_work: the places that are used in the end; now: seconds since the job was first started.
    """

    comes = inf
    now = 0.0

    def __init__(self, architecture: str, job: Job, places: Sequence[Any], joins: bool) -> None:
        named("architecture", architecture, ARCHITECTURES)
        self.architecture, self.job, self.places, self.joins = architecture, job, list(places), joins
        self.outcome, self.at_work = Outcome(architecture, job), self._used(self.places)

    def check(self, accident: str, possible: Iterable[str]) -> None:
        """ValueError for an accident that is not possible, or nothing that it could happen to."""
        named("accident", accident, dict.fromkeys(possible))
        if self.job.steps < AFTER + 2:
            raise ValueError(f"steps={self.job.steps}: an accident after {AFTER} needs some after it, at least {AFTER + 2}")
        if (count := len(self.at_work)) < 2:
            raise ValueError(f"ranks={len(self.places)}, of which {count} would work: an accident needs 2")

    @property
    def before(self) -> list[Any]:
        """The places of those who are there from the first."""
        return self._used(self.places[:-1]) if self.joins else self.at_work

    def carry_out(self) -> Outcome:
        """Do the whole job, whatever happens to it."""
        with tempfile.TemporaryDirectory(prefix="d2lps-job-") as folder:
            job = replace(self.job, folder=folder, comes=self.comes)
            if self.architecture in STORED:
                self.store(job, late=tuple(range(len(self.before), len(self.at_work))))
            else:
                self._elastic(job)
        return self.outcome

    @abstractmethod
    def collective(self, job: Job, there: list[Any]) -> Run:
        """Start ranks there, and add their Run to the outcome; RankDied if one has died."""

    @abstractmethod
    def survivors(self, there: list[Any]) -> list[Any]:
        """The places that are left when one of those there has died."""

    @abstractmethod
    def store(self, job: Job, late: tuple[int, ...]) -> None:
        """Start servers, and workers at the places `at_work`, some of which come late; all that happens is the outcome's."""

    def _used(self, places: list[Any]) -> list[Any]:
        return places[: count(self.architecture, self.job, len(places))]

    def _elastic(self, job: Job) -> None:
        """Start the job until it is done, each time from its last checkpoint."""
        why, there = self._attempt(job, self.before)
        while why:
            progress, there = noted(job), self._used(there)
            done, saved = progress.get("done", 0), progress.get("saved", 0)
            self.outcome.redone += done - saved
            ended = f"{self.now:.3g} s: {why} after {done} steps, {saved} of them saved"
            self.outcome.history += [ended, f"it begins again on {len(there)} devices"]
            why, there = self._attempt(replace(job, comes=inf, dies=None), there)
        self.outcome.told = noted(job)["losses"]  # of all attempts

    def _attempt(self, job: Job, there: list[Any]) -> tuple[str, list[Any]]:
        """Start the job once; why it has ended too soon, or "", and who is there then."""
        try:
            stopped = self.collective(job, there)[0].stopped
        except RankDied as error:
            if len(there) == 1:
                raise
            return str(error).splitlines()[0], self.survivors(there)
        return "somebody has come; all stop" if stopped else "", self.places
