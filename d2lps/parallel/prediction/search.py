"""All plans of a model on a cluster, the fastest first, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from d2lps.arguments import whole
from d2lps.parallel.prediction.predict import Prediction, described, held
from d2lps.parallel.prediction.program import Calibration
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.transformer import Transformer
from d2lps.topology import Topology


@dataclass(frozen=True)
class Ranking:
    """found: what fits, the fastest first. lost: what does not fit into memory, with its bytes by holder, the nearest first."""

    found: list[Prediction]
    lost: list[tuple[Plan, dict[str, float]]]
    limit: float

    def __repr__(self) -> str:
        return f"<Ranking: {len(self.found)} plans fit, {len(self.lost)} do not; the best is {self.best}>"

    @property
    def best(self) -> Prediction:
        return self.found[0]

    def why(self, prediction: Prediction) -> str:
        """Which two parts differ most from the best plan's, and may gain as well: "+3.1 s: dp +2.4, compute -1.2"."""
        late = {label: prediction.parts[label] - self.best.parts[label] for label in prediction.parts}
        most = sorted(filter(late.get, late), key=lambda label: -abs(late[label]))[:2]
        told = ", ".join(f"{label} {late[label]:+.2g}" for label in most)
        return f"{prediction.time - self.best.time:+.2g} s" + (f": {told}" if told else "")


_EXAMPLES = {"micro_batches": (1, 2), "zero": (3,), "recompute": ("none", "full")}


def search(
    transformer: Transformer, cluster: Topology, batch: int, calibration: Calibration | None = None, *,
    ranks: int | None = None, like: Plan | None = None, micro_batches: Sequence[int] = (1, 2, 4, 8), zero: Sequence[int] = (0, 1),
    recompute: Sequence[str] = ("none", "selective", "full"), plans: Iterable[Plan] | None = None,
) -> Ranking:  # fmt: skip
    """Predict every plan that trains a model with such batches on all devices of a cluster; the fastest first.

    >>> found = search(gpt3, dgx_a100_pod(128), batch=1536)             # doctest: +SKIP
    >>> found.best, found.why(found.found[1])                           # doctest: +SKIP

    Tried are all degrees of tp within a machine, pp, dp, all interleavings, with and without sequence parallelism where tp > 1,
    and what is named: sizes of a micro-batch, stages of zero, what to recompute; what else there is, such as zero=(3,), is to be
    named. like: a plan whose other fields all have (precision, cp, ep, overlap, the schedule of one stage a rank).
    ranks: on the first of the devices only. plans: those to compare, in place of all these. Plans that can't be, for their
    numbers, are left out. ValueError if none is left, or none fits. Cost: some hundredths of a second for each that fits.
    """
    count = len(cluster.devices) if ranks is None else whole("ranks", ranks)
    whole("batch", batch)
    options = {"micro_batches": micro_batches, "zero": zero, "recompute": recompute}
    _check_options(options)
    like, plans = _checked(Plan() if like is None else like, plans)
    tried = plans if plans is not None else _plans(transformer, cluster, count, like, tuple(options.values()))
    found, lost, limit, refused = [], [], 0.0, ""
    for plan in tried:
        try:
            plan.check(transformer, batch, count)
        except ValueError as error:
            refused = refused or str(error)
            continue
        job = described(transformer, plan, cluster, batch, calibration)
        holders, limit = held(job), job.data_sheet.memory
        if sum(holders.values()) > limit:
            lost.append((plan, holders))
        else:
            found.append(Prediction(job, cluster))
    lost.sort(key=lambda one: sum(one[1].values()))
    if not found and lost:
        told = ", ".join(f"{holder} {nbytes / 1e9:.3g}" for holder, nbytes in lost[0][1].items() if nbytes)
        wanted = f"the nearest of {len(lost)}, {lost[0][0]}, needs {told} GB"
        raise ValueError(f"no plan fits into {limit / 1e9:.3g} GB a device; {wanted}")
    if not found:
        none = f"no degrees of tp, pp and dp go with {like}" if plans is None else "none was named"
        raise ValueError(f"no plan fits {count} ranks: {refused or none}")
    return Ranking(sorted(found, key=lambda prediction: prediction.time), lost, limit)


def _check_options(options: Mapping[str, Any]) -> None:
    for name, some in options.items():
        if isinstance(some, str | bytes) or not isinstance(some, Collection) or not len(some):
            raise ValueError(f"{name}={some!r}: give all that are to be tried, as in {name}={_EXAMPLES[name]}")


def _checked(like: Plan, plans: Iterable[Plan] | None) -> tuple[Plan, list[Plan] | None]:
    if plans is not None and (isinstance(plans, str) or not isinstance(plans, Iterable)):
        raise ValueError(f"plans={plans!r}: give several Plans")
    some = None if plans is None else list(plans)
    for one in (like, *(some or ())):
        if not isinstance(one, Plan):
            raise ValueError(f"{one!r} is no Plan")
    return like, some


def _plans(model: Transformer, cluster: Topology, ranks: int, like: Plan, options: tuple[Sequence[Any], ...]) -> Iterator[Plan]:
    """All that the sizes might allow: what they do not, `Plan.check` says."""
    machine, one = machine_size(cluster), like.schedule if like.interleave == 1 else "one_f_one_b"
    for tp in divisors(min(machine, model.heads)):
        for pp in (pp for pp in divisors(ranks // (tp * like.cp)) if pp <= model.layers and ranks % (tp * pp * like.cp) == 0):
            chunks = [v for v in divisors(model.layers // pp) if model.layers % (pp * v) == 0] if pp > 1 else [1]
            for v, sequence, micro, zero, again in product(chunks, {False, tp > 1}, *options):
                dp, schedule = ranks // (tp * pp * like.cp), "interleaved" if v > 1 else one
                degrees = replace(like, dp=dp, tp=tp, pp=pp, schedule=schedule, interleave=v)
                yield replace(degrees, micro_batch=micro, zero=zero, recompute=again, sequence_parallel=sequence)


def divisors(number: int) -> list[int]:
    """`divisors(12) == [1, 2, 3, 4, 6, 12]`"""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def machine_size(cluster: Topology) -> int:
    """How many devices are in one machine: as many as tensor parallelism is worth trying for."""
    machines = Counter(cluster.graph.nodes[device].get("machine") for device in cluster.devices)
    return max(machines.values())
