"""What a step of a plan would take on a described cluster, how much memory, and where the time would go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import ceil
from typing import Any

from d2lps.comm.memory import Memory
from d2lps.parallel.pipeline.schedules import Action
from d2lps.parallel.prediction.parts import Part, matrix_flops
from d2lps.parallel.prediction.priced import Known, Played, ordered, play
from d2lps.parallel.prediction.prices import Prices
from d2lps.parallel.prediction.program import Calibration, Job
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.transformer import Transformer
from d2lps.simulator import simulate
from d2lps.topology import Topology, star
from d2lps.topology.device import Device
from d2lps.trace import Trace

ROUNDS = 1  # a pipeline with more micro-batches than this and one more times its ranks is played with so many, and continued


class Prediction:
    """time: seconds a step. memory: bytes on the fullest device; held: by holder. mfu: see below. notes: what was not simulated.

    mfu, the model FLOP utilization: the operations of the model's matrix products, forward and twice that backward and nothing
    that is computed again, beside what the devices could have done in that time; attention's are those of the whole square, so
    that a long sequence and a kernel that leaves out half of it may come above `efficiency`; of experts' those on tokens count,
    top_k visits each, while empty slots take their time. tokens: a second.
    """

    def __init__(self, job: Job, cluster: Topology, prices: Prices | None = None) -> None:
        self.job, self.cluster = job, cluster
        self.prices = prices or Prices(job.plan, cluster)
        self.held = {holder: nbytes for holder, nbytes in held(job).items() if nbytes}
        self.memory = sum(self.held.values())
        self.known = Known()
        self.time, self._spent = self._steps(True)
        self.notes = [f"{axis}: alpha and beta continued from 32 and 64 ranks" for axis in sorted(self.prices.continued)]

    def __repr__(self) -> str:
        return f"<Prediction of {self.job.plan}: {self.time:.4g} s, MFU {self.mfu:.1%}, {self.memory / 1e9:.3g} GB>"

    @property
    def mfu(self) -> float:
        could = self.time * self.job.plan.ranks * self.job.data_sheet.flops
        return 3 * matrix_flops(self.job.model) * self.job.batch / could

    @property
    def tokens(self) -> float:
        return self.job.batch * self.job.model.sequence / self.time

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what they go to, on the rank of the pipeline that computes longest; they add up to `time`.

        compute, optimizer; tp, cp, ep, dp: waiting for that axis's collectives, beside which nothing is computed; pp: what the
        step would be faster if messages between stages took no time; bubble: waiting for other stages even so.
        """
        spent = self._spent
        pp = self.time - self._steps(False)[0]
        parts = {label: spent[label] for label in ("compute", "tp", "cp", "ep", "dp", "optimizer")}
        parts["dp"] += spent["edp"] + spent["replicas"] + spent["ends"]
        return parts | {"pp": pp, "bubble": self.time - pp - sum(parts.values())}

    @cached_property
    def trace(self) -> Trace:
        """One replica's pipeline as a trace, a row for each of its ranks: what a schedule's actions take, and when."""
        played = play(self.job, self.prices, self.job.micro_batches)
        rows = self.job.plan.order(self.job.batch)
        return _drawn(rows, played)

    # ---- long steps -----------------------------------------------------------------------------------------------

    def _steps(self, messages: bool) -> tuple[float, dict[str, float]]:
        """Seconds, and on what. When a pipeline is full, each further round of micro-batches takes as long as the one before."""
        count, round_ = self.job.micro_batches, self.job.plan.pp
        if count <= (ROUNDS + 1) * round_ or not self.job.plan.in_rounds:
            played = play(self.job, self.prices, count, messages, self.known)
            return played.time, defaultdict(float, max(played.spent, key=lambda spent: spent["compute"]))
        short, long = (play(self.job, self.prices, rounds * round_, messages, self.known) for rounds in (ROUNDS, ROUNDS + 1))
        place = max(range(len(long.spent)), key=lambda place: long.spent[place]["compute"])
        more = (count - (ROUNDS + 1) * round_) / round_
        before, after = short.spent[place], long.spent[place]
        spent = {label: after[label] + more * (after[label] - before[label]) for label in after}
        return long.time + more * (long.time - short.time), defaultdict(float, spent)


def predict(
    transformer: Transformer, plan: Plan, cluster: Topology, batch: int, calibration: Calibration | None = None
) -> Prediction:
    """The time, memory and MFU of a training step of `plan` on the first devices of a described cluster.

    >>> from d2lps.topology import dgx_a100_pod
    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048, dropout=0.1)
    >>> plan = Plan(dp=16, tp=8, pp=8, micro_batch=1, schedule="interleaved", interleave=3, recompute="full")
    >>> predict(gpt3, plan, dgx_a100_pod(128), batch=1536)
    <Prediction of dp=16 tp=8 pp=8 schedule=interleaved interleave=3 recompute=full: 27.16 s, MFU 39.0%, 58 GB>

    batch: of all ranks together, in sequences. calibration: how near the software comes to the machine; by default
    `Calibration()`. What `train` would do step by step is played for one replica, all others do the same: computing priced by the
    device's roofline, each distinct collective simulated once on the cluster, whose price then stands for it (of an axis's groups
    the slowest one's for all). What is on its way at the same time, on any stage or between two, shares links. Not known to it:
    links that groups of other machines share, too, as out of pods (see `planning.predict_on_pods`), an optimizer's state in the
    host's memory, and that a device is slower in another precision than that of its `flops`, 16 bits in presets.
    ValueError, with the numbers, for a plan that can't be, and a cluster without devices' speeds; OutOfMemory, with who holds
    what, for one that needs more memory than a device has. Cost: less than a second.
    """
    job = described(transformer, plan, cluster, batch, calibration)
    check_memory(job, cluster)
    return Prediction(job, cluster)


def check_memory(job: Job, cluster: Topology) -> None:
    """OutOfMemory, with who holds what, for a job that needs more than a device has."""
    memory = Memory(str(cluster.devices[0]), job.data_sheet.memory)
    for holder, nbytes in held(job).items():
        memory.hold(ceil(nbytes), holder)


def described(transformer: Transformer, plan: Plan, cluster: Topology, batch: int, calibration: Calibration | None = None) -> Job:
    """The job, once everything fits together but memory."""
    calibration = Calibration() if calibration is None else calibration
    for given, kind in zip((transformer, plan, cluster, calibration), (Transformer, Plan, Topology, Calibration), strict=True):
        if not isinstance(given, kind):
            raise TypeError(f"{given!r} is no {kind.__name__}")
    if plan.ranks > len(cluster.devices):
        raise ValueError(f"a plan of {plan.ranks} ranks, and {cluster.name} has {len(cluster.devices)} devices")
    plan.check(transformer, batch)
    return Job(transformer, plan, batch, _device(cluster), calibration)


def _device(cluster: Topology) -> Device:
    """What all devices of a cluster can do."""
    if "device" not in cluster.remembered:
        kinds = {cluster.device(node) for node in cluster.devices}
        cluster.remembered["device"] = kinds.pop() if len(kinds) == 1 else None
    device: Device | None = cluster.remembered["device"]
    if device is None:
        raise ValueError(f"{cluster.name}: all devices must be alike, and say how fast they are (device=Device(...))")
    return device


def _drawn(rows: Any, played: Played) -> Trace:
    """A trace is what ranks leave behind: so some live through these times."""

    def live(comm: Any) -> None:
        for action in rows[comm.rank]:
            comm.sleep(max(0.0, played.starts[action] - comm.now()))
            comm.sleep(played.ends[action] - played.starts[action], str(action))
        comm.sleep(max(0.0, played.done[comm.rank] - comm.now()), "gradients and optimizer")

    trace = simulate(live, star(len(rows), 1e9)).trace
    assert trace is not None
    return trace


# ---- memory -----------------------------------------------------------------------------------------------------------


def held(job: Job) -> dict[str, float]:
    """Bytes by holder, on the rank of the pipeline that holds most.

    weights, gradients, optimizer: what ZeRO leaves of them with a rank; gradients as wide as micro-batches are added up, and of
    one the largest unit's whole until it is reduced; "gathered" what it fetches of weights meanwhile. Of either the largest two
    units' with overlap. Tied weights that are on two stages stay whole, their gradients, too. activations: kept for backward
    passes, of as many micro-batches as the schedule keeps at a time; working: of the part being computed.
    """
    return max(_by_rank(job), key=lambda holders: sum(holders.values()))


def _by_rank(job: Job) -> Iterator[dict[str, float]]:
    plan = job.plan
    few = min(job.micro_batches, 2 * plan.pp) if plan.in_rounds else job.micro_batches  # later ones keep no more
    keeps = [sum(part.kept for part in parts) for parts in job.stages]
    for place, row in enumerate(ordered(plan.schedule, plan.pp, plan.interleave, few)[0]):
        parts = [part for stage in range(place, len(job.stages), plan.pp) for part in job.stages[stage]]
        weights, experts, ends = (sum(getattr(part, name) for part in parts) for name in ("weights", "experts", "ends"))
        owned = job.owned(weights - ends, experts)
        tied = sum(part.tied for part in parts)
        gathered = tied + _largest(plan, parts, without=tied, stay=plan.cuts_backward)
        yield {
            "weights": (owned + ends if plan.zero == 3 else weights) * job.width,
            "gathered": gathered * job.width if plan.zero == 3 else 0,
            "gradients": (owned + ends if plan.zero > 1 else weights) * job.sum_width
            + (_largest(plan, parts) * job.gradient_width if plan.zero > 1 else 0),
            "optimizer": job.owned(weights, experts) * job.state_width,
            "activations": _kept(keeps, row),
            "working": max(part.working for part in parts),
        }


def _largest(plan: Plan, parts: list[Part], without: float = 0, stay: bool = False) -> float:
    """Weights that are whole at a time while they are fetched, or reduced: the largest unit's; with overlap, those of two.

    without: how many of the first unit's, the embedding's, are not counted. stay: all units' are whole at a time, as with
    zero_bubble: a B fetches them, and its W, much later, lets them go.
    """
    units = [part.weights - part.ends for part in parts]
    largest = sorted([units[0] - without, *units[1:]], reverse=True)
    return sum(largest if stay else largest[: 1 + plan.overlap])


def _kept(keeps: Sequence[float], row: Sequence[Action]) -> float:
    """Most that the row's stages keep at a time: from an F to its B, or to its W. keeps: of a micro-batch, by stage."""
    lets_go = "W" if any(action.kind == "W" for action in row) else "B"
    now = most = 0.0
    for action in row:
        now += keeps[action.stage] * ((action.kind == "F") - (action.kind == lets_go))
        most = max(most, now)
    return most
