"""A player of one training step under each of several plans, simulated when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from d2lps.comm import Communicator
from d2lps.parallel import Plan, Trainer, Transformer, activations, text
from d2lps.simulator import simulate
from d2lps.topology import Topology, star
from d2lps.topology.device import Device
from d2lps.widgets.choices import Choices
from d2lps.widgets.step_player import StepPlayer
from d2lps.widgets.texts import STEPS

# A slow device, so that small models take as long to compute as to send.
SMALL = Device(flops=40e9, memory=1e9, memory_bandwidth=400e9, efficiency=0.5)
PLANS = {
    "dp 4": Plan(dp=4), "dp 4, ZeRO 3": Plan(dp=4, zero=3), "tp 4": Plan(tp=4, micro_batch=4),
    "tp 4, sequence parallel": Plan(tp=4, micro_batch=4, sequence_parallel=True), "pp 4": Plan(pp=4),
    "pp 4, GPipe": Plan(pp=4, schedule="gpipe"), "cp 4": Plan(cp=4, micro_batch=4),
    "dp 2 × tp 2": Plan(dp=2, tp=2, micro_batch=2), "dp 2 × pp 2": Plan(dp=2, pp=2),
}  # fmt: skip


def plan_player(
    transformer: Transformer, plans: Mapping[str, Plan] | None = None, batch: int = 8, first: str | None = None,
    cluster: Callable[[int], Topology] | None = None,
) -> Choices:  # fmt: skip
    """A step of training under the plan that the reader chooses: who computes, sends along which axis, and holds how much.

    >>> plan_player(Transformer(layers=4, hidden=32, heads=4, vocab=96, sequence=32), {"dp 2": Plan(dp=2)})     # doctest: +SKIP

    plans: {what a reader sees: plan}, by default nine for 4 ranks. batch: sequences a step. first: the one that is shown first.
    cluster: of so many ranks, the topology that they live on, with devices; by default a star. The second step is shown, by which
    the optimizer has its state. ValueError for a plan that can't be.
    """
    plans = plans or PLANS

    def make(plan: str) -> StepPlayer:
        return _step(transformer, plans[plan], plan, batch, cluster or _cluster)

    return Choices({"plan": list(plans)}, make, names={"plan": STEPS["plan"]}, first={"plan": first} if first else {})


def _cluster(ranks: int) -> Topology:
    return star(ranks, bandwidth=2e9, latency=1e-6, device=SMALL)


def _step(transformer: Transformer, plan: Plan, name: str, batch: int, cluster: Callable[[int], Topology]) -> StepPlayer:
    run = simulate(_train, cluster(plan.ranks), transformer, plan, batch, trace=True)
    since = max(run)
    title = STEPS["step_of"].format(plan=name, ranks=plan.ranks, time=f"{1e3 * (run.time - since):.3g}")
    return StepPlayer(run.trace, title=title, since=since)


def _train(comm: Communicator, transformer: Transformer, plan: Plan, batch: int) -> float:
    """Two steps; when the second begins."""
    optimizer = partial(torch.optim.Adam, lr=1e-3)
    trainer = Trainer(comm, transformer, plan, text(transformer.sequence), batch, optimizer, max_norm=1.0)
    activations(comm, trainer.module)
    trainer.step()
    comm.barrier()
    since = comm.now()
    trainer.step()
    return since
