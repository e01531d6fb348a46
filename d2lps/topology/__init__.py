"""Machines and networks as graphs: devices, hosts and switches, joined by links that have a bandwidth and a latency."""

from d2lps.topology.clusters import dgx_a100_pod, dgx_h100_pod, fat_tree, multi_node, spine_leaf
from d2lps.topology.device import Device
from d2lps.topology.graph import Route, Topology
from d2lps.topology.machines import dgx1, dgx1_rings, dgx2, dgx_a100, hgx_h100, pcie_tree, ring, star
from d2lps.topology.published import A100, H100, V100

__all__ = [
    "A100", "H100", "V100", "Device", "Route", "Topology", "dgx1", "dgx1_rings", "dgx2", "dgx_a100", "dgx_a100_pod",
    "dgx_h100_pod", "fat_tree", "hgx_h100", "multi_node", "pcie_tree", "ring", "spine_leaf", "star",
]
