"""Described machines and networks: what the presets have, which way messages take, and how they are drawn."""

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import matplotlib
import networkx as nx
import pytest
from matplotlib import pyplot as plt

from d2lps.topology import (
    Device,
    Topology,
    dgx1,
    dgx1_rings,
    dgx2,
    dgx_a100,
    dgx_a100_pod,
    dgx_h100_pod,
    fat_tree,
    hgx_h100,
    multi_node,
    pcie_tree,
    ring,
    spine_leaf,
    star,
)
from d2lps.topology.graph import connect
from d2lps.topology.layout import layout

matplotlib.use("Agg")
GB = 1e9


def counts(topology: Topology) -> tuple[int, int, int, int]:
    return len(topology.devices), len(topology.hosts), len(topology.switches), len(topology.links)


def way(topology: Topology, src: Any, dst: Any) -> list[Any]:
    """The nodes that a message passes."""
    links = [topology.links[link] for link in topology.route(src, dst).links]
    assert all(one[1] == next[0] for one, next in pairwise(links))
    return [src, *(there for _, there in links)]


def load(topology: Topology, pairs: Any) -> Counter[Any]:
    """How many messages pass each link if all pairs exchange one."""
    return Counter(topology.links[link] for src, dst in pairs for link in topology.route(src, dst).links)


def bandwidths(topology: Topology) -> set[float]:
    return set(topology.bandwidth)


# ---- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "devices", "hosts", "switches", "cables"),
    [
        (star(1, 1.0), 1, 0, 1, 1),
        (star(5, 1.0), 5, 0, 1, 5),
        (ring(1, 1.0), 1, 0, 0, 0),
        (ring(2, 1.0), 2, 0, 0, 1),
        (ring(6, 1.0), 6, 0, 0, 6),
        (pcie_tree(4), 4, 1, 1, 5),
        (dgx1(), 8, 2, 4, 16 + 8 + 4 + 1),  # NVLink pairs, GPU to PCIe, PCIe to CPU, CPU to CPU
        (dgx2(), 16, 0, 1, 16),
        (hgx_h100(), 8, 0, 1, 8),
        (spine_leaf(3, 4, spines=2), 12, 0, 5, 12 + 6),
        (fat_tree(2), 2, 0, 5, 6),
        (fat_tree(4), 16, 0, 20, 48),
        (fat_tree(8), 128, 0, 80, 384),
        (multi_node(hgx_h100(), 4), 32, 0, 5, 64),
        (multi_node(pcie_tree(2), 3, ports="node"), 6, 3, 7, 9 + 9 + 3),
    ],
    ids=lambda value: value.name if isinstance(value, Topology) else "",
)
def test_what_the_presets_have(topology: Topology, devices: int, hosts: int, switches: int, cables: int) -> None:
    assert counts(topology) == (devices, hosts, switches, 2 * cables)
    assert all(topology.graph.has_edge(v, u) for u, v in topology.links)  # every cable is full duplex


def test_what_a_topology_says_of_itself() -> None:
    assert repr(pcie_tree(4)) == "<Topology pcie_tree(4): 4 devices, 1 host, 1 switch, 10 links>"
    assert star(2, 1e9).devices == ["gpu0", "gpu1"]


def test_bandwidths_of_the_machines() -> None:
    assert bandwidths(pcie_tree(4)) == {16 * GB}
    assert bandwidths(dgx1()) == {50 * GB, 25 * GB, 16 * GB}
    assert bandwidths(dgx2()) == {150 * GB}  # six NVLinks of 25 GB/s
    assert bandwidths(hgx_h100()) == {450 * GB}
    assert bandwidths(star(3, 7.0, 1.0)) == {7.0} and set(star(3, 7.0, 0.5).latency) == {0.5}


def test_an_oversubscribed_rack_has_a_quarter_of_its_bandwidth_upwards() -> None:
    net = spine_leaf(racks=3, per_rack=8, spines=2, bandwidth=50 * GB, oversubscription=4)
    up = [net.graph.edges["leaf1", spine]["bandwidth"] for spine in ("spine0", "spine1")]
    assert sum(up) == 8 * 50 * GB / 4


@pytest.mark.parametrize("k", [2, 4, 6])
def test_any_half_of_a_fat_tree_can_talk_to_the_other_at_full_speed(k: int) -> None:
    net = fat_tree(k)
    half = len(net.devices) // 2
    flow = nx.DiGraph(net.graph)
    for side, devices in (("in", net.devices[:half]), ("out", net.devices[half:])):
        for device in devices:
            flow.add_edge(*(("in", device) if side == "in" else (device, "out")))  # without a bandwidth: endless
    assert nx.maximum_flow_value(flow, "in", "out", capacity="bandwidth") == pytest.approx(half * bandwidths(net).pop())


def test_machines_in_a_network_keep_their_insides() -> None:
    cluster = multi_node(dgx1(), 2, bandwidth=12.5 * GB)
    assert cluster.devices[:2] == ["node0/gpu0", "node0/gpu1"] and len(cluster.devices) == 16
    assert cluster.graph.edges["node1/gpu0", "node1/gpu3"]["bandwidth"] == 50 * GB
    assert cluster.graph.edges["node1/gpu0", "network"]["bandwidth"] == 12.5 * GB


# ---- devices ----------------------------------------------------------------------------------------------------------


def test_the_machines_have_the_devices_of_their_data_sheets() -> None:
    def device(topology: Topology) -> Device:
        [found] = {topology.device(node) for node in topology.devices}
        assert found is not None and not any(topology.device(node) for node in topology.switches + topology.hosts)
        return found

    assert device(dgx1()) == Device(flops=125e12, memory=16e9, memory_bandwidth=900e9)
    assert device(dgx2()) == Device(flops=125e12, memory=32e9, memory_bandwidth=900e9)
    assert device(dgx_a100()) == device(dgx_a100_pod(2)) == Device(flops=312e12, memory=80e9, memory_bandwidth=2039e9)
    assert device(hgx_h100(3)) == device(dgx_h100_pod(2)) == Device(flops=989e12, memory=80e9, memory_bandwidth=3350e9)


SMALL = Device(flops=1e12, memory=1e9, memory_bandwidth=1e11, efficiency=0.5, launch=1e-6)
WITH_SMALL: list[Topology] = [star(3, 1e9, device=SMALL), ring(3, 1e9, device=SMALL), pcie_tree(3, device=SMALL)]
WITH_SMALL += [dgx1(device=SMALL), dgx2(device=SMALL), dgx_a100(device=SMALL), hgx_h100(device=SMALL)]
WITH_SMALL += [fat_tree(4, device=SMALL), spine_leaf(2, 2, device=SMALL), dgx_a100_pod(2, SMALL), dgx_h100_pod(2, SMALL)]


@pytest.mark.parametrize("topology", WITH_SMALL, ids=lambda topology: topology.name)
def test_a_device_survives_whatever_is_made_of_its_topology(topology: Topology) -> None:
    first, link = topology.devices[0], topology.links[-1]
    graph = topology.graph.copy()
    graph.add_node("more", kind="device")
    larger = Topology(graph)
    copies = [larger, topology.without(link), topology.slowed(link, 2), topology.straggler(first, 2), topology.without(first)]
    for copy in [topology, pickle.loads(pickle.dumps(topology)), *copies]:
        assert {copy.device(node) for node in copy.devices if node != "more"} == {SMALL}
    assert larger.device("more") is None
    for ports in ("device", "node"):
        machines = multi_node(topology, 2, ports=ports)
        assert {machines.device(node) for node in machines.devices} == {SMALL}


def test_a_node_has_no_device_unless_somebody_says_so() -> None:
    assert [star(1, 1e9).device(node) for node in ("gpu0", "switch")] == [None, None]
    graph = star(1, 1e9).graph.copy()
    graph.nodes["switch"]["device"] = SMALL  # a switch that adds up
    assert Topology(graph).device("switch") == SMALL


def test_the_roofline() -> None:
    balance = 0.5e12 / 1e11  # operations for each byte at which neither waits for the other
    for nbytes in (0, 1e6, 1e9):
        assert SMALL.time_of(balance * nbytes, nbytes, 3) == pytest.approx(3e-6 + nbytes / 1e11)
        assert SMALL.time_of(2 * balance * nbytes, nbytes) == pytest.approx(1e-6 + 2 * nbytes / 1e11)  # computing is longer
        assert SMALL.time_of(balance * nbytes / 2, nbytes) == pytest.approx(1e-6 + nbytes / 1e11)  # moving is
    assert SMALL.time_of(0, 0) == 1e-6 and SMALL.time_of(0, 0, operations=0) == 0


def test_a_pod_has_a_port_for_each_device_on_a_network_that_does_not_block() -> None:
    for pod, inside, port in ((dgx_a100_pod(3), 300 * GB, 25 * GB), (dgx_h100_pod(3), 450 * GB, 50 * GB)):
        assert counts(pod) == (24, 0, 4, 2 * 48)
        assert pod.route("node0/gpu0", "node0/gpu7").bandwidth == inside
        assert pod.route("node0/gpu0", "node1/gpu0").bandwidth == port
        used = load(pod, [(pod.devices[i], pod.devices[(i + 8) % 24]) for i in range(24)])
        assert set(used.values()) == {1}


# ---- the DGX-1 --------------------------------------------------------------------------------------------------------


def pairs_of(order: list[int]) -> list[tuple[int, int]]:
    return list(zip(order, order[1:] + order[:1], strict=True))


def mesh(doubled: list[int], single: list[int]) -> nx.Graph:
    graph = nx.Graph()
    graph.add_edges_from(pairs_of(doubled), nvlinks=2)
    graph.add_edges_from(pairs_of(single), nvlinks=1)
    return graph


def test_every_gpu_of_a_dgx1_has_six_nvlinks() -> None:
    machine = dgx1()
    for gpu in machine.devices:
        assert sum(data.get("nvlinks", 0) for _, _, data in machine.graph.out_edges(gpu, data=True)) == 6
    numbers = Counter(data["nvlinks"] for _, _, data in machine.graph.edges(data=True) if "nvlinks" in data)
    assert numbers == {2: 16, 1: 16}  # eight doubled links and eight single ones, each both ways


def test_the_two_rings_use_every_nvlink_once_each_way() -> None:
    used: Counter[tuple[str, str]] = Counter()
    for order, links in zip(dgx1_rings(), (2, 1), strict=True):
        assert sorted(order) == list(range(8))
        for one, other in pairs_of(order):
            used[f"gpu{one}", f"gpu{other}"] += links
            used[f"gpu{other}", f"gpu{one}"] += links
    assert used == {(u, v): data["nvlinks"] for u, v, data in dgx1().graph.edges(data=True) if "nvlinks" in data}
    assert sum(used.values()) == 48


def test_the_two_numberings_of_the_mesh_are_one_machine() -> None:
    by_ring = mesh([1, 2, 3, 4, 5, 6, 7, 8], [1, 4, 6, 3, 5, 8, 2, 7])  # NVIDIA's drawing numbers them from 1
    by_nvidia_smi = mesh(*dgx1_rings())
    assert nx.is_isomorphic(by_ring, by_nvidia_smi, edge_match=lambda one, other: one == other)


def test_gpus_without_an_nvlink_talk_over_pcie() -> None:
    assert way(dgx1(), "gpu0", "gpu4") == ["gpu0", "gpu4"]
    assert way(dgx1(), "gpu0", "gpu5") == ["gpu0", "pcie0", "cpu0", "cpu1", "pcie2", "gpu5"]


# ---- routes -----------------------------------------------------------------------------------------------------------

NETWORKS = [star(4, 1e9), ring(7, 1e9), pcie_tree(3), dgx1(), spine_leaf(3, 4, spines=3), fat_tree(4), multi_node(dgx1(), 2)]


@pytest.mark.parametrize("topology", NETWORKS, ids=lambda topology: topology.name)
def test_routes_are_shortest_and_nobody_forwards_who_should_not(topology: Topology) -> None:
    for src in topology.devices + topology.hosts:
        allowed = [node for node in topology.nodes if topology.graph.nodes[node]["forwards"] or node == src]
        for dst in topology.devices + topology.hosts:
            nodes = way(topology, src, dst)
            assert nodes[-1] == dst and all(topology.graph.nodes[node]["forwards"] for node in nodes[1:-1])
            machine = topology.graph.nodes[src].get("machine")
            inside = machine is not None and machine == topology.graph.nodes[dst].get("machine")
            known = [n for n in {*allowed, dst} if not inside or topology.graph.nodes[n].get("machine") == machine]
            assert len(nodes) - 1 == nx.shortest_path_length(topology.graph.subgraph(known), src, dst)


def test_a_route_adds_its_latencies_and_has_its_slowest_links_bandwidth() -> None:
    route = star(3, bandwidth=4.0, latency=0.25).slowed(("gpu1", "switch"), 4).route("gpu0", "gpu1")
    assert (len(route.links), route.latency, route.bandwidth) == (2, 0.5, 1.0)


def test_the_way_to_oneself_is_free() -> None:
    route = star(3, 4.0, 1.0).route("gpu1", "gpu1")
    assert (route.links, route.latency, route.bandwidth) == ((), 0.0, float("inf"))


def test_among_shortest_routes_the_one_of_least_latency_is_taken() -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from("ab", kind="device")
    graph.add_nodes_from(["slow", "fast"], kind="switch")
    for switch, latency in (("slow", 2e-6), ("fast", 1e-6)):
        connect(graph, "a", switch, 1e9, latency)
        connect(graph, switch, "b", 1e9, latency)
    assert way(Topology(graph), "a", "b") == ["a", "fast", "b"]


@pytest.mark.parametrize("topology", NETWORKS, ids=lambda topology: topology.name)
def test_routes_are_the_same_every_time_and_in_any_order(topology: Topology) -> None:
    pairs = [(src, dst) for src in topology.devices for dst in topology.devices]
    again = Topology(topology.graph.copy())
    assert [topology.route(*pair) for pair in pairs] == [again.route(*pair) for pair in reversed(pairs)][::-1]


def test_racks_spread_their_messages_over_all_spines() -> None:
    net = spine_leaf(racks=2, per_rack=4, spines=2)
    used = load(net, [(f"gpu{i}", f"gpu{i + 4}") for i in range(4)])
    assert used["leaf0", "spine0"] == used["leaf0", "spine1"] == 2


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("shift", ["half", "pod"])
def test_a_shift_in_a_fat_tree_uses_no_link_twice(k: int, shift: str) -> None:
    net = fat_tree(k)
    n, by = len(net.devices), len(net.devices) // (2 if shift == "half" else k)
    used = load(net, [(net.devices[i], net.devices[(i + by) % n]) for i in range(n)])
    assert set(used.values()) == {1}


@pytest.mark.parametrize("ports", ["device", "node"])
@pytest.mark.parametrize("machine", [dgx1(), pcie_tree(4, latency=1.0), hgx_h100(latency=1.0)], ids=lambda machine: machine.name)
def test_messages_between_gpus_of_one_machine_stay_inside(machine: Topology, ports: str) -> None:
    cluster = multi_node(machine, 2, latency=0.0, ports=ports)
    for src in machine.devices:
        for dst in machine.devices:
            assert way(cluster, f"node1/{src}", f"node1/{dst}") == [f"node1/{node}" for node in way(machine, src, dst)]


def test_messages_between_machines_pass_the_network() -> None:
    assert way(multi_node(pcie_tree(2), 2), "node0/gpu1", "node1/gpu0") == ["node0/gpu1", "network", "node1/gpu0"]
    shared = ["node0/gpu1", "node0/nic", "network", "node1/nic", "node1/gpu0"]
    assert way(multi_node(pcie_tree(2), 2, ports="node"), "node0/gpu1", "node1/gpu0") == shared


# ---- clusters with something broken or slow -----------------------------------------------------------------------------


def test_without_a_link_messages_go_the_long_way_round() -> None:
    broken = ring(5, 1e9).without(("gpu0", "gpu1"))
    assert way(broken, "gpu0", "gpu1") == ["gpu0", "gpu4", "gpu3", "gpu2", "gpu1"]


def test_without_a_node_its_links_are_gone_too() -> None:
    smaller = star(3, 1e9).without("gpu1")
    assert smaller.devices == ["gpu0", "gpu2"] and len(smaller.links) == 4


def test_the_original_is_not_changed() -> None:
    whole = star(3, 1e9)
    whole.without("gpu1"), whole.slowed(("gpu0", "switch"), 2), whole.straggler("gpu0", 2)
    assert counts(whole) == (3, 0, 1, 6) and bandwidths(whole) == {1e9}


def test_a_straggler_is_slow_in_both_directions_and_nobody_else_is() -> None:
    slower = pcie_tree(3, bandwidth=8.0).straggler("gpu1", 4)
    slow = {link for link, bandwidth in zip(slower.links, slower.bandwidth, strict=True) if bandwidth == 2.0}
    assert slow == {("gpu1", "pcie"), ("pcie", "gpu1")}
    assert Counter(slower.bandwidth) == {8.0: 6, 2.0: 2}


# ---- errors -----------------------------------------------------------------------------------------------------------


def graph_of(**link: Any) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from("ab", kind="device")
    graph.add_edge("a", "b", **link)
    return graph


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: star(0, 1.0), "n=0 is not a whole number from 1 up"),
        (lambda: star(True, 1.0), "n=True is not a whole number from 1 up"),
        (lambda: ring(2.5, 1.0), "n=2.5 is not a whole number from 1 up"),  # type: ignore[arg-type]
        (lambda: hgx_h100(0), "n=0 is not a whole number"),
        (lambda: star(2, 0.0), "link 'gpu0' -> 'switch' has bandwidth=0.0; it must be a number above 0"),
        (lambda: star(2, float("inf")), "bandwidth=inf; it must be a number above 0"),
        (lambda: star(2, float("nan")), "bandwidth=nan"),
        (lambda: star(2, 1.0, -1e-6), "link 'gpu0' -> 'switch' has latency=-1e-06; it must be a number 0 or above"),
        (lambda: Topology(graph_of(bandwidth="fast", latency=0)), "link 'a' -> 'b' has bandwidth='fast'"),
        (lambda: Topology(graph_of(bandwidth=1.0)), "link 'a' -> 'b' has latency=None"),
        (lambda: Topology(nx.DiGraph([("a", "b")])), "node 'a' has kind=None, which is none of device, host, switch"),
        (lambda: fat_tree(3), "k=3 is odd: half of a switch's ports go up, half go down"),
        (lambda: spine_leaf(2, 2, oversubscription=0.5), "oversubscription=0.5 is below 1"),
        (lambda: spine_leaf(2, 0), "per_rack=0 is not a whole number"),
        (lambda: multi_node(star(2, 1.0), 2, ports="rack"), "ports='rack' is unknown: choose 'device' or 'node'"),
        (lambda: Device(0, 1, 1), "flops=0 is not a number above 0"),
        (lambda: Device(1, -80e9, 1), "memory=-80000000000.0 is not a number above 0"),
        (lambda: Device(1, 1, float("nan")), "memory_bandwidth=nan is not a number above 0"),
        (lambda: Device(float("inf"), 1, 1), "flops=inf is not a number above 0"),
        (lambda: Device("fast", 1, 1), "flops='fast' is not a number above 0"),  # type: ignore[arg-type]
        (lambda: Device(True, 1, 1), "flops=True is not a number above 0"),
        (lambda: Device(1, 1, 1, efficiency=0), "efficiency=0 is not a number above 0"),
        (lambda: Device(1, 1, 1, efficiency=1.5), "efficiency=1.5 is above 1: it is a share of flops=1"),
        (lambda: Device(1, 1, 1, launch=-1e-6), "launch=-1e-06 is not a number from 0 up"),
        (lambda: SMALL.time_of(-1, 0), "flops=-1 is not a number from 0 up"),
        (lambda: SMALL.time_of(0, float("nan")), "bytes=nan is not a number from 0 up"),
        (lambda: SMALL.time_of(0, 0, -1), "operations=-1 is not a number from 0 up"),
        (lambda: star(2, 1.0).device("gpu7"), "'gpu7' is not a node of star(2); it has 'gpu0', 'gpu1', 'switch'"),
        (lambda: dgx_h100_pod(0), "nodes=0 is not a whole number from 1 up"),
        (lambda: star(2, 1.0).without("gpu7"), "'gpu7' is neither a node nor a link of star(2)"),
        (lambda: star(2, 1.0).without(("gpu0", "gpu1")), "('gpu0', 'gpu1') is neither a node nor a link of star(2)"),
        (lambda: star(2, 1.0).slowed(("gpu0", "switch"), 0), "factor=0 is not above 0"),
        (lambda: star(2, 1.0).straggler("gpu7", 2), "'gpu7' is not a node of star(2); it has 'gpu0', 'gpu1', 'switch'"),
        (lambda: star(2, 1.0).route("gpu0", "gpu7"), "'gpu7' is not a node of star(2); it has 'gpu0', 'gpu1', 'switch'"),
        (lambda: fat_tree(4).route("gpu99", "gpu0"), "'gpu99' is not a node of fat_tree(4); it has 'gpu0', 'gpu1'"),
        (lambda: Topology(graph_of(bandwidth=1, latency=0)).route("b", "a"), "topology has no route from 'b' to 'a'"),
        (lambda: star(2, 1.0).without("switch").route("gpu0", "gpu1"), "star(2) has no route from 'gpu0' to 'gpu1'"),
        (lambda: star(2, 1.0).draw(links={("gpu0", "gpu1"): 1.0}), "('gpu0', 'gpu1'), which is no link of star(2)"),
        (lambda: star(2, 1.0).draw(hide=["gpu0", "gpu7"]), "hide has ['gpu7'], which star(2) has not"),
        (lambda: fat_tree(8).draw(), "fat_tree(8) has 208 nodes, and a picture has room for 80: draw a smaller one of its kind"),
        (lambda: star(1, 1.0).draw(hide=["gpu0", "switch"]), "nothing of star(1) is left to draw"),
    ],
)
def test_a_mistake_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_an_undirected_graph_is_refused() -> None:
    for parallel in (nx.MultiDiGraph, nx.MultiGraph):
        with pytest.raises(TypeError, match=rf"not a {parallel.__name__}: of parallel links make one, whose bandwidth is"):
            Topology(parallel([("a", "b"), ("a", "b")]))
    with pytest.raises(TypeError, match=r"a topology is a networkx.DiGraph, not a Graph"):
        Topology(nx.Graph())  # type: ignore[arg-type]


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(TypeError, match=r"node 'gpu0' has device='H100', which is no Device"):
        star(2, 1.0, device="H100")  # type: ignore[arg-type]


# ---- drawings -----------------------------------------------------------------------------------------------------------

DRAWN = [star(1, 1e9), star(32, 1e9), ring(2, 1e9), ring(64, 1e9), pcie_tree(4), dgx1(), dgx2(), hgx_h100()]
DRAWN += [fat_tree(2), fat_tree(4)]
DRAWN += [spine_leaf(4, 8, 2, oversubscription=4), multi_node(hgx_h100(), 4), multi_node(dgx1(), 2, ports="node")]
DRAWN += [multi_node(pcie_tree(4), 3), star(8, 1e9).without("gpu3"), dgx1().without("gpu0", "cpu1")]
DRAWN += [Topology(graph_of(bandwidth=1, latency=0))]


def with_a_server(preset: Topology, at: Any, kind: str = "host") -> Topology:
    """A reader's change: one more node, which no preset knows."""
    graph = preset.graph.copy()
    graph.add_node("server", kind=kind)
    connect(graph, at, "server", 1e9, 1e-6)
    return Topology(graph, f"{preset.name} with a {kind}")


DRAWN += [with_a_server(preset, at, kind) for kind in ("host", "device", "switch") for preset, at in (
    (star(4, 1e9), "switch"), (ring(4, 1e9), "gpu1"), (dgx1(), "cpu0"), (hgx_h100(), "nvswitch"),
    (spine_leaf(2, 2, 1), "leaf0"), (fat_tree(4), "edge0.0"), (multi_node(dgx1(), 2), "network"),
)]  # fmt: skip


@pytest.fixture(autouse=True)
def no_figure_stays_open() -> Any:
    yield
    plt.close("all")


@pytest.mark.parametrize("topology", DRAWN, ids=lambda topology: topology.name)
def test_every_node_has_a_place_of_its_own(topology: Topology) -> None:
    places = layout(topology.graph).positions
    assert list(places) == topology.nodes and places == layout(topology.graph.copy()).positions
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in places.values())
    assert len({(round(x, 3), round(y, 3)) for x, y in places.values()}) == len(places)


def test_where_pieces_stand_depends_on_no_name() -> None:
    """Names decide how a set is ordered, and those of text do so differently in every run."""

    def pieces(names: list[int]) -> nx.DiGraph:
        graph = nx.DiGraph()
        for first in (0, 3):
            nx.add_path(graph, names[first : first + 3])
        return graph

    assert [*layout(pieces([0, 1, 2, 3, 4, 5])).positions.values()] == [*layout(pieces([5, 4, 3, 2, 1, 0])).positions.values()]


@pytest.mark.parametrize("topology", DRAWN, ids=lambda topology: topology.name)
def test_every_node_is_drawn_and_named(topology: Topology) -> None:
    ax = topology.draw()
    ax.figure.canvas.draw()
    texts = [text.get_text() for text in ax.texts]
    for node in topology.nodes:
        name = str(node).rpartition("/")[2]
        assert name in texts or name.lstrip("abcdefghijklmnopqrstuvwxyz") in texts
    kinds = [word for word in ("device", "host", "switch") if getattr(topology, {"switch": "switches"}.get(word, word + "s"))]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend[: len(kinds)] == kinds and all(text.endswith(" GB/s") for text in legend[len(kinds) :])


def test_kinds_differ_in_shape_and_links_in_width() -> None:
    ax = multi_node(pcie_tree(2), 2, bandwidth=4e9).draw()
    from matplotlib.patches import FancyBboxPatch, PathPatch, RegularPolygon

    nodes = [patch for patch in ax.patches if patch.get_zorder() == 3]
    assert Counter(type(patch) for patch in nodes) == {FancyBboxPatch: 4 + 3, RegularPolygon: 2}
    corners = {patch.get_boxstyle().rounding_size / patch.get_height() for patch in nodes if isinstance(patch, FancyBboxPatch)}
    assert {round(corner, 1) for corner in corners} == {0.1, 0.5}  # squares, and bars with round ends
    widths = Counter(round(patch.get_linewidth(), 3) for patch in ax.patches if isinstance(patch, PathPatch))
    (thin, ports), (thick, cables) = sorted(widths.items())
    assert (ports, cables) == (6, 6) and thick == pytest.approx(2 * thin, rel=1e-2)  # four times the bandwidth


def test_doubled_nvlinks_are_drawn_double() -> None:
    from matplotlib.patches import PathPatch

    machine = dgx1()
    ax = machine.draw(hide=machine.hosts + machine.switches)
    assert sum(isinstance(patch, PathPatch) for patch in ax.patches) == 8 * 2 + 8
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["device", "25 GB/s"]


def test_links_are_colored_by_what_they_carried() -> None:
    from matplotlib.patches import Polygon

    _, ax = plt.subplots()
    assert star(3, 1e9).draw(ax, links={("gpu0", "switch"): 3.0, ("switch", "gpu1"): 0.0}, label="bytes", legend=False) is ax
    heads = [patch for patch in ax.patches if type(patch) is Polygon]
    assert len(heads) == 1  # nothing went over the others
    assert ax.figure.axes[1].get_ylabel() == "bytes" and ax.get_legend() is None
