"""One machine: how its GPUs and its CPU are joined."""

import networkx as nx

from d2lps.topology.device import Device
from d2lps.topology.graph import Topology, connect
from d2lps.topology.published import (
    A100,
    H100,
    NVLINK2,
    NVLINK3_GPU,
    NVLINK3_REACHED,
    NVLINK4_GPU,
    NVLINK4_REACHED,
    NVLINK_HOP,
    PCIE3_X16,
    PCIE_HOP,
    V100,
    V100_32GB,
)  # fmt: skip


def check_count(name: str, count: int, least: int = 1) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name}={count!r} is not a whole number from {least} up")


def with_devices(preset: str, count: int, device: Device | None, forwards: bool = False) -> nx.DiGraph:
    """A graph of gpu0, gpu1, ... that knows how it is best drawn."""
    graph = nx.DiGraph(preset=preset)
    graph.add_nodes_from((f"gpu{index}" for index in range(count)), kind="device", device=device, forwards=forwards)
    return graph


def _around(
    switch: str, n: int, bandwidth: float, latency: float, device: Device | None, name: str, *hosts: str, reached: float = 1.0
) -> Topology:
    """`n` devices and some hosts around a switch that is never the bottleneck."""
    check_count("n", n)
    graph = with_devices(switch, n, device)
    graph.add_nodes_from(hosts, kind="host", forwards=False)
    for leaf in list(graph):
        connect(graph, leaf, switch, bandwidth, latency, reached=reached)
    return Topology(graph, name)


def star(n: int, bandwidth: float, latency: float = 0.0, device: Device | None = None) -> Topology:
    """`n` devices around one switch that is never the bottleneck; each link has `bandwidth` and `latency`."""
    return _around("switch", n, bandwidth, latency, device, f"star({n})")


def pcie_tree(n: int, bandwidth: float = PCIE3_X16, latency: float = PCIE_HOP / 2, device: Device | None = None) -> Topology:
    """`n` devices and one host (the CPU), each on a full-duplex link of one non-blocking switch.

    A hop of 5.7 us from GPU to GPU passes two links. With bandwidth=16e9 and latency=0 it is the machine of the 60, 80 and
    15 ms in Dive into Deep Learning.
    """
    return _around("pcie", n, bandwidth, latency, device, f"pcie_tree({n})", "cpu")


def ring(n: int, bandwidth: float, latency: float = 0.0, device: Device | None = None) -> Topology:
    """`n` devices in a circle, each joined to its two neighbors; they pass messages on."""
    check_count("n", n)
    graph = with_devices("ring", n, device, forwards=True)
    for index in range(n if n > 2 else n - 1):
        connect(graph, f"gpu{index}", f"gpu{(index + 1) % n}", bandwidth, latency)
    return Topology(graph, f"ring({n})")


def dgx1_rings() -> tuple[list[int], list[int]]:
    """The two rings of a DGX-1 by device number: the one on its doubled links, and the one on its single links.

    Numbered as nvidia-smi does. Together they use each of the 48 directed NVLinks of the machine once, so the first can
    carry two thirds of the data in the time in which the second carries one third.
    """
    return [0, 3, 2, 1, 5, 6, 7, 4], [0, 1, 3, 7, 5, 4, 6, 2]


def dgx1(
    bandwidth: float = NVLINK2, latency: float = NVLINK_HOP, pcie: float = PCIE3_X16, device: Device | None = V100
) -> Topology:
    """NVIDIA's DGX-1: eight V100 in a hybrid cube mesh of NVLinks, eight doubled and eight single, and PCIe beside it.

    Two devices without an NVLink between them talk over PCIe: GPUs do not pass messages on.
    """
    graph = with_devices("dgx1", 8, device)
    for order, links in zip(dgx1_rings(), (2, 1), strict=True):
        for one, other in zip(order, order[1:] + order[:1], strict=True):
            connect(graph, f"gpu{one}", f"gpu{other}", links * bandwidth, latency, nvlinks=links)
    # Four GPUs to a CPU socket, two and two behind a PCIe switch; the sockets are joined by one UPI/QPI link.
    for switch in range(4):
        graph.add_node(f"cpu{switch // 2}", kind="host")
        for end in (f"cpu{switch // 2}", f"gpu{2 * switch}", f"gpu{2 * switch + 1}"):
            connect(graph, end, f"pcie{switch}", pcie, PCIE_HOP / 2)
    connect(graph, "cpu0", "cpu1", pcie, PCIE_HOP / 2)
    return Topology(graph, "DGX-1")


# Of NVSwitches there are in truth several in parallel. From GPU to GPU are two links, each with half of a hop's latency.


def dgx2(bandwidth: float = 6 * NVLINK2, latency: float = NVLINK_HOP, device: Device | None = V100_32GB) -> Topology:
    """NVIDIA's DGX-2: sixteen V100, all six NVLinks of each on NVSwitches, so that any two talk at full speed."""
    return _around("nvswitch", 16, bandwidth, latency / 2, device, "DGX-2")


def dgx_a100(bandwidth: float = NVLINK3_GPU, latency: float = NVLINK_HOP, device: Device | None = A100) -> Topology:
    """NVIDIA's DGX A100: eight A100 on NVSwitches, 300 GB/s each way for each."""
    return _around("nvswitch", 8, bandwidth, latency / 2, device, "DGX A100", reached=NVLINK3_REACHED)


def hgx_h100(n: int = 8, bandwidth: float = NVLINK4_GPU, latency: float = NVLINK_HOP, device: Device | None = H100) -> Topology:
    """NVIDIA's HGX H100: `n` H100 on NVSwitches, 450 GB/s each way for each."""
    name = "HGX H100" if n == 8 else f"HGX H100 ({n} GPUs)"
    return _around("nvswitch", n, bandwidth, latency / 2, device, name, reached=NVLINK4_REACHED)
