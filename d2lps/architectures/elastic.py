"""A job of collectives: what happens to one rank happens to all, and they begin again with those who are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2lps.architectures.job import Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.replica import noted
from d2lps.architectures.six import count

Places = list[Any]


def elastic(outcome: Outcome, job: Job, there: Places, attempt: Callable[[Places], tuple[str, Places]]) -> None:
    """Start the job until it is done, each time from its last checkpoint.

    attempt(places): start it there, and add its Run, if there is one, to the outcome; why it has ended too soon, or "", and who
    is there now. job: with the folder where its progress is noted.
    """
    why = "first"
    while why:
        why, there = attempt(there[: count(outcome.architecture, job, len(there))])
        progress = noted(job)
        if why:
            done, saved = progress.get("done", 0), progress.get("saved", 0)
            ranks = count(outcome.architecture, job, len(there))
            outcome.redone += done - saved
            outcome.history += [f"{why} after {done} steps, {saved} of them saved", f"it begins again on {ranks} devices"]
    outcome.told = progress["losses"]  # of all attempts
