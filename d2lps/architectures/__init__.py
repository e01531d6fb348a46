"""Six ways to put a training job together, on one job: what each costs, and what becomes of it when something happens."""

from d2lps.architectures.accidents import ACCIDENTS
from d2lps.architectures.job import LARGE, Job
from d2lps.architectures.outcome import Outcome
from d2lps.architectures.processes import run
from d2lps.architectures.rows import Row, row, rows
from d2lps.architectures.simulated import alone, simulate
from d2lps.architectures.six import ARCHITECTURES

__all__ = ["ACCIDENTS", "ARCHITECTURES", "LARGE", "Job", "Outcome", "Row", "alone", "row", "rows", "run", "simulate"]
