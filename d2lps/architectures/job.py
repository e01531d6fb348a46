"""The one job that all architectures do: one function, one model, one seed, one global batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import gcd, inf, prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from d2lps.arguments import whole
from d2lps.parallel.pipeline.schedules import Action
from d2lps.parallel.prediction.program import Calibration, Rank, World
from d2lps.parallel.prediction.program import Job as Step
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.training.text import LETTERS, Text, text
from d2lps.parallel.transformer import Transformer
from d2lps.topology.device import Device

AFTER = 2  # steps, on processes something happens

# What the others are compared on: small enough to train in the page, and large enough to fill the links of 64 devices.
SMALL = Transformer(layers=2, hidden=16, heads=2, vocab=len(LETTERS), sequence=16)


@dataclass(frozen=True)
class Job:
    """What is to be trained; how it is shared out is the architecture's affair.

    >>> job = Job(batch=16, steps=3)
    >>> job.fits(7), job.parts                          # of 7 ranks, 4 can share 16 sequences; 16 leases of one sequence
    (4, 16)

    batch: sequences a step, of all ranks together, whoever and however many they are. part: sequences that are leased at a time.
    data: as of `train`; None for a described job, whose tensors have no content: it takes the time of one that has, and has no
    losses. Optimizer: SGD, so that a rounding error stays one. Weights are FP64, or BF16 where they are only described.
    every: steps from one checkpoint to the next. A run fills in (see `Harness`): folder, where those lie; comes, when somebody
    will come, in seconds of a simulation, or on processes when so many steps are done; dies, the process that is to be killed as
    soon as two steps are done. ValueError for a batch that is no multiple of the part.
    """

    transformer: Transformer = SMALL
    batch: int = 16
    steps: int = 4
    part: int = 1
    lr: float = 0.2
    momentum: float = 0.9
    seed: int = 0
    data: Text | None = field(default_factory=partial(text, SMALL.sequence))
    every: int = 2
    folder: str = ""
    comes: float = inf
    dies: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "part", "every"):
            whole(name, getattr(self, name))
        if self.batch % self.part:
            raise ValueError(f"batch={self.batch} is no multiple of part={self.part}")

    @property
    def described(self) -> bool:
        return self.data is None

    @property
    def parts(self) -> int:
        """Leases a step."""
        return self.batch // self.part

    @property
    def hyper(self) -> dict[str, Any]:
        """The optimizer's numbers."""
        return {"lr": self.lr, "momentum": self.momentum}

    @property
    def precision(self) -> str:
        return "bf16" if self.described else "fp64"

    def fits(self, ranks: int) -> int:
        """The most of so many ranks that can share the batch evenly."""
        return next(count for count in range(ranks, 0, -1) if self.batch % count == 0)

    def plan(self, ranks: int) -> Plan:
        """Two share each layer, two such pairs the layers, if that uses as many ranks as can be; such groups share the batch."""
        shapes = [(self.fits(ranks // (tp * pp)), tp, pp) for tp, pp in ((2, 2), (2, 1), (1, 1)) if tp * pp <= ranks]
        dp, tp, pp = max(shapes, key=prod)
        return Plan(dp, tp, pp, micro_batch=gcd(self.batch // dp, 8), precision=self.precision, overlap=False)

    def module(self) -> nn.Sequential:
        """The model with its first weights; described, with none."""
        with torch.device("meta" if self.described else "cpu"):
            return self.transformer.module(self.seed, torch.bfloat16 if self.described else torch.float64)

    def loss(self, weights: Tensor) -> float:
        """Of a model with these weights, on 16 sequences that no training has seen."""
        module = self.module()
        vector_to_parameters(weights, module.parameters())
        tokens, targets = text(self.transformer.sequence, test=True).batch(0, 16)
        with torch.no_grad():
            return cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).item()

    def optimizer(self, shards: list[nn.Parameter]) -> torch.optim.Optimizer:
        """That of a rank; a server makes the same one from `hyper`."""
        return torch.optim.SGD(shards, **self.hyper)

    def step_on(self, device: Device, plan: Plan) -> Step:
        """What a step of this plan asks of a device, as `predict` has it."""
        return Step(self.transformer, plan, self.batch, device, Calibration())

    def seconds(self, device: Device | None) -> float:
        """That a device takes for one sequence, forward and backward; ValueError where nobody has said what it can do."""
        if device is None:
            raise ValueError("the cluster's nodes have no device=Device(...): what is computed there can't be priced")
        clock = Clock()
        rank = Rank(self.step_on(device, Plan(overlap=False)), cast(World, clock), 0, {})
        for kind in "FB":
            rank.act(Action(kind, 0, 0))
        return clock.seconds


class Clock:
    """Of a world, what a rank alone with its copy of the model needs; it only adds up how long that computes."""

    seconds = 0.0

    def compute(self, seconds: float, label: str = "") -> None:
        self.seconds += seconds


# A GPT of two billion parameters; 896 sequences can be shared out to 56 and to 64 ranks.
LARGE = Job(Transformer(8, hidden=4096, heads=32, vocab=50_000, sequence=1024), batch=896, part=7, data=None)
