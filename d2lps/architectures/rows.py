"""Each accident to each architecture: what it does, a row."""

from __future__ import annotations

from dataclasses import dataclass

from d2lps.architectures.accidents import ACCIDENTS
from d2lps.architectures.job import Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.simulated import alone, simulate
from d2lps.architectures.six import ARCHITECTURES
from d2lps.topology import Topology


@dataclass(frozen=True)
class Row:
    """What an accident did to a job, beside the same job without it.

    steps: done in the end; redone: made twice. time, undisturbed: seconds. same_loss: whether the final weights' loss is that of
    the job that nobody disturbed, on all its ranks, to 1e-5; None for described jobs. affected: of so many ranks that came to the
    end, how many had a step 1.25 times as long as usual. history: what happened, in sentences.
    """

    architecture: str
    accident: str
    steps: int
    redone: int
    time: float
    undisturbed: float
    same_loss: bool | None
    affected: int
    of: int
    history: tuple[str, ...]

    @property
    def slowdown(self) -> float:
        return self.time / self.undisturbed


def row(
    architecture: str, accident: str, job: Job, cluster: Topology, ranks: int | None = None, whole: Outcome | None = None
) -> Row:
    """Do the job with and without the accident. whole: without, on all ranks, if that is known already.

    >>> row("ring", "kill", Job(steps=6), dgx_a100_pod(1)).redone                       # doctest: +SKIP
    0
    """
    whole = whole or simulate(architecture, job, cluster, ranks, trace=False)
    quiet = alone(architecture, job, cluster, ranks, accident, trace=False) if accident == "join" else whole
    found = simulate(architecture, job, cluster, ranks, accident, trace=False, quiet=quiet)
    same = None
    if found.loss is not None and whole.loss is not None:
        same = abs(found.loss - whole.loss) < 1e-5
    steps = 1 + max(max(ended) for ended in found.ended.values())
    return Row(
        architecture, accident, steps, found.redone, found.time, quiet.time, same,
        found.held_up(quiet.step_time), len(found.ended), tuple(found.history),
    )  # fmt: skip


def rows(job: Job, cluster: Topology, ranks: int | None = None) -> list[Row]:
    """All 24 of them: for each architecture six simulations."""
    whole = {architecture: simulate(architecture, job, cluster, ranks, trace=False) for architecture in ARCHITECTURES}
    return [row(name, accident, job, cluster, ranks, whole[name]) for name in ARCHITECTURES for accident in ACCIDENTS]
