"""The topology explorer: a machine, what an all-reduce does to its links, and what happens when a cable is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

import traitlets

from d2lps.topology import Topology
from d2lps.topology.graph import Node
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
        data = {
            "title": title or EXPLORER["title"],
            "nbytes": int(nbytes) // 4 * 4,
            "algorithms": described(algorithms),
            "machines": [explored(name, topology, nbytes, algorithms) for name, topology in machines.items()],
            "texts": EXPLORER,
        }
        super().__init__(data=data)

    def __repr__(self) -> str:
        names = [algorithm["name"] for algorithm in self.data["algorithms"]]
        said = "; ".join(
            f"{machine['name']}: "
            + ", ".join(f"{name} {_said(run)}" for name, run in zip(names, machine["runs"][0], strict=True))
            for machine in self.data["machines"]
        )
        return f"TopologyExplorer: all-reduce of {self.data['nbytes']:,} B. {said}"

    def _still(self) -> bytes:
        """The chosen machine, whole, with the load of its links."""
        machine, topology = self.data["machines"][self.machine], list(self.machines.values())[self.machine]
        picture = still.figure(7.0, 7.0 * machine["aspect"] + 1.2)
        load = map(int, machine["runs"][0][self.algorithm].get("load", "").split())
        links = {link: thousandths / 1000 for link, thousandths in zip(topology.links, load, strict=False) if thousandths}
        topology.draw(picture.subplots(), links=links, label="utilization")
        return still.png(picture)


def _said(run: dict[str, Any]) -> str:
    return f"{run['seconds']:.4g} s" if "seconds" in run else f"impossible, no route {run['lost']}"


def explored(name: str, topology: Topology, nbytes: float, algorithms: Sequence[Algorithm]) -> dict[str, Any]:
    """One machine: its picture, and for the whole of it and without each cable the routes and a run of each algorithm.

    runs[0] are those of the whole, runs[k + 1] those without cable k, None where no route went over it; changed[k] has
    the routes that differ then.
    """
    if len(topology.nodes) > _MOST_NODES:
        raise ValueError(f"{topology.name} has {len(topology.nodes)} nodes, and a picture has room for {_MOST_NODES}")
    cables = _cables(topology)
    whole = _routes(topology, topology)
    runs: list[list[dict[str, Any]] | None] = [[_run(topology, topology, nbytes, a) for a in algorithms]]
    changed: list[Routes] = []
    for cable in cables:
        less = topology.without(cable)
        changed.append({pair: way for pair, way in _routes(topology, less).items() if way != whole[pair]})
        runs.append([_run(topology, less, nbytes, a) for a in algorithms] if changed[-1] else None)
    return {"name": name, **_picture(topology, cables), "routes": whole, "changed": changed, "runs": runs}


def _cables(topology: Topology) -> list[tuple[Node, Node]]:
    """The pairs of nodes that a link joins, in one direction or both."""
    cables: dict[frozenset[Node], tuple[Node, Node]] = {}
    for link in topology.links:
        cables.setdefault(frozenset(link), link)
    return list(cables.values())


def _routes(topology: Topology, less: Topology) -> Routes:
    """The way from each device and host to each other one, through what is left of a topology."""
    numbers = {node: number for number, node in enumerate(topology.nodes)}
    found: Routes = {}
    for src, dst in permutations(topology.devices + topology.hosts, 2):
        pair = _joined([numbers[src], numbers[dst]])
        if _reaches(less, src, dst):
            hops = [less.links[link][1] for link in less.route(src, dst).links]
            found[pair] = _joined([numbers[src], *(numbers[hop] for hop in hops)])
        else:
            found[pair] = None
    return found


def _reaches(topology: Topology, src: Node, dst: Node) -> bool:
    try:
        topology.route(src, dst)
    except ValueError:
        return False
    return True


def _run(topology: Topology, less: Topology, nbytes: float, algorithm: Algorithm) -> dict[str, Any]:
    """seconds, and for each link of the whole topology its bytes and its load in thousandths; or `lost`, who has no route."""
    try:
        run = simulated(algorithm, less, nbytes, trace=True)
    except ValueError:
        lost = next((pair for pair in permutations(less.devices, 2) if not _reaches(less, *pair)), None)
        if lost is None:
            raise
        return {"lost": EXPLORER["arrow"].join(map(str, lost))}
    moved, load = run.trace.bytes_on_links(), run.trace.utilization()
    return {
        "seconds": run.time,
        "busiest": _busiest({link: round(1000 * load[link]) for link in topology.links if link in load}),
        "bytes": _joined(moved.get(link, 0) for link in topology.links),
        "load": _joined(round(1000 * load.get(link, 0.0)) for link in topology.links),
    }


def _joined(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _busiest(load: Mapping[tuple[Node, Node], int]) -> str:
    """Three of the links with the highest load, and how many more there are."""
    most = max(load.values(), default=0)
    links = [EXPLORER["arrow"].join(map(str, link)) for link, thousandths in load.items() if thousandths == most]
    named = links[:3] + ([EXPLORER["others"].format(n=len(links) - 3)] if len(links) > 3 else [])
    return EXPLORER["busiest"].format(links=EXPLORER["and"].join(named), load=f"{most / 10:.3g}") if most else ""


def _picture(topology: Topology, cables: Sequence[tuple[Node, Node]]) -> dict[str, Any]:
    """Where everything stands: x from 0 to 1, y from 0 to `aspect`, upwards. A cable knows its links there and back."""
    found = layout(topology.graph)
    numbers = {node: number for number, node in enumerate(topology.nodes)}
    links = {link: number for number, link in enumerate(topology.links)}
    nodes = [
        {"name": str(node), "kind": data["kind"], "x": round(x, 4), "y": round(y * found.aspect, 4)}
        | ({"bar": round(found.bars[node], 4)} if node in found.bars else {})
        for node, data in topology.graph.nodes(data=True)
        for x, y in [found.positions[node]]
    ]
    drawn = []
    for src, dst in cables:
        forth, back = links[src, dst], links.get((dst, src), -1)
        bend = found.bends.get((src, dst), found.bends.get((dst, src), 0.0))
        speed = {"bandwidth": topology.bandwidth[forth], "latency": topology.latency[forth]}
        drawn.append({"ends": [numbers[src], numbers[dst]], "links": [forth, back], "bend": bend, **speed})
    boxes = [{"name": name, "nodes": [numbers[node] for node in members]} for name, members in found.boxes.items()]
    return {"aspect": found.aspect, "nodes": nodes, "cables": drawn, "boxes": boxes}
