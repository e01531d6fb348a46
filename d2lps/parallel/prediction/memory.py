"""Who holds how much of each device's memory in a step: arithmetic from the plan and the schedule."""

from collections.abc import Iterator, Sequence

from d2lps.parallel.pipeline.schedules import Action
from d2lps.parallel.prediction.parts import Part
from d2lps.parallel.prediction.priced import ordered
from d2lps.parallel.prediction.program import Job
from d2lps.parallel.training.plan import Plan


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
    few = job.micro_batches if plan.schedule == "gpipe" else min(job.micro_batches, 2 * plan.pp)  # later ones keep no more
    keeps = [sum(part.kept for part in parts) for parts in job.stages]
    for place, row in enumerate(ordered(plan.schedule, plan.pp, plan.interleave, few)[0]):
        parts = [part for stage in range(place, len(job.stages), plan.pp) for part in job.stages[stage]]
        weights, experts, ends = (sum(getattr(part, name) for part in parts) for name in ("weights", "experts", "ends"))
        owned = job.owned(weights - ends, experts)
        tied = sum(part.tied for part in parts)
        gathered = tied + _largest(plan, parts, without=tied, stay=plan.schedule == "zero_bubble")
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
