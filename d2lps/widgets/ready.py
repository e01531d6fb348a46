"""Players that are ready to be shown: each of the eight collectives, a ring in which the reader makes a rank late, and one
training step under each of several plans; simulated when they are made."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from d2lps import collectives
from d2lps.comm import Communicator
from d2lps.parallel import Plan, Trainer, Transformer, activations, text
from d2lps.simulator import simulate
from d2lps.topology import Topology, star
from d2lps.topology.device import Device
from d2lps.widgets.choices import Choices, Options
from d2lps.widgets.player import Player
from d2lps.widgets.step_player import StepPlayer
from d2lps.widgets.texts import NAMES, READY, STEPS

RANKS = (2, 3, 4, 5, 8)
# The algorithms of each collective, the one that comes first in the chapters first.
ALGORITHMS = {
    "broadcast": ["tree", "flat"], "scatter": ["tree", "linear"], "reduce": ["tree", "flat"], "gather": ["tree", "linear"],
    "all_reduce": ["ring", "tree", "halving_doubling", "double_tree", "blockwise", "flat"], "all_gather": ["ring", "bruck"],
    "reduce_scatter": ["ring", "pairwise"], "all_to_all": ["pairwise", "direct"],
}  # fmt: skip


def collective_player(name: str, ranks: Sequence[int] = RANKS, algorithms: Sequence[str] = (), first: int = 4) -> Choices:
    """A player of one of the eight collectives; the reader chooses how many ranks, and the algorithm.

    >>> collective_player("broadcast", ranks=[2, 4])                                        # doctest: +ELLIPSIS
    Choices: ranks 4 (of 2, 4), algorithm tree (of tree, flat): Player: broadcast by tree, 4 ranks, 3 messages ...

    name: as in d2lps.collectives. ranks: to choose from. algorithms: of that collective, by default all. first: the number of
    ranks that is shown first, where it is among them. ValueError for a name that is none of the eight.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"name={name!r} is no collective: choose one of {', '.join(ALGORITHMS)}")

    def make(ranks: int, algorithm: str) -> Player:
        run = simulate(_WORK[name], star(ranks, bandwidth=1e9), algorithm)
        said = READY["collective"].format(name=name.replace("_", "-"), algorithm=NAMES.get(algorithm, algorithm))
        return Player(run.trace, title=said)

    options: dict[str, Options] = {"ranks": list(ranks), "algorithm": list(algorithms or ALGORITHMS[name])}
    called = {"ranks": READY["ranks"], "algorithm": READY["algorithm"]}
    return Choices(options, make, names=called, first={"ranks": first} if first in ranks else {})


def late_ring(ranks: int = 4, delays: Sequence[float] = (0, 1, 2, 4), nbytes: int = 4_000_000) -> Choices:
    """A ring all-reduce in which the reader chooses a rank and makes it late, and sees in the lanes who waits.

    delays: to choose from, in steps of the ring: the time in which a rank sends nbytes / ranks at 1 GB/s. Each message waits
    for the one before, so the delay travels round the ring, and in the end all ranks are late by it.
    """
    step = nbytes / ranks / 1e9

    def work(comm: Communicator, late: int, delay: float) -> None:
        tensor = torch.empty(nbytes // 4, device=comm.device)
        if comm.rank == late and delay:
            comm.sleep(delay * step)
        collectives.all_reduce(comm, tensor, algorithm="ring")

    def make(late: int, delay: float) -> Player:
        run = simulate(work, star(ranks, bandwidth=1e9), late, delay, device="meta")
        said = READY["late"].format(rank=late, delay=f"{delay:g}", time=f"{1e3 * run.time:g}")
        return Player(run.trace, title=said, clock="time")

    names = {"late": READY["late_rank"], "delay": READY["late_by"]}
    options: dict[str, Options] = {"late": list(range(ranks)), "delay": list(delays)}
    return Choices(options, make, names=names, first={"delay": delays[len(delays) // 2]})


# ---- what every rank does: a program for each collective, small enough that all of its memory can be drawn ---------------


def _parts(comm: Communicator) -> list[torch.Tensor]:
    return [torch.ones(2, device=comm.device) for _ in range(comm.size)]


def _tensor(function: Callable[..., None]) -> Callable[[Communicator, str], None]:
    """Broadcast, reduce, all-reduce."""

    def work(comm: Communicator, algorithm: str) -> None:
        tensor = torch.ones(2 * comm.size, device=comm.device)
        function(comm, tensor, algorithm=algorithm)

    return work


def _scatter(comm: Communicator, algorithm: str) -> None:
    tensor = torch.zeros(2, device=comm.device)
    parts = _parts(comm) if comm.rank == 0 else None
    collectives.scatter(comm, tensor, parts, src=0, algorithm=algorithm)


def _gather(comm: Communicator, algorithm: str) -> None:
    tensor = torch.ones(2, device=comm.device)
    parts = _parts(comm) if comm.rank == 0 else None
    collectives.gather(comm, tensor, parts, dst=0, algorithm=algorithm)


def _all_gather(comm: Communicator, algorithm: str) -> None:
    tensor, parts = torch.ones(2, device=comm.device), _parts(comm)
    collectives.all_gather(comm, parts, tensor, algorithm=algorithm)


def _reduce_scatter(comm: Communicator, algorithm: str) -> None:
    parts, output = _parts(comm), torch.zeros(2, device=comm.device)
    collectives.reduce_scatter(comm, output, parts, algorithm=algorithm)


def _all_to_all(comm: Communicator, algorithm: str) -> None:
    inputs, outputs = _parts(comm), _parts(comm)
    collectives.all_to_all(comm, outputs, inputs, algorithm=algorithm)


_WORK = {
    "broadcast": _tensor(collectives.broadcast), "scatter": _scatter, "reduce": _tensor(collectives.reduce), "gather": _gather,
    "all_reduce": _tensor(collectives.all_reduce), "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}  # fmt: skip


# ---- a training step ------------------------------------------------------------------------------------------------------

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
