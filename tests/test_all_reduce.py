"""All-reduce by every algorithm: the result, the messages that it took, and the time, against numpy and closed forms.

Most of it runs in the simulator, where sixteen ranks cost little; real processes must give the same bits.
"""

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Call, complaints, perform, rooms_for
from torch.distributed import ReduceOp

import d2lps
from d2lps import cost
from d2lps.collectives.all_reduce import all_reduce
from d2lps.collectives.all_reduce.double_tree import family, orders
from d2lps.collectives.all_reduce.placement import by_machine, pick
from d2lps.simulator import simulate
from d2lps.topology import Topology, dgx1, dgx1_rings, fat_tree, hgx_h100, multi_node, ring, star
from d2lps.trace.origins import Origins

ALGORITHMS = ["flat", "tree", "ring", "double_tree", "two_rings", "blockwise", "halving_doubling", "hierarchical", "auto"]
RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
SIZES = [0, 1, 2, 7, 64, 1001]
FLOAT_OPS, INTEGER_OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"], ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def cluster(ranks: int) -> Topology:
    return star(ranks, bandwidth=1e9, latency=1e-6)


def calls(algorithm: str) -> list[Call]:
    """Every op and every size, of several dtypes and layouts."""
    kinds = [(torch.float32, op) for op in FLOAT_OPS] + [(torch.int64, op) for op in INTEGER_OPS] + [(torch.bfloat16, "AVG")]
    wanted = [Call("all_reduce", algorithm, op, dtype, n=SIZES[k % 6], layout=k) for k, (dtype, op) in enumerate(kinds)]
    return wanted + [Call("all_reduce", algorithm, n=n) for n in SIZES]


# ---- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gives_what_numpy_gives(algorithm: str, ranks: int) -> None:
    wanted = calls(algorithm)
    outcomes = simulate(perform, cluster(ranks), wanted, rooms_for(wanted, ranks), trace=False)
    assert not complaints(wanted, outcomes)


OPTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("double_tree", 5, {"chunks": 1}),
    ("double_tree", 6, {"chunks": 1000}),  # more than there are elements
    ("two_rings", 4, {"rings": [[0, 2, 1, 3]]}),
    ("two_rings", 4, {"rings": ((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3)), "shares": (1, 0, 2.5)}),
    ("two_rings", 8, {"rings": dgx1_rings(), "shares": (2, 1)}),
    ("hierarchical", 6, {"groups": [0, 5, 1, 4, 2, 3]}),
    ("hierarchical", 6, {"groups": [[0, 1, 2], [3, 4, 5]]}),
    ("hierarchical", 6, {"groups": ((0, 3), (1, 4), (2, 5))}),
    ("hierarchical", 6, {"groups": [[0], [1], [2], [3], [4], [5]]}),
    ("hierarchical", 6, {"groups": [[0, 1, 2, 3], [5, 4]]}),
    ("hierarchical", 7, {"groups": [[0, 1, 2], [3, 4], [5, 6]]}),
    ("hierarchical", 8, {"groups": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}),
    ("hierarchical", 9, {"groups": [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8]]]}),
    ("hierarchical", 8, {"groups": [[[[0], [1]], [[2], [3]]], [[[4], [5]], [[6, 7]]]]}),
]


def mine(comm: d2lps.Communicator, n: int) -> torch.Tensor:
    """Small whole numbers, so that every order of adding gives the same."""
    return torch.arange(n, dtype=torch.float32) % 13 + 100 * comm.rank


def total(ranks: int, n: int) -> list[float]:
    return (ranks * (np.arange(n) % 13) + 100 * (ranks - 1) * ranks / 2).tolist()


def reduced(comm: d2lps.Communicator, n: int, algorithm: str, options: dict[str, Any], op: ReduceOp) -> list[float]:
    all_reduce(comm, tensor := mine(comm, n), op, algorithm, **options)
    return tensor.tolist()


@pytest.mark.parametrize("n", [0, 1, 5, 48, 1001])
@pytest.mark.parametrize(("algorithm", "ranks", "options"), OPTIONS, ids=str)
def test_options_change_the_way_not_the_result(algorithm: str, ranks: int, options: dict[str, Any], n: int) -> None:
    run = simulate(reduced, cluster(ranks), n, algorithm, options, ReduceOp.SUM, trace=False)
    assert run == [total(ranks, n)] * ranks
    run = simulate(reduced, cluster(ranks), n, algorithm, options, ReduceOp.AVG, trace=False)
    assert run == [(torch.tensor(total(ranks, n)) / ranks).tolist()] * ranks  # divided once, and once only


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_size_any_ranks_any_groups(data: st.DataObject) -> None:
    ranks, n = data.draw(st.integers(1, 11)), data.draw(st.integers(0, 70))
    algorithm = data.draw(st.sampled_from(ALGORITHMS))
    options: dict[str, Any] = {}
    order = data.draw(st.permutations(range(ranks)))
    if algorithm == "double_tree":
        options["chunks"] = data.draw(st.integers(1, 9))
    elif algorithm == "two_rings":
        options = {"rings": [order, order[::-1]], "shares": [data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))]}
    elif algorithm == "hierarchical":
        cuts = sorted({0, ranks, *data.draw(st.lists(st.integers(0, ranks), max_size=4))})
        options["groups"] = [order[begin:end] for begin, end in pairwise(cuts)]
    run = simulate(reduced, cluster(ranks), n, algorithm, options, ReduceOp.SUM, trace=False)
    assert run == [total(ranks, n)] * ranks


@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_part_collects_every_contribution_once(algorithm: str, ranks: int) -> None:
    def work(comm: d2lps.Communicator) -> None:
        all_reduce(comm, tensor := torch.zeros(24, device=comm.device), algorithm=algorithm)
        del tensor

    trace = simulate(work, cluster(ranks), device="meta").trace  # without any numbers
    origins = Origins(trace)
    tensors = [index for index, buffer in enumerate(trace.buffers) if not buffer.scratch]
    assert [trace.buffers[index].rank for index in tensors] == list(range(ranks))
    for buffer in tensors:
        pieces = origins.held(buffer)
        assert sum(piece.length for piece in pieces) == 96
        for piece in pieces:
            assert piece.sources == {(other, piece.offset): 1 for other in tensors}


# ---- steps and bytes: those of most algorithms are in test_costs.py ---------------------------------------------------


def traced(topology: Topology, n: int, algorithm: str, **options: Any) -> d2lps.Run:
    def work(comm: d2lps.Communicator) -> None:
        all_reduce(comm, torch.empty(n, device=comm.device), algorithm=algorithm, **options)

    return simulate(work, topology, device="meta")


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("chunks", [1, 2, 10])
def test_steps_of_the_double_tree_stay_below_their_bound(ranks: int, chunks: int) -> None:
    trace = traced(cluster(ranks), 480, "double_tree", chunks=chunks).trace
    assert trace.rounds <= 2 * (chunks + int(np.log2(ranks)) - 1)
    assert (trace.bytes_sent() <= 2 * 1920).all() and (trace.bytes_received() <= 2 * 1920).all()
    assert trace.bytes_sent().sum() == 2 * (ranks - 1) * 1920  # as one tree


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_within_one_machine_the_hierarchical_is_a_ring(ranks: int) -> None:
    trace = traced(cluster(ranks), 960, "hierarchical").trace
    assert trace.rounds == 2 * (ranks - 1)
    assert (trace.bytes_sent() == 2 * (ranks - 1) * 3840 // ranks).all() and (trace.bytes_received() == trace.bytes_sent()).all()


def test_uneven_chunks_of_the_ring_by_hand() -> None:
    # 7 elements on 3 ranks: chunks of 3, 2 and 2. Each rank sends every chunk twice but the two that end and start with it.
    trace = traced(cluster(3), 7, "ring").trace
    assert trace.bytes_sent().tolist() == [4 * 10, 4 * 9, 4 * 9]


def test_the_first_step_of_each_algorithm_among_four() -> None:
    first = {}
    for algorithm in ("ring", "two_rings", "blockwise", "halving_doubling"):
        trace = traced(cluster(4), 8, algorithm).trace
        step = trace.messages["step"] == trace.messages["step"][np.argmin(trace.messages["start"])]
        columns = (trace.messages[name][step].tolist() for name in ("src", "dst", "nbytes"))
        first[algorithm] = sorted(zip(*columns, strict=True))
    assert first == {
        "ring": [(0, 1, 8), (1, 2, 8), (2, 3, 8), (3, 0, 8)],
        "two_rings": [(a, (a + way) % 4, 4) for a in range(4) for way in sorted((1, -1), key=lambda w: (a + w) % 4)],
        "blockwise": [(a, b, 8) for a in range(4) for b in range(4) if a != b],
        "halving_doubling": [(0, 1, 16), (1, 0, 16), (2, 3, 16), (3, 2, 16)],
    }


def test_hierarchical_sends_little_across_machines() -> None:
    run = traced(multi_node(hgx_h100(4), 3), 480, "hierarchical")
    across = {pair: n for pair, n in run.trace.bytes_by_link().items() if pair[0] // 4 != pair[1] // 4}
    assert len(across) == 12 and set(across.values()) == {2 * 2 / 3 * 1920 / 4}  # 12 ranks, 2(k - 1)/k n/g each
    assert run.trace.rounds == 2 * 3 + 2 * 2


def test_labels_name_the_steps() -> None:
    def labels(algorithm: str, **options: Any) -> list[str]:
        return [step for step in traced(cluster(3), 12, algorithm, **options).trace.steps if step]

    assert labels("ring") == ["reduce-scatter 1/2", "reduce-scatter 2/2", "all-gather 1/2", "all-gather 2/2"]
    assert labels("two_rings") == labels("ring") == labels("hierarchical")
    assert labels("blockwise") == ["reduce-scatter", "all-gather"]
    assert sorted(labels("halving_doubling")) == ["doubling, distance 1", "fold in", "fold out", "halving, distance 1"]
    assert labels("double_tree", chunks=2) == ["up 1", "up 2", "down 1", "down 2"]


# ---- the trees of double_tree -----------------------------------------------------------------------------------------


def test_no_rank_has_children_in_both_trees_and_no_tree_is_higher_than_its_logarithm() -> None:
    for ranks in [*range(2, 130), 1000, 1024]:
        seats = [family(position, ranks) for position in range(ranks)]
        parents = [{order[k] for k in range(ranks) if seats[k][2]} for order in orders(ranks)]
        assert not parents[0] & parents[1], ranks
        assert max(depth for depth, _, _ in seats) == int(np.log2(ranks)), ranks
        for position, (depth, parent, children) in enumerate(seats):  # both ends of each edge say the same
            assert len(children) <= 2 and (parent is None) == (depth == 0)
            assert all(seats[child][:2] == (depth + 1, position) for child in children)
        assert sum(parent is None for _, parent, _ in seats) == 1


# ---- time -------------------------------------------------------------------------------------------------------------

MB160 = 40_000_000  # float32 elements


@pytest.mark.parametrize(("link", "milliseconds"), [(18e9, 5.185185), (25e9, 3.733333)])
def test_the_two_rings_of_the_dgx1(link: float, milliseconds: float) -> None:
    machine = dgx1(bandwidth=link, latency=0)
    run = traced(machine, MB160, "two_rings", rings=dgx1_rings(), shares=(2, 1))
    assert run.time == pytest.approx(2 * 7 / 8 * 160e6 / (3 * link), rel=1e-6)
    assert run.time * 1e3 == pytest.approx(milliseconds, rel=1e-6)
    # Half of each share the other way round too: six links of every device are busy, twice as fast.
    rings = [order[::way] for order in dgx1_rings() for way in (1, -1)]
    both = traced(machine, MB160, "two_rings", rings=rings, shares=(2, 2, 1, 1))
    assert both.time == pytest.approx(run.time / 2, rel=1e-6)


def test_two_rings_take_half_the_time_where_there_is_a_cable_each_way() -> None:
    circle = ring(8, 1e9, latency=1e-6)
    one, two = traced(circle, 80_000, "ring").time, traced(circle, 80_000, "two_rings").time
    assert one == pytest.approx(cost.ring(320_000, 8, 1e-6, 1e-9), rel=1e-9)
    assert two == pytest.approx(cost.two_rings(320_000, 8, 1e-6, 1e-9), rel=1e-9)


@pytest.mark.parametrize("ports", ["device", "node"])
def test_hierarchical_on_machines_of_two_speeds(ports: str) -> None:
    machines = multi_node(hgx_h100(4, bandwidth=400e9, latency=4e-6), 3, bandwidth=50e9, latency=5e-6, ports=ports)
    by_default = traced(machines, 480_000, "hierarchical")
    formula = cost.hierarchical(1_920_000, 12, 10e-6, 1 / 50e9, inner=[(4, 4e-6, 1 / 400e9)], ports=ports)
    assert by_default.time == pytest.approx(formula, rel=1e-9)
    groups = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert traced(machines, 480_000, "hierarchical", groups=groups).time == by_default.time
    assert by_default.time < traced(machines, 480_000, "ring").time


@pytest.mark.parametrize("ports", ["device", "node"])
def test_halving_and_doubling_is_hierarchical_of_itself(ports: str) -> None:
    machines = multi_node(hgx_h100(4, bandwidth=400e9, latency=4e-6), 4, bandwidth=50e9, latency=5e-6, ports=ports)
    simulated = traced(machines, 480_000, "halving_doubling").time
    inner = [(4, 4e-6, 1 / 400e9)]
    formula = cost.hierarchical(1_920_000, 16, 10e-6, 1 / 50e9, inner=inner, ports=ports, by="halving_doubling")
    assert simulated == pytest.approx(formula, rel=1e-9)
    priced = {name: seconds for name, seconds, _ in cost.choose(1_920_000, 16, 10e-6, 1 / 50e9, inner=inner, ports=ports).table}
    assert priced["halving_doubling"] == formula


# ---- where ranks live, and the choice ---------------------------------------------------------------------------------


def test_ranks_of_a_machine_are_found_by_the_names_of_their_nodes() -> None:
    machines = multi_node(hgx_h100(2), 3)
    assert simulate(by_machine, machines)[3] == [[0, 1], [2, 3], [4, 5]]
    scattered = [machines.devices[k] for k in (0, 2, 4, 1, 3)]
    assert simulate(by_machine, machines, ranks=scattered)[0] == [[0, 3], [1, 4], [2]]
    assert simulate(by_machine, star(3, 1e9))[0] == [[0, 1, 2]]
    assert d2lps.run(by_machine, 3)[2] == [[0, 1, 2]]


def test_real_ranks_find_their_machines_by_asking_once() -> None:
    def work(comm: d2lps.Communicator) -> list[list[int]]:
        comm.node = f"host{comm.rank % 2}"
        all_reduce(comm, torch.ones(6), algorithm="hierarchical")
        all_reduce(comm, torch.ones(6), algorithm="hierarchical")
        return by_machine(comm)

    run = d2lps.run(work, 5, trace=True)
    assert run == [[[0, 2, 4], [1, 3]]] * 5
    assert (run.trace.messages["nbytes"] % 8 == 0).sum() >= 15


def picked(comm: d2lps.Communicator, n: int) -> tuple[str, str]:
    choice = pick(comm, 4 * n)
    all_reduce(comm, torch.ones(min(n, 1000), device=comm.device), algorithm="auto")
    return choice.algorithm, str(choice)


@pytest.mark.parametrize("topology", [star(6, 1e9, 1e-5), star(8, 1e9, 1e-5), fat_tree(4), multi_node(hgx_h100(4), 2)], ids=repr)
def test_auto_is_the_same_on_all_ranks_and_goes_from_steps_to_bytes(topology: Topology) -> None:
    few, many = (simulate(picked, topology, n, device="meta", trace=False) for n in (2, 10_000_000))
    assert len(set(few)) == len(set(many)) == 1
    assert few[0][0] in ("tree", "double_tree", "halving_doubling", "hierarchical")
    assert many[0][0] in ("ring", "blockwise", "halving_doubling", "hierarchical")
    if len(topology.devices) == 6:
        assert many[0][0] in ("ring", "blockwise")


@pytest.mark.parametrize("n", [1, 1000, 100_000, 10_000_000])
@pytest.mark.parametrize(
    "topology",
    [star(5, 1e9, 1e-5), star(8, 1e9, 1e-5), multi_node(hgx_h100(4), 2), multi_node(hgx_h100(4), 2, ports="node")],
    ids=repr,
)
def test_auto_is_never_slower_than_the_slowest_and_near_the_fastest(topology: Topology, n: int) -> None:
    times = {algorithm: traced(topology, n, algorithm).time for algorithm in ALGORITHMS}
    auto = times.pop("auto")
    best = min(time for algorithm, time in times.items() if algorithm != "blockwise")  # whose latencies the simulator gives away
    assert auto <= max(times.values()) and auto <= 1.25 * best, times


def test_auto_counts_on_one_port_a_machine_where_there_is_one() -> None:
    shared, own = (multi_node(hgx_h100(4), 4, ports=ports) for ports in ("node", "device"))

    def table(comm: d2lps.Communicator) -> list[str]:
        return [row[0] for row in pick(comm, 10**9).table]

    assert set(simulate(table, shared)[0]) == {"ring", "hierarchical", "halving_doubling"}
    assert set(simulate(table, shared, ranks=12)[0]) == {"ring", "hierarchical"}
    assert set(simulate(table, shared, ranks=shared.devices[::-1])[0]) == {"ring", "hierarchical", "halving_doubling"}
    assert set(simulate(table, shared, ranks=shared.devices[::2] + shared.devices[1::2])[0]) == {"ring", "hierarchical"}
    assert {"hierarchical", "halving_doubling", "tree"} <= set(simulate(table, own)[0])
    assert "halving_doubling" not in simulate(table, own, ranks=own.devices[::2] + own.devices[1::2])[0]  # scattered


def test_auto_takes_what_the_caller_knows_of_the_links() -> None:
    def work(comm: d2lps.Communicator, **links: float) -> str:
        all_reduce(comm, torch.ones(6), algorithm="auto", **links)
        return pick(comm, 24, **links).algorithm

    def free(comm: d2lps.Communicator) -> str:
        return work(comm, alpha=1e-6, beta=1e-9, overhead=0.0)

    def crowded(comm: d2lps.Communicator) -> str:
        return work(comm, alpha=1e-6, beta=1e-9)

    assert set(d2lps.run(free, 6)) == {"blockwise"}
    assert set(d2lps.run(crowded, 6)) == {"double_tree"}


# ---- wrong options ----------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("ring", {"groups": [[0, 1]]}, "'ring' has no option 'groups' (it has none); algorithm='hierarchical' has it"),
    ("two_rings", {"share": 1}, "'two_rings' has no option 'share' (it has rings, shares); no algorithm has it"),
    ("two_rings", {"rings": [[0, 1, 1]]}, "a ring must pass each of the ranks 0 to 2 once, not [0, 1, 1]"),
    ("two_rings", {"rings": [range(3)], "shares": (1, 2)}, "shares=(1, 2): 1 rings need as many numbers from 0 up"),
    ("two_rings", {"shares": (0, 0)}, "shares=(0, 0): 2 rings need as many numbers from 0 up, not all of them 0"),
    ("two_rings", {"shares": (3, -1)}, "shares=(3, -1): 2 rings"),
    ("two_rings", {"rings": []}, "shares=[]: 0 rings"),
    ("double_tree", {"chunks": 0}, "chunks=0 is not a whole number from 1 up"),
    ("double_tree", {"chunks": 2.5}, "chunks=2.5 is not a whole number from 1 up"),
    ("hierarchical", {"groups": [[0, 1]]}, "groups=[[0, 1]] must be lists that hold each of the ranks 0 to 2 once"),
    ("hierarchical", {"groups": [[0, 1], [1, 2]]}, "must be lists that hold each of the ranks 0 to 2 once"),
    ("hierarchical", {"groups": [[0, 1], 2]}, "groups=[[0, 1], 2]: [[0, 1], 2] is empty, or its members are not equally deep"),
    ("hierarchical", {"groups": [[0, 1, 2], []]}, "groups=[[0, 1, 2], []]: [] is empty"),
    ("hierarchical", {"groups": 3}, "groups=3 must be lists that hold each"),
    ("auto", {"alpha": -1.0}, "alpha=-1.0 is not a number from 0 up"),
    ("native", {}, "algorithm='native' is the all-reduce of gloo or NCCL"),
]


@pytest.mark.parametrize(("algorithm", "options", "message"), MISTAKES, ids=str)
def test_a_wrong_option_is_named_before_anything_is_sent(algorithm: str, options: dict[str, Any], message: str) -> None:
    def work(comm: d2lps.Communicator) -> str:
        try:
            all_reduce(comm, torch.ones(4), algorithm=algorithm, **options)
        except (TypeError, ValueError) as error:
            return str(error)
        return "not refused"

    run = simulate(work, cluster(3))
    assert all(message in answer for answer in run), run[0]
    assert len(run.trace) == 0 and run.trace.unmatched == 0


def test_the_docstring_names_every_algorithm() -> None:
    text = inspect.getdoc(all_reduce) or ""
    assert all(f'"{algorithm}"' in text for algorithm in [*ALGORITHMS, "native"])
