"""A cluster of pods, described as a graph: machines under pods that do not block, pods under a core that does."""

from itertools import count as count_from
from math import ceil
from typing import NamedTuple

from d2lps.arguments import whole
from d2lps.planning.published import RADIX
from d2lps.topology import Topology
from d2lps.topology.clusters import multi_node
from d2lps.topology.graph import connect
from d2lps.topology.machines import hgx_h100
from d2lps.topology.published import NETWORK_HOP, NETWORK_REACHED, PORT


def pods(
    count: int, per_pod: int, oversubscription: float = 1.0, machine: Topology | None = None,
    bandwidth: float = PORT, latency: float = NETWORK_HOP / 2, reached: float = NETWORK_REACHED,
) -> Topology:  # fmt: skip
    """`count` pods of `per_pod` machines. Within a pod any devices talk at full speed; out of it they share what there is.

    >>> pods(8, per_pod=384, oversubscription=7)                    # doctest: +SKIP
    <Topology 8 pods of 384 x HGX H100, 7 : 1: 24576 devices, 3081 switches, 98320 links>
    >>> small = pods(2, per_pod=4, oversubscription=8)
    >>> small.graph.edges["pod0", "core"]["bandwidth"] / 1e9        # 32 ports of 50 GB/s from below, an eighth above
    200.0

    machine: an HGX H100 by default, each device with a port of `bandwidth` bytes/s. latency: of each link. The switches of a pod
    stand as one, and so do its links to the core: as if each message took the emptiest. ValueError for a number that is none.
    Source: the cluster of Llama 3 (Llama team 2024), 8 pods of 3,072 devices, 7 to 1.
    """
    whole("count", count)
    whole("per_pod", per_pod)
    if not oversubscription >= 1:
        raise ValueError(f"oversubscription={oversubscription!r} is below 1: more could leave a pod than enter it")
    machine = machine or hgx_h100()
    graph = multi_node(machine, count * per_pod, bandwidth, latency, reached=reached).graph
    graph.remove_node("network")
    graph.graph["preset"] = "pods"
    for index in range(count * per_pod):
        for leaf in machine.devices:
            connect(graph, f"node{index}/{leaf}", f"pod{index // per_pod}", bandwidth, latency, reached=reached)
    above = per_pod * len(machine.devices) * bandwidth / oversubscription
    for pod in range(count):
        connect(graph, f"pod{pod}", "core", above, latency, reached=reached)
    return Topology(graph, f"{count} pods of {per_pod} x {machine.name}, {oversubscription:g} : 1")


class Clos(NamedTuple):
    """What a network without a bottleneck is made of. bisection: bytes/s from one half to the other."""

    tiers: int
    switches: int
    cables: int
    bisection: float


def clos(devices: int, radix: int = RADIX, bandwidth: float = PORT) -> Clos:
    """The fewest tiers of `radix`-port switches that join so many ports, and what they take: T tiers join 2 (radix/2)^T.

    >>> clos(128, radix=8)          # three tiers: the fat tree of 8-port switches
    Clos(tiers=3, switches=80, cables=384, bisection=3200000000000.0)

    Each tier has devices / (radix/2) switches, the topmost half of that; as many cables go into each tier as there are devices.
    Counts are of a full tree; a smaller one has those of its share, rounded up. Source: Al-Fares, Loukissas, Vahdat 2008.
    """
    whole("devices", devices)
    whole("radix", radix, least=4)
    half, odd = divmod(radix, 2)
    if odd:
        raise ValueError(f"radix={radix} is odd: a switch has as many ports up as down")
    tiers = next(tiers for tiers in count_from(1) if radix * half ** (tiers - 1) >= devices)
    below, top = ceil(devices / half), ceil(devices / radix)
    return Clos(tiers, below * (tiers - 1) + top, devices * tiers, devices * bandwidth / 2)
