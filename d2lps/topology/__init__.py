"""Machines and networks as graphs: devices, hosts and switches, joined by links that have a bandwidth and a latency."""

from d2lps.topology.clusters import fat_tree, multi_node, spine_leaf
from d2lps.topology.graph import Route, Topology
from d2lps.topology.nodes import dgx1, dgx1_rings, dgx2, hgx_h100, pcie_tree, ring, star

__all__ = [
    "Route",
    "Topology",
    "dgx1",
    "dgx1_rings",
    "dgx2",
    "fat_tree",
    "hgx_h100",
    "multi_node",
    "pcie_tree",
    "ring",
    "spine_leaf",
    "star",
]
