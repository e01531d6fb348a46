"""What is known of one plan: why it can't be, who would hold how much, and where that fits all that a step takes and sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from d2lps.parallel import Calibration, Plan, Prediction, Transformer
from d2lps.parallel.pipeline.schedules import Action
from d2lps.parallel.prediction.clock import Clock, Time
from d2lps.parallel.prediction.predict import described, held
from d2lps.parallel.prediction.prices import Prices, axis_groups
from d2lps.parallel.prediction.program import Rank
from d2lps.topology import Topology
from d2lps.widgets.step_scene import AXES
from d2lps.widgets.texts import PLANS

COUNTED_AS = {"edp": "dp", "replicas": "dp", "ends": "dp"}


@dataclass
class Answer:
    """What is known of a plan: why it can't be; or who holds how much of `limit`; and where that fits, what a step takes."""

    plan: Plan
    why: str = ""
    limit: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    prediction: Prediction | None = None
    links: dict[str, tuple[float, float]] = field(default_factory=dict)  # by axis: bytes inside a machine, bytes out of it
    sent: dict[tuple[str, str], float] = field(default_factory=dict)  # by axis and collective: bytes that a rank asks for
    passes: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds: forward and backward through a stage, a message

    def said(self) -> str:
        if self.why:
            return PLANS["impossible"].format(why=self.why)
        if self.prediction is None:
            most = sorted(self.held.items(), key=lambda one: -one[1])
            holders = ", ".join(f"{name} {nbytes / 1e9:.3g}" for name, nbytes in most if nbytes)
            needs, has = (f"{nbytes / 1e9:.3g}" for nbytes in (sum(self.held.values()), self.limit))
            return PLANS["oom"].format(needs=needs, has=has, holders=holders)
        return f"{self.prediction.time:.4g} s, MFU {self.prediction.mfu:.1%}, {self.prediction.memory / 1e9:.3g} GB"


def plan_of(choice: dict[str, Any], ranks: int) -> Plan:
    """dp is what the other degrees leave."""
    schedule = "interleaved" if choice["interleave"] > 1 else "one_f_one_b"
    return Plan(dp=max(1, ranks // (choice["tp"] * choice["pp"])), schedule=schedule, **choice)


def ask(model: Transformer, plan: Plan, cluster: Topology, batch: int, calibration: Calibration | None) -> Answer:
    """As `search` does, but the reason is kept."""
    if plan.pp == 1 < plan.interleave:
        return Answer(plan, PLANS["alone"].format(interleave=plan.interleave))
    try:
        plan.check(model, batch, len(cluster.devices))
    except ValueError as wrong:
        return Answer(plan, str(wrong))
    job = described(model, plan, cluster, batch, calibration)
    answer = Answer(plan, limit=job.data_sheet.memory, held=held(job))
    if sum(answer.held.values()) <= answer.limit:
        answer.prediction = Prediction(job, cluster)
        walk(answer)
    return answer


class _Meter(Clock):
    """Counts, beside the time, what is asked of each axis."""

    def __init__(self, prices: Prices) -> None:
        super().__init__(Time(prices), alone=False)  # so that whatever is asked for is started
        self.sent = defaultdict[tuple[str, str], float](float)

    def collective(self, axis: str, collective: str, nbytes: float) -> None:
        if axis == "ends":  # for the other end of the pipeline, which is not here, it would wait
            self.sent[axis, collective] += nbytes
        else:
            super().collective(axis, collective, nbytes)

    def start(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        self.sent[axis, collective] += nbytes
        return super().start(axis, collective, nbytes, behind)


def walk(answer: Answer, at: int | None = None) -> None:
    """A rank of the pipeline, by default one in its middle, goes through a micro-batch, for the others, and through the last."""
    assert answer.prediction is not None
    job, plan, prices = answer.prediction.job, answer.plan, answer.prediction.prices
    meter, place, count = _Meter(prices), plan.pp // 2 if at is None else at, job.micro_batches
    rank, stages = Rank(job, meter, place, answer.prediction.known.passes), range(place, len(job.stages), plan.pp)

    def go() -> None:
        forward, backward = (_through(rank, meter, kind, stages, 0) / len(stages) for kind in "FB")
        answer.passes = forward, backward, prices.between(place - 1, place)(job.message) if place else 0.0
        for key in meter.sent:
            meter.sent[key] *= count - 1
        for kind in "FB":
            _through(rank, meter, kind, stages, count - 1)
        rank.finish()

    meter.time.run([go])
    if plan.pp > 1:
        ends = sum((stage > 0) + (stage < len(job.stages) - 1) for stage in stages)  # gradients back, activations ahead
        meter.sent["pp", "pass_on"] = ends * count * job.message
    answer.sent, answer.links = dict(meter.sent), _links(prices, meter.sent)


def _through(rank: Rank, meter: _Meter, kind: str, stages: range, micro_batch: int) -> float:
    before = meter.time.now
    for stage in stages if kind == "F" else reversed(stages):
        rank.act(Action(kind, stage, micro_batch))
    return meter.time.now - before


def _links(prices: Prices, sent: Mapping[tuple[str, str], float]) -> dict[str, tuple[float, float]]:
    totals = dict.fromkeys(AXES, (0.0, 0.0))
    for (axis, collective), nbytes in sent.items():
        name = COUNTED_AS.get(axis, axis)
        inside, across = _bytes(prices, axis, collective)
        totals[name] = totals[name][0] + nbytes * inside, totals[name][1] + nbytes * across
    return totals


def _bytes(prices: Prices, axis: str, collective: str) -> tuple[float, float]:
    """What a device sends to devices of its machine, and out of it, for each byte of a collective."""
    group, nodes = axis_groups(prices.plan, axis)[0], prices.cluster.graph.nodes
    machines = [nodes[prices.cluster.devices[rank]].get("machine") for rank in group]
    p, m = len(group), len(set(machines))
    q, rounds = p // m, 2 if collective == "all_reduce" else 1
    if p == 1:
        return 0.0, 0.0
    levels = collective != "pass_on" and len(prices.price(axis, collective).way) > 1
    if levels and m > 1 and q * m == p:
        return rounds * (q - 1) / q, rounds * (m - 1) / m / q
    crossing = sum(here != there for here, there in zip(machines, machines[1:] + machines[:1], strict=True)) / p
    if collective == "all_to_all":
        crossing = (p - q) / (p - 1)
    whole = 1.0 if collective == "pass_on" else rounds * (p - 1) / p
    return whole * (1 - crossing), whole * crossing
