"""The topology explorer: a machine, what an all-reduce does to its links, and what happens when a cable is missing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import permutations
from typing import Any

import torch
import traitlets

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import Topology
from d2lps.topology.layout import MOST, layout
from d2lps.widgets import still
from d2lps.widgets.texts import EXPLORER, NAMES

Algorithm = str | Callable[[Communicator, torch.Tensor], Any]  # one of all_reduce's, or a function of one's own

# Lists of numbers are strings, since a notebook gives each item of a list a line of its own.
Routes = dict[str, str | None]  # "0 3": "0 8 3", the numbers of two nodes and of those on the way; None where there is none


class TopologyExplorer(still.Still):
    """Machines to look into: read a cable, remove it, choose a route; links show what an all-reduce asks of them.

    >>> from d2lps.topology import pcie_tree
    >>> explorer = TopologyExplorer({"PCIe": pcie_tree(4, bandwidth=16e9, latency=0)}, nbytes=160e6)
    >>> explorer
    TopologyExplorer: all-reduce of 160,000,000 B. PCIe: ring 0.015 s
    >>> explorer.removed = 0                                                # as if the reader had removed gpu0's cable

    machines: {name: topology} to choose from, each of at most 80 nodes. nbytes: on every rank. algorithms: names of
    `all_reduce`'s, or functions of one's own, of (comm, tensor). Every picture is a simulation with one rank on each
    device, run here, beforehand: of the whole machine, and without each of its cables.
    `machine`, `algorithm`, `removed` (a cable), `src` and `dst` (nodes) are the choices made, as indices; -1 is none.
    ValueError if there is no machine or algorithm, if a machine is too large, or for what the simulator refuses.
    """

    _esm, _css = still.source("topology_explorer.js"), still.source("topology_explorer.css")
    data = traitlets.Dict().tag(sync=True)
    machine = traitlets.Int(0).tag(sync=True)
    algorithm = traitlets.Int(0).tag(sync=True)
    removed = traitlets.Int(-1).tag(sync=True)
    src = traitlets.Int(-1).tag(sync=True)
    dst = traitlets.Int(-1).tag(sync=True)

    def __init__(
        self, machines: Mapping[str, Topology], nbytes: float = 160e6,
        algorithms: Sequence[Algorithm] = ("ring",), title: str = "",
    ) -> None:  # fmt: skip
        if not machines:
            raise ValueError(f"machines={machines!r} is empty: an explorer needs at least one")
        if isinstance(algorithms, str) or not algorithms:
            raise ValueError(f"algorithms={algorithms!r} must be a list of at least one name or function")
        called = [NAMES.get(a, a) if isinstance(a, str) else getattr(a, "__name__", str(a)) for a in algorithms]
        data = {"title": title or EXPLORER["title"], "nbytes": int(nbytes) // 4 * 4, "algorithms": called}
        found = [explored(name, topology, nbytes, algorithms) for name, topology in machines.items()]
        super().__init__(data=data | {"machines": found, "texts": EXPLORER})

    def __repr__(self) -> str:
        said = []
        for machine in self.data["machines"]:
            runs = zip(self.data["algorithms"], machine["runs"][0], strict=True)
            said.append(f"{machine['name']}: " + ", ".join(f"{algorithm} {_said(run)}" for algorithm, run in runs))
        return f"TopologyExplorer: all-reduce of {self.data['nbytes']:,} B. {'; '.join(said)}"


def _said(run: dict[str, Any]) -> str:
    return f"{run['seconds']:.4g} s" if "seconds" in run else f"impossible, no route {run['lost']}"


def explored(name: str, whole: Topology, nbytes: float, algorithms: Sequence[Algorithm]) -> dict[str, Any]:
    """One machine: its picture, and for the whole of it and without each cable the routes and a run of each algorithm.

    runs[0] are those of the whole, runs[k + 1] those without cable k, None where no route went over it; changed[k] has
    the routes that differ then.
    """
    if len(whole.nodes) > MOST:
        raise ValueError(f"{whole.name} has {len(whole.nodes)} nodes, and a picture has room for {MOST}")
    cables = [link for k, link in enumerate(whole.links) if link[::-1] not in whole.links[:k]]  # one for both directions
    routes = _routes(whole)
    changed, runs = list[Routes](), list[Any]()
    for less in (whole, *map(whole.without, cables)):
        left = _routes(less)
        changed.append({pair: way for pair, way in left.items() if way != routes[pair]})
        wanted = less is whole or changed[-1]
        runs.append([_run(whole, less, left, nbytes, algorithm) for algorithm in algorithms] if wanted else None)
    return {"name": name, **_picture(whole, cables), "routes": routes, "changed": changed[1:], "runs": runs}


def _routes(topology: Topology) -> Routes:
    """The way from each device and host to each other one."""
    number, found = topology.nodes.index, Routes()
    for src, dst in permutations(topology.devices + topology.hosts, 2):
        way = None
        with suppress(ValueError):  # what remains of a machine may have no route
            hops = [topology.links[link][1] for link in topology.route(src, dst).links]
            way = " ".join(str(number(node)) for node in (src, *hops))
        found[f"{number(src)} {number(dst)}"] = way
    return found


def _run(whole: Topology, less: Topology, routes: Routes, nbytes: float, algorithm: Algorithm) -> dict[str, Any]:
    """seconds, and for each link of the whole topology its bytes and its load in thousandths; or `lost`, who has no route."""
    try:
        run = simulated(algorithm, less, nbytes)
    except ValueError:
        ends = ([less.nodes[int(end)] for end in pair.split()] for pair, way in routes.items() if way is None)
        lost = next((pair for pair in ends if set(pair) <= set(less.devices)), None)
        if lost is None:
            raise
        return {"lost": EXPLORER["arrow"].join(map(str, lost))}
    moved, load = run.trace.bytes_on_links(), run.trace.utilization()
    loads = " ".join(str(round(1000 * load.get(link, 0.0))) for link in whole.links)
    return {"seconds": run.time, "bytes": " ".join(str(moved.get(link, 0)) for link in whole.links), "load": loads}


def simulated(algorithm: Algorithm, topology: Topology, nbytes: float) -> Run:
    """One all-reduce of so many bytes of float32, on all devices, without contents.

    >>> from d2lps.topology import pcie_tree
    >>> round(simulated("ring", pcie_tree(4, bandwidth=16e9, latency=0), 160e6).time, 9)
    0.015
    """
    if not nbytes >= 4:
        raise ValueError(f"nbytes={nbytes!r} is less than one float32 of 4 bytes")
    function = partial(all_reduce, algorithm=algorithm) if isinstance(algorithm, str) else algorithm
    return simulate(function, topology, torch.empty(int(nbytes) // 4, device="meta"), device="meta")


def _picture(topology: Topology, cables: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Where everything stands: x from 0 to 1, y from 0 to `aspect`, upwards. A cable knows its links there and back."""
    found, number = layout(topology.graph), topology.nodes.index
    drawn: dict[str, Any] = {"aspect": found.aspect, "nodes": [], "cables": []}
    drawn["boxes"] = [{"name": name, "nodes": [number(node) for node in nodes]} for name, nodes in found.boxes.items()]
    for node, (x, y) in found.positions.items():
        bar = {"bar": round(found.bars[node], 4)} if node in found.bars else {}
        place = {"x": round(x, 4), "y": round(y * found.aspect, 4)}
        drawn["nodes"].append({"name": str(node), "kind": topology.graph.nodes[node]["kind"], **place, **bar})
    for cable in cables:
        ways = [topology.links.index(link) if link in topology.links else -1 for link in (cable, cable[::-1])]
        speed = {"bandwidth": topology.bandwidth[ways[0]], "latency": topology.latency[ways[0]]}
        drawn["cables"].append({"ends": [number(node) for node in cable], "links": ways, **speed})
    return drawn
