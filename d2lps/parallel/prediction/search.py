"""All plans of a model on a cluster, the fastest first, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from d2lps.parallel.prediction.calibration import Calibration
from d2lps.parallel.prediction.memory import held
from d2lps.parallel.prediction.predict import Prediction, described
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.transformer import Transformer
from d2lps.topology import Topology


@dataclass(frozen=True)
class Ranking:
    """found: what fits, the fastest first. lost: plans that do not fit into memory, with their bytes by holder, the nearest first."""

    found: list[Prediction]
    lost: list[tuple[Plan, dict[str, float]]]
    limit: float

    @property
    def best(self) -> Prediction:
        return self.found[0]

    def why(self, prediction: Prediction) -> str:
        """What a plan loses its time to, against the best: "+3.1 s: dp 2.4, bubble 0.8"."""
        late = {label: prediction.parts[label] - self.best.parts[label] for label in prediction.parts}
        worst = sorted((label for label in late if late[label] > 0), key=lambda label: -late[label])[:2]
        told = ", ".join(f"{label} {late[label]:.2g}" for label in worst)
        return f"{prediction.time - self.best.time:+.2g} s" + (f": {told}" if told else "")
