"""Many machines: how their network is joined."""

from itertools import product

import networkx as nx

from d2lps.topology.device import Device
from d2lps.topology.graph import Topology, connect
from d2lps.topology.machines import check_count, dgx_a100, hgx_h100, with_devices
from d2lps.topology.published import A100, H100, HDR_PORT, NETWORK_HOP, NETWORK_REACHED, PORT


def spine_leaf(
    racks: int, per_rack: int, spines: int = 2, bandwidth: float = PORT,
    oversubscription: float = 1.0, latency: float = NETWORK_HOP / 4, device: Device | None = None,
) -> Topology:  # fmt: skip
    """Racks of devices, each under a leaf (top-of-rack) switch; every leaf is joined to every spine.

    bandwidth: of a device's link. oversubscription: how much more enters a leaf from below than can leave it above;
    1 is a network without a bottleneck, 4 a common one. latency: of each link.

    >>> net = spine_leaf(racks=2, per_rack=4, spines=2, oversubscription=4)
    >>> net.graph.edges["leaf0", "spine0"]["bandwidth"] / 1e9       # 4 x 50 GB/s from below, a quarter on 2 links
    25.0
    """
    for what, count in (("racks", racks), ("per_rack", per_rack), ("spines", spines)):
        check_count(what, count)
    if not oversubscription >= 1:
        raise ValueError(f"oversubscription={oversubscription!r} is below 1: more could leave a rack than enter it")
    graph = with_devices("spine_leaf", racks * per_rack, device)
    for rack in range(racks):
        for index in range(per_rack):
            connect(graph, f"gpu{rack * per_rack + index}", f"leaf{rack}", bandwidth, latency)
        for spine in range(spines):
            connect(graph, f"leaf{rack}", f"spine{spine}", per_rack * bandwidth / oversubscription / spines, latency)
    return Topology(graph, f"spine_leaf({racks} x {per_rack})")


def fat_tree(k: int, bandwidth: float = PORT, latency: float = NETWORK_HOP / 6, device: Device | None = None) -> Topology:
    """The three-stage fat tree of k-port switches: k pods, k^3/4 devices, full bandwidth between any halves.

    Every link has the same bandwidth. Source: Al-Fares, Loukissas, Vahdat 2008.

    >>> fat_tree(4)
    <Topology fat_tree(4): 16 devices, 20 switches, 96 links>
    """
    check_count("k", k, least=2)
    if k % 2:
        raise ValueError(f"k={k} is odd: half of a switch's ports go up, half go down")
    half = k // 2
    graph = with_devices("fat_tree", k * half * half, device)
    graph.add_nodes_from((f"core{index}" for index in range(half * half)), kind="switch")

    pairs = list(product(range(half), repeat=2))
    for pod in range(k):
        for index, other in pairs:
            connect(graph, f"gpu{(pod * half + index) * half + other}", f"edge{pod}.{index}", bandwidth, latency)
        for index, other in pairs:
            connect(graph, f"edge{pod}.{other}", f"agg{pod}.{index}", bandwidth, latency)
        for index, other in pairs:
            connect(graph, f"core{index * half + other}", f"agg{pod}.{index}", bandwidth, latency)
    return Topology(graph, f"fat_tree({k})")


def multi_node(
    node: Topology, k: int, bandwidth: float = PORT, latency: float = NETWORK_HOP / 2, ports: str = "device", reached: float = 1.0
) -> Topology:
    """`k` copies of a machine on one non-blocking network. Nodes are renamed "node0/gpu0", ...

    bandwidth, latency, reached: of each network port (see `Topology.reached`). ports: "device", a port for every device (and
    host), as in machines built for training; or "node", one for the whole machine, which all share through a `nic` switch.
    Messages between nodes of one machine stay inside it.
    """
    check_count("k", k)
    if ports not in ("device", "node"):
        raise ValueError(f"ports={ports!r} is unknown: choose 'device' or 'node'")
    graph = nx.DiGraph(preset="multi_node", machine=node.graph)
    graph.add_node("network", kind="switch")
    for index in range(k):
        machine = f"node{index}"
        copy = nx.relabel_nodes(node.graph, {name: f"{machine}/{name}" for name in node.graph})
        graph.add_nodes_from(copy.nodes(data=True), machine=machine)
        graph.add_edges_from(copy.edges(data=True))
        leaves = [f"{machine}/{leaf}" for leaf in node.devices + node.hosts]
        if ports == "node":
            for leaf in leaves:  # to the port, a device is limited by its own bus, not by the cable
                connect(graph, leaf, f"{machine}/nic", max(node.bandwidth, default=PORT), 0.0)
            leaves = [f"{machine}/nic"]
        for leaf in leaves:
            connect(graph, leaf, "network", bandwidth, latency, reached=reached)
    return Topology(graph, f"{k} x {node.name}")


def dgx_a100_pod(nodes: int, device: Device | None = A100) -> Topology:
    """`nodes` DGX A100, each device with a port of 200 Gb/s on a network that does not block.

    >>> dgx_a100_pod(16)
    <Topology 16 x DGX A100: 128 devices, 17 switches, 512 links>
    """
    check_count("nodes", nodes)
    return multi_node(dgx_a100(device=device), nodes, HDR_PORT, reached=NETWORK_REACHED)


def dgx_h100_pod(nodes: int, device: Device | None = H100) -> Topology:
    """`nodes` machines of eight H100, each device with a port of 400 Gb/s on a network that does not block."""
    check_count("nodes", nodes)
    return multi_node(hgx_h100(device=device), nodes, PORT, reached=NETWORK_REACHED)
