"""The planning explorer: a cluster from its core down to one device, and what of a predicted step leaves each of its parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import traitlets

from d2lps.parallel import Prediction
from d2lps.parallel.prediction.prices import Prices, axis_groups
from d2lps.planning.published import H100_WATTS, MACHINE_WATTS, META_RACK
from d2lps.topology import Topology
from d2lps.widgets import still
from d2lps.widgets.plan_answers import COUNTED_AS, Answer, walk
from d2lps.widgets.step_scene import AXES
from d2lps.widgets.texts import PLANNING

LEVELS = ("cluster", "pod", "rack", "machine", "device")


class PlanningExplorer(still.Still):
    """Zoom into a cluster of `pods`: what each level could send, what it takes of power, and what a step's traffic makes of it.

    >>> told = predict_on_pods(model, plan, pods(8, per_pod=384, oversubscription=7), batch=6144)           # doctest: +SKIP
    >>> PlanningExplorer({"24,576 H100": told})                                                             # doctest: +SKIP

    predictions: {what a reader sees: a prediction on a cluster of pods}. rack: machines in one, below a switch that does not
    block. Bandwidths are those of the data sheets, in bytes/s each way; power is that of the machines at most, the network's not.
    What leaves a unit in a step is counted on the busiest of its level, along each axis. `job` is the prediction that is shown,
    `path` the unit: the number of each part that was entered. ValueError for none, and for a cluster without pods.
    Cost: a second for 100,000 devices, predicted before; a kilobyte each.
    """

    _esm, _css = still.source("planning_explorer.js"), still.source("step_player.css", "planning_explorer.css")
    data = traitlets.Dict().tag(sync=True)
    job = traitlets.Int(0).tag(sync=True)
    path = traitlets.List(traitlets.Int()).tag(sync=True)

    def __init__(self, predictions: Mapping[str, Prediction], rack: int = META_RACK, title: str = "") -> None:
        if not predictions:
            raise ValueError("predictions={}: an explorer needs at least one")
        jobs = [{"name": name, **_job(told, rack)} for name, told in predictions.items()]
        super().__init__(data={"title": title or PLANNING["title"], "axes": AXES, "jobs": jobs, "texts": PLANNING})

    def __repr__(self) -> str:
        job = self.data["jobs"][self.job]
        told = "; ".join(f"{level['kind']}: {level['count']} parts, {level['over']:.3g} : 1" for level in job["levels"][1:-1])
        return f"PlanningExplorer: {job['name']}, {job['time']:.4g} s a step; {told}"


def _job(told: Prediction, rack: int) -> dict[str, Any]:
    """The numbers of a prediction, and its levels from the outside in."""
    cluster = told.cluster
    sizes = _sizes(cluster, rack)
    devices = len(cluster.devices)
    sent = _sent(told, sizes)
    edges, first = cluster.graph.edges, cluster.devices[0]
    pod = next(node for node in cluster.graph.adj[first] if "core" in cluster.graph.adj[node])
    port = edges[first, pod]["bandwidth"]
    inside = max(data["bandwidth"] for data in cluster.graph.adj[first].values())
    ups = [0.0, edges[pod, "core"]["bandwidth"], sizes[2] * port, sizes[3] * port, port]
    levels = []
    for level, (kind, size, up) in enumerate(zip(LEVELS, sizes, ups, strict=True)):
        count = size // sizes[level + 1] if level < 4 else 1
        below = count * ups[level + 1] if level < 4 else port
        watts = size / sizes[3] * MACHINE_WATTS if level < 4 else H100_WATTS
        levels.append({
            "kind": kind, "count": count, "devices": size, "up": up, "below": below, "over": below / up if up else 0.0,
            "watts": watts, "sent": sent[kind], **({"inside": inside, "sent_inside": sent["inside"]} if level == 4 else {}),
        })  # fmt: skip
    numbers = {"time": told.time, "mfu": told.mfu, "tokens": told.tokens, "devices": devices, "plan": str(told.job.plan)}
    return {**numbers, "levels": levels}


def _sizes(cluster: Topology, rack: int) -> list[int]:
    """Devices in the whole, a pod, a rack, a machine, and one."""
    graph = cluster.graph
    if "core" not in graph:
        raise ValueError(f"{cluster.name} has no pods: make it by planning.pods")
    machine = max(Counter(graph.nodes[device].get("machine") for device in cluster.devices).values())
    pod = len(cluster.devices) // graph.in_degree("core")
    if pod % (rack * machine):
        raise ValueError(f"rack={rack} machines: a pod's {pod // machine} can't be shared out evenly to such racks")
    return [len(cluster.devices), pod, rack * machine, machine, 1]


def _sent(told: Prediction, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Of each level the bytes that leave its busiest unit in a step, by axis. A rank lives on the device of its number."""
    left = {kind: defaultdict[str, np.ndarray](lambda: np.zeros(1)) for kind in (*LEVELS, "inside")}
    for axis, src, dst, each in _messages(told):
        near = src // sizes[3] == dst // sizes[3]  # inside a machine there are other links than a device's port
        for kind, size in zip((*LEVELS, "inside"), (*sizes, 1), strict=True):
            here, there = src // size, dst // size
            goes = (here != there) & (near if kind == "inside" else ~near)
            left[kind][axis] = left[kind][axis] + np.bincount(here, goes * each, minlength=sizes[0] // size)
    return {kind: {axis: float(units.max()) for axis, units in found.items()} for kind, found in left.items()}


def _messages(told: Prediction) -> Iterator[tuple[str, np.ndarray, np.ndarray, float]]:
    """Who sends whom how much in a step: (axis, ranks, ranks, bytes each)."""
    job, pp = told.job, told.job.plan.pp
    across = np.arange(job.plan.ranks // pp)
    for stage in range(len(job.stages) - 1 if pp > 1 else 0):
        here, there = (across + place % pp * len(across) for place in (stage, stage + 1))
        for src, dst in ((here, there), (there, here)):  # activations ahead, gradients back
            yield "pp", src, dst, job.micro_batches * job.message
    for place in range(pp):
        answer = Answer(job.plan, prediction=told)
        walk(answer, place)
        for (axis, collective), nbytes in answer.sent.items():
            groups = np.array(axis_groups(job.plan, axis))
            groups = groups[groups[:, 0] // len(across) == place]
            if axis != "pp" and groups.shape[1] > 1 and len(groups):
                for dst, part in _around(told.prices, axis, collective, groups):
                    yield COUNTED_AS.get(axis, axis), groups.ravel(), dst.ravel(), part * nbytes


def _around(prices: Prices, axis: str, collective: str, groups: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """To whom each rank of the groups sends, and which part of the collective's bytes."""
    p, rounds = groups.shape[1], 2 if collective == "all_reduce" else 1
    if collective != "pass_on" and len(prices.price(axis, collective).way) > 1:
        machines = [prices.places[rank][0] for rank in groups[0]]
        g = machines.count(machines[0])
        grid, m = groups.reshape(len(groups), -1, g), p // g
        yield np.roll(grid, -1, axis=2), rounds * (g - 1) / g
        yield np.roll(grid, -1, axis=1), rounds / g * (m - 1) / m
    elif collective == "all_to_all":
        for by in range(1, p):
            yield np.roll(groups, -by, axis=1), 1 / p
    else:
        yield np.roll(groups, -1, axis=1), 1.0 if collective == "pass_on" else rounds * (p - 1) / p
