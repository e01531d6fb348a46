"""The topology explorer: a machine, what an all-reduce does to its links, and what happens when a cable is missing."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import permutations
from typing import Any

import traitlets
from matplotlib.figure import Figure

from d2lps.topology import Topology
from d2lps.topology.layout import layout
from d2lps.widgets import still
from d2lps.widgets.algorithms import Algorithm, described, simulated
from d2lps.widgets.texts import EXPLORER

_MOST_NODES = 80  # more cannot be told apart

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
    ValueError if there is no machine, if one is too large, or for what the simulator refuses.
    """

    _esm = still.source("topology_explorer.js")
    _css = still.source("topology_explorer.css")
    data = traitlets.Dict().tag(sync=True)
    machine = traitlets.Int(0).tag(sync=True)
    algorithm = traitlets.Int(0).tag(sync=True)
    removed = traitlets.Int(-1).tag(sync=True)
    src = traitlets.Int(-1).tag(sync=True)
    dst = traitlets.Int(-1).tag(sync=True)

    def __init__(
        self,
        machines: Mapping[str, Topology],
        nbytes: float = 160e6,
        algorithms: Sequence[Algorithm] = ("ring",),
        title: str = "",
    ) -> None:
        if not machines:
            raise ValueError(f"machines={machines!r} is empty: an explorer needs at least one")
        self.machines = dict(machines)
        super().__init__(
            data={
                "title": title or EXPLORER["title"],
                "nbytes": int(nbytes) // 4 * 4,
                "algorithms": described(algorithms),
                "machines": [explored(name, topology, nbytes, algorithms) for name, topology in machines.items()],
                "texts": EXPLORER,
            }
        )

    def __repr__(self) -> str:
        said = []
        for machine in self.data["machines"]:
            runs = zip(self.data["algorithms"], machine["runs"][0], strict=True)
            said.append(f"{machine['name']}: " + ", ".join(f"{algorithm['name']} {_said(run)}" for algorithm, run in runs))
        return f"TopologyExplorer: all-reduce of {self.data['nbytes']:,} B. {'; '.join(said)}"

    def _figure(self) -> Figure:
        """The chosen machine, whole, with the load of its links."""
        machine, topology = self.data["machines"][self.machine], list(self.machines.values())[self.machine]
        figure = still.figure(7.0, 7.0 * machine["aspect"] + 1.2)
        load = map(int, machine["runs"][0][self.algorithm].get("load", "").split())
        links = {link: thousandths / 1000 for link, thousandths in zip(topology.links, load, strict=False) if thousandths}
        topology.draw(figure.subplots(), links=links, label="utilization")
        return figure


def _said(run: dict[str, Any]) -> str:
    return f"{run['seconds']:.4g} s" if "seconds" in run else f"impossible, no route {run['lost']}"


def explored(name: str, topology: Topology, nbytes: float, algorithms: Sequence[Algorithm]) -> dict[str, Any]:
    """One machine: its picture, and for the whole of it and without each cable the routes and a run of each algorithm.

    runs[0] are those of the whole, runs[k + 1] those without cable k, None where no route went over it; changed[k] has
    the routes that differ then.
    """
    if len(topology.nodes) > _MOST_NODES:
        raise ValueError(f"{topology.name} has {len(topology.nodes)} nodes, and a picture has room for {_MOST_NODES}")
    links = topology.links
    cables = [link for k, link in enumerate(links) if link[::-1] not in links[:k]]  # one for both directions
    whole = _routes(topology)
    runs: list[list[dict[str, Any]] | None] = [[_run(topology, topology, whole, nbytes, a) for a in algorithms]]
    changed: list[Routes] = []
    for cable in cables:
        less = topology.without(cable)
        routes = _routes(less)
        changed.append({pair: way for pair, way in routes.items() if way != whole[pair]})
        runs.append([_run(topology, less, routes, nbytes, a) for a in algorithms] if changed[-1] else None)
    return {"name": name, **_picture(topology, cables), "routes": whole, "changed": changed, "runs": runs}


def _routes(topology: Topology) -> Routes:
    """The way from each device and host to each other one."""
    numbers = {node: str(number) for number, node in enumerate(topology.nodes)}
    found: Routes = {}
    for src, dst in permutations(topology.devices + topology.hosts, 2):
        try:
            hops = [topology.links[link][1] for link in topology.route(src, dst).links]
        except ValueError:
            hops = []  # what remains of the machine has no way
        found[f"{numbers[src]} {numbers[dst]}"] = " ".join(numbers[node] for node in (src, *hops)) if hops else None
    return found


def _run(topology: Topology, less: Topology, routes: Routes, nbytes: float, algorithm: Algorithm) -> dict[str, Any]:
    """seconds, and for each link of the whole topology its bytes and its load in thousandths; or `lost`, who has no route."""
    try:
        run = simulated(algorithm, less, nbytes, trace=True)
    except ValueError:
        ends = ([less.nodes[int(end)] for end in pair.split()] for pair, way in routes.items() if way is None)
        lost = next((pair for pair in ends if set(pair) <= set(less.devices)), None)
        if lost is None:
            raise
        return {"lost": EXPLORER["arrow"].join(map(str, lost))}
    moved, load = run.trace.bytes_on_links(), run.trace.utilization()
    return {
        "seconds": run.time,
        "bytes": " ".join(str(moved.get(link, 0)) for link in topology.links),
        "load": " ".join(str(round(1000 * load.get(link, 0.0))) for link in topology.links),
    }


def _picture(topology: Topology, cables: Sequence[tuple[Hashable, Hashable]]) -> dict[str, Any]:
    """Where everything stands: x from 0 to 1, y from 0 to `aspect`, upwards. A cable knows its links there and back."""
    found = layout(topology.graph)
    numbers = {node: number for number, node in enumerate(topology.nodes)}
    links = {link: number for number, link in enumerate(topology.links)}
    nodes = []
    for node, (x, y) in found.positions.items():
        bar = {"bar": round(found.bars[node], 4)} if node in found.bars else {}
        kind = topology.graph.nodes[node]["kind"]
        nodes.append({"name": str(node), "kind": kind, "x": round(x, 4), "y": round(y * found.aspect, 4), **bar})
    drawn = []
    for cable in cables:
        back = cable[::-1]
        ends = {"ends": [numbers[node] for node in cable], "links": [links[cable], links.get(back, -1)]}
        speed = {name: topology.graph.edges[cable][name] for name in ("bandwidth", "latency")}
        drawn.append({**ends, "bend": found.bends.get(cable, found.bends.get(back, 0.0)), **speed})
    boxes = [{"name": name, "nodes": [numbers[node] for node in members]} for name, members in found.boxes.items()]
    return {"aspect": found.aspect, "nodes": nodes, "cables": drawn, "boxes": boxes}
