"""The plan explorer: what each of thousands of plans would take on clusters that nobody has at hand, all predicted beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import traitlets

from d2lps.parallel import Calibration, Plan, Transformer, replay
from d2lps.parallel.prediction.parts import matrix_flops
from d2lps.topology import Topology
from d2lps.widgets import still
from d2lps.widgets.plan_answers import Answer, ask, plan_of
from d2lps.widgets.step_scene import AXES
from d2lps.widgets.texts import PLANS
from d2lps.widgets.within import packed

OPTIONS: dict[str, Sequence[Any]] = {
    "tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8, 16), "micro_batch": (1, 2, 4), "interleave": (1, 3),
    "recompute": ("none", "selective", "full"), "sequence_parallel": (False, True), "zero": (0, 1),
}  # fmt: skip
HOLDERS = ("weights", "gathered", "gradients", "optimizer", "activations", "working")
PARTS = ("compute", "tp", "cp", "ep", "dp", "pp", "optimizer", "bubble")
FINE = 2000  # parts of a device's memory, and of a step's time, to which numbers are rounded
ROWS, UNIT = 8, 8  # of a pipeline's picture: ranks; parts of a forward pass


class PlanExplorer(still.Still):
    """Choose a model, a cluster and a plan, and see what a step would take: where its groups lie, time, memory, links.

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)                   # doctest: +SKIP
    >>> PlanExplorer({"GPT-3 175B": gpt3}, {"1,024 A100": dgx_a100_pod(128)}, batch=1536)                   # doctest: +SKIP

    models, clusters: {what a reader sees: it}; all devices of a cluster are used, dp is what tp and pp leave. batch: sequences a
    step, one number or {model: number}. calibration: as of `predict`. first: the plan that is shown first, of the first model and
    cluster; by default their fastest. options: what there is to choose from, by fields of a `Plan`, in place of some of
    OPTIONS. Each value that can be chosen shows what it would cost; a plan that can't be says why, as `Plan.check` does.
    `chosen` are the choices made, as indices. ValueError for a field that is not among OPTIONS, a value that no plan can have,
    and a first plan that is no choice. Cost: a hundredth or two of a second a plan that fits into
    memory, and some seconds a cluster for its collectives; 6 bytes a plan in the page.
    """

    _esm, _css = still.source("within.js", "plan_explorer.js"), still.source("step_player.css", "plan_explorer.css")
    data = traitlets.Dict().tag(sync=True)
    chosen = traitlets.List(traitlets.Int()).tag(sync=True)

    def __init__(
        self, models: Mapping[str, Transformer], clusters: Mapping[str, Topology], batch: int | Mapping[str, int],
        calibration: Calibration | None = None, first: Plan | None = None, title: str = "", **options: Sequence[Any],
    ) -> None:  # fmt: skip
        if not models or not clusters:
            raise ValueError(f"models={list(models)}, clusters={list(clusters)}: an explorer needs at least one of each")
        if unknown := set(options) - set(OPTIONS):
            raise ValueError(f"{', '.join(sorted(unknown))}: there is no such choice; choose among {', '.join(OPTIONS)}")
        self.options = {"model": list(models), "cluster": list(clusters)}
        self.options |= {name: list(options.get(name, values)) for name, values in OPTIONS.items()}
        if empty := [name for name, values in self.options.items() if not values]:
            raise ValueError(f"{empty[0]}=() leaves nothing to choose: see {self.options}")
        batches = {name: batch[name] if isinstance(batch, Mapping) else batch for name in models}
        table, self._answers = _Table(), list[Answer]()
        for model, cluster, *choice in product(*self.options.values()):
            plan = plan_of(dict(zip(OPTIONS, choice, strict=True)), len(clusters[cluster].devices))
            answer = ask(models[model], plan, clusters[cluster], batches[model], calibration)
            table.add(answer, batches[model])
            self._answers.append(answer)
        data = {
            "title": title or PLANS["title"], "options": [_drawn(name, values) for name, values in self.options.items()],
            "models": [{"batch": batches[name], "flops": 3 * matrix_flops(models[name]) * batches[name]} for name in models],
            "clusters": [_cluster(cluster) for cluster in clusters.values()],
            "axes": AXES, "holders": HOLDERS, "parts": PARTS, "fine": FINE, "unit": UNIT, "plans": table.packed(), "texts": PLANS,
        }  # fmt: skip
        super().__init__(data=data, chosen=self._first(first))

    def _first(self, plan: Plan | None) -> list[int]:
        places = list(product(*(range(len(values)) for values in self.options.values())))
        known = [(answer, list(place)) for answer, place in zip(self._answers, places, strict=True) if not any(place[:2])]
        if plan is not None:
            for answer, place in known:
                if answer.plan == plan:
                    return place
            raise ValueError(f"first={plan} is not among the plans to choose from: see {self.options}")
        fitting = [(answer.prediction.time, place) for answer, place in known if answer.prediction]
        return min(fitting)[1] if fitting else known[0][1]

    @property
    def answer(self) -> Answer:
        """What is known of the plan that is chosen."""
        index = 0
        for place, values in zip(self.chosen, self.options.values(), strict=True):
            index = index * len(values) + place
        return self._answers[index]

    def __repr__(self) -> str:
        model, cluster = (self.options[name][place] for name, place in zip(("model", "cluster"), self.chosen, strict=False))
        fitting = sum(answer.prediction is not None for answer in self._answers)
        told = f"{model} on {cluster}, {self.answer.plan}: {self.answer.said()}"
        return f"PlanExplorer: {len(self._answers):,} plans, {fitting:,} fit; {told}"


# ---- all plans, as columns --------------------------------------------------------------------------------------------


@dataclass
class _Table:
    """Numbers as texts, a column each. state: of all plans, -1 out of memory, 0 fits, else 1 + an index of `why`; held: of those
    that can be, in parts of the memory that there is; fits: of those that fit.
    """

    state: list[int] = field(default_factory=list)
    why: dict[str, int] = field(default_factory=dict)
    held: list[list[int]] = field(default_factory=list)
    fits: list[list[str]] = field(default_factory=list)
    pictures: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, answer: Answer, batch: int) -> None:
        if answer.why:
            self.state.append(1 + self.why.setdefault(answer.why, len(self.why)))
            return
        self.state.append(0 if answer.prediction else -1)
        self.held.append([round(FINE * answer.held[holder] / answer.limit) for holder in HOLDERS])
        if answer.prediction:
            time = answer.prediction.time
            parts = [str(round(FINE * answer.prediction.parts[part] / time)) for part in PARTS]
            links = [f"{way / 1e9:.3g}" for axis in AXES for way in answer.links[axis]]
            self.fits.append([f"{time:.4g}", *parts, *links, f"{answer.passes[0]:.3g}", str(self._picture(answer, batch))])

    def _picture(self, answer: Answer, batch: int) -> int:
        plan, (forward, backward, message) = answer.plan, answer.passes
        count = min(plan.micro_batches(batch), 2 * max(plan.pp, 2))
        key = plan.pp, plan.interleave, count, round(UNIT * backward / forward), round(UNIT * message / forward)
        return self.pictures.setdefault(key, len(self.pictures))

    def packed(self) -> str:
        columns: dict[str, list[Any]] = {"held": self.held, "fits": self.fits}
        told = {name: [" ".join(map(str, column)) for column in zip(*rows, strict=True)] for name, rows in columns.items()}
        state = " ".join(map(str, self.state))
        return packed([{"state": state, "why": list(self.why), **told, "pictures": [_picture(*key) for key in self.pictures]}])


def _picture(pp: int, interleave: int, count: int, backward: int, message: int) -> dict[str, Any]:
    """Some ranks' actions: "A" forward through the first stage, "b" backward through the second; before it a pause, if any."""
    plan = Plan(pp=pp, interleave=interleave, schedule="interleaved" if interleave > 1 else "one_f_one_b")
    rows = plan.order(count)
    done = replay(rows, UNIT, backward, message=message)
    ranks, told = sorted({round(k * (pp - 1) / (ROWS - 1)) for k in range(ROWS)}), []
    for rank in ranks:
        now, text = 0, []
        for action in rows[rank]:
            pause, now = round(done.starts[action]) - now, round(done.ends[action])
            text.append(f"{pause or ''}{chr(ord('A' if action.kind == 'F' else 'a') + action.stage // pp)}")
        told.append("".join(text))
    return {"pp": pp, "count": count, "backward": backward, "ranks": ranks, "rows": told, "end": round(done.time)}


# ---- what there is to choose from --------------------------------------------------------------------------------------


def _drawn(name: str, values: Sequence[Any]) -> dict[str, Any]:
    words = [PLANS["yes" if value else "no"] if isinstance(value, bool) else str(value) for value in values]
    return {"key": name, "name": PLANS[f"option_{name}"], "values": words}


def _cluster(cluster: Topology) -> dict[str, Any]:
    """So many devices, in machines of so many; bytes a second that collectives reach inside of one and out of it."""
    reached, nodes = cluster.reached(), cluster.graph.nodes
    machine = [nodes[device].get("machine") for device in cluster.devices]
    first, size = cluster.devices[0], machine.count(machine[0])
    speeds = [0.0, 0.0]
    for way, index in enumerate((1, size)):
        with suppress(IndexError):  # one device a machine, or one machine in all
            speeds[way] = reached.route(first, cluster.devices[index]).bandwidth if way or size > 1 else 0.0
    device = cluster.device(first)
    assert device is not None  # or no plan could have been predicted
    return {"devices": len(machine), "machine": size, "speeds": speeds, "limit": device.memory, "flops": device.flops}
