"""Max-min fair sharing: the simulator against a solver in exact fractions that knows nothing of it.

The solver is the definition, slowly: raise all rates together, and whoever meets a full link stays as it is. It solves
everything anew at every event; the simulator only what an event touches.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps import Communicator
from d2lps.simulator import simulate
from d2lps.simulator.network import Flow, Network
from d2lps.topology import Topology, dgx1, fat_tree, multi_node, pcie_tree, ring, spine_leaf, star
from d2lps.topology.graph import connect


@dataclass(frozen=True)
class Transfer:
    """So many bytes over these links, from some time on."""

    start: Fraction
    route: tuple[int, ...]
    nbytes: int
    latency: Fraction = Fraction(0)


# ---- the definition -----------------------------------------------------------------------------------------------------


def fair_rates(routes: dict[int, tuple[int, ...]], bandwidth: Sequence[Fraction]) -> dict[int, Fraction]:
    """Water rises in all flows at once; a flow stops when one of its links is full."""
    level, rates, rising = Fraction(0), {}, set(routes)
    while rising:
        room = {}
        for link in {link for flow in rising for link in routes[flow]}:
            fixed = sum(rates[flow] for flow in rates if link in routes[flow])
            room[link] = (bandwidth[link] - fixed) / sum(link in routes[flow] for flow in rising)
        level = min(room.values())
        stopped = {flow for flow in rising if any(room[link] == level for link in routes[flow])}
        rates |= dict.fromkeys(stopped, level)
        rising -= stopped
    return rates


def arrivals(transfers: Sequence[Transfer], bandwidth: Sequence[Fraction]) -> list[Fraction]:
    """When each transfer ends, event by event."""
    now = Fraction(0)
    left = {i: Fraction(transfer.nbytes) for i, transfer in enumerate(transfers)}
    begin = {i: transfer.start + transfer.latency for i, transfer in enumerate(transfers)}
    ends: dict[int, Fraction] = {}
    while left:
        flowing = [i for i in left if begin[i] <= now]
        rates = fair_rates({i: transfers[i].route for i in flowing}, bandwidth)
        events = [begin[i] for i in left if begin[i] > now] + [now + left[i] / rates[i] for i in flowing]
        later = min(events)
        for i in flowing:
            left[i] -= rates[i] * (later - now)
            if not left[i]:
                del left[i]
                ends[i] = later
        now = later
    return [ends[i] for i in range(len(transfers))]


# ---- the simulator, by its own network and by `simulate` --------------------------------------------------------------


class Sent(Flow):
    def __init__(self, then: Callable[[], None]) -> None:
        self.arrived = then  # type: ignore[method-assign]


def on_network(transfers: Sequence[Transfer], bandwidth: Sequence[Fraction]) -> list[float]:
    """The same transfers as flows of a Network."""
    network = Network([float(b) for b in bandwidth])
    ends = [-1.0] * len(transfers)

    def send(i: int, transfer: Transfer) -> None:
        def arrived() -> None:
            ends[i] = network.now

        peak = float(min(bandwidth[link] for link in transfer.route))
        network.send(Sent(arrived), transfer.route, float(transfer.latency), transfer.nbytes, peak)

    for i, transfer in enumerate(transfers):
        network.call_at(float(transfer.start), lambda i=i, transfer=transfer: send(i, transfer))
    while network.advance():
        pass
    return ends


def by_simulate(topology: Topology, messages: list[tuple[Fraction, int, int, int]]) -> list[float]:
    """(start, src, dst, bytes), each by a pair of ranks of its own, that live on the source and on the destination."""

    def work(comm: Communicator) -> float:
        start, _, _, nbytes = messages[comm.rank // 2]
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=comm.device)
        comm.sleep(float(start))
        comm.isend(tensor, comm.rank + 1).wait() if comm.rank % 2 == 0 else comm.recv(tensor, comm.rank - 1)
        return comm.now()

    nodes = [topology.devices[end] for _, src, dst, _ in messages for end in (src, dst)]
    run = simulate(work, topology, ranks=nodes, device="meta", trace=False)
    assert run[::2] == run[1::2]  # rendezvous: both ends are done at the same time
    return run[::2]


def close(got: Sequence[float], wanted: Sequence[Fraction]) -> None:
    assert got == pytest.approx([float(time) for time in wanted], rel=1e-6)


# ---- by hand: the solver is right ---------------------------------------------------------------------------------------


def test_the_definition_on_the_textbooks_line_of_links() -> None:
    # One flow over both links, one more on the first, two more on the second: thirds there, and the rest here.
    rates = fair_rates({0: (0, 1), 1: (0,), 2: (1,), 3: (1,)}, [Fraction(1), Fraction(1)])
    third = Fraction(1, 3)
    assert rates == {0: third, 1: 1 - third, 2: third, 3: third}


def test_the_definition_over_time() -> None:
    # Two flows share a link until the shorter is done; a third comes when the longer has the link to itself.
    transfers = [Transfer(Fraction(0), (0,), 100), Transfer(Fraction(0), (0,), 200), Transfer(Fraction(25), (0,), 30)]
    assert arrivals(transfers, [Fraction(10)]) == on_network(transfers, [Fraction(10)]) == [20, 33, 31]


# ---- any flows on any links -------------------------------------------------------------------------------------------

LINKS = 7
fractions = st.integers(1, 40).map(lambda n: Fraction(n, 8))  # exact in binary: simultaneous events stay so
flows = st.builds(
    Transfer,
    start=st.integers(0, 24).map(lambda n: Fraction(n, 4)),
    route=st.lists(st.integers(0, LINKS - 1), min_size=1, max_size=4, unique=True).map(tuple),
    nbytes=st.integers(1, 60),
    latency=st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(1)]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(flows, min_size=1, max_size=12), st.lists(fractions, min_size=LINKS, max_size=LINKS))
def test_any_flows_arrive_when_exact_fractions_say(transfers: list[Transfer], bandwidth: list[Fraction]) -> None:
    close(on_network(transfers, bandwidth), arrivals(transfers, bandwidth))


@pytest.mark.parametrize("seed", range(6))
def test_many_flows_of_awkward_numbers(seed: int) -> None:
    chance = random.Random(seed)
    bandwidth = [Fraction(chance.randrange(10**6, 10**9)) for _ in range(12)]
    transfers = []
    for _ in range(30):
        route = tuple(chance.sample(range(12), chance.randint(1, 5)))
        transfers.append(Transfer(Fraction(chance.randrange(10**6), 10**6), route, chance.randrange(1, 10**8)))
    close(on_network(transfers, bandwidth), arrivals(transfers, bandwidth))


def random_topology(chance: random.Random) -> Topology:
    """A connected graph of switches, with devices here and there."""
    graph = nx.DiGraph()
    for index in range(5):
        graph.add_node(f"s{index}", kind="switch")
        if index:
            connect(graph, f"s{index}", f"s{chance.randrange(index)}", chance.randrange(1, 9) * 1e6, 1e-3)
    connect(graph, "s0", "s4", 5e6, 2e-3)
    for index in range(7):
        graph.add_node(f"d{index}", kind="device")
        connect(graph, f"d{index}", f"s{chance.randrange(5)}", chance.randrange(1, 9) * 1e6, 1e-3)
    return Topology(graph, "by chance")


CLUSTERS = [star(6, 3e6, 1e-3), ring(7, 2e6), pcie_tree(4, 4e6), dgx1(2e6), fat_tree(4, 1e6), spine_leaf(3, 3, 2, 1e6, 3)]
CLUSTERS += [multi_node(pcie_tree(3, 5e6), 3, 2e6, ports="node"), *map(random_topology, map(random.Random, range(4)))]


@pytest.mark.parametrize("topology", CLUSTERS, ids=lambda topology: topology.name)
def test_messages_of_a_simulation_arrive_when_exact_fractions_say(topology: Topology) -> None:
    chance = random.Random(topology.name)
    messages = []
    for _ in range(25):
        src, dst = chance.sample(range(len(topology.devices)), 2)
        messages.append((Fraction(chance.randrange(20), 4), src, dst, chance.randrange(1, 10**7)))
    wanted = []
    for start, src, dst, nbytes in messages:
        route = topology.route(topology.devices[src], topology.devices[dst])
        wanted.append(Transfer(start, route.links, nbytes, Fraction(route.latency)))
    exact = arrivals(wanted, [Fraction(bandwidth) for bandwidth in topology.bandwidth])
    close(by_simulate(topology, messages), exact)
