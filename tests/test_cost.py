"""The closed forms of `d2lps.cost`, each against a simulation of the algorithm on a star, and against published figures."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from d2lps import Communicator, aggregate, collectives, cost
from d2lps.cost.choice import CANDIDATES
from d2lps.simulator import Model, simulate
from d2lps.topology import pcie_tree, star

HOP, BANDWIDTH = 5e-6, 1e9
ALPHA, BETA = 2 * HOP, 1 / BANDWIDTH  # of a path from leaf to leaf
N = 4 * 9 * 5 * 7 * 16  # elements: divides evenly for every number of ranks below
GAMMA = 0.3e-9
RANKS = [1, 2, 3, 4, 5, 7, 8, 12, 16]
EXACT = 1e-9  # relative: nothing but rounding


def time_of(work: Callable[[Communicator], Any], ranks: int, gamma: float = 0.0) -> float:
    return simulate(work, star(ranks, BANDWIDTH, HOP), device="meta", model=Model(per_combined_byte=gamma), trace=False).time


def empty(comm: Communicator, parts: int = 1) -> torch.Tensor:
    return torch.empty(N // parts, device=comm.device)


# ---- all-reduce -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("gamma", [0.0, GAMMA])
@pytest.mark.parametrize("algorithm", ["flat", "tree", "ring", "blockwise", "halving_doubling", "hierarchical"])
def test_an_all_reduce_takes_what_its_formula_says(algorithm: str, gamma: float, ranks: int) -> None:
    simulated = time_of(lambda comm: collectives.all_reduce(comm, empty(comm), algorithm=algorithm), ranks, gamma)
    assert simulated == pytest.approx(cost.all_reduce(algorithm, 4 * N, ranks, ALPHA, BETA, gamma=gamma), rel=EXACT)


@pytest.mark.parametrize("ranks", RANKS)
def test_two_rings_share_the_one_port_of_a_star(ranks: int) -> None:
    simulated = time_of(lambda comm: collectives.all_reduce(comm, empty(comm), algorithm="two_rings"), ranks)
    assert simulated == pytest.approx(cost.two_rings(4 * N, ranks, ALPHA, 2 * BETA), rel=EXACT)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("gamma", [0.0, GAMMA])
@pytest.mark.parametrize("chunks", [None, 1, 2, 8, 60])
def test_the_double_tree_keeps_its_bound_and_comes_near_it(chunks: int | None, gamma: float, ranks: int) -> None:
    def work(comm: Communicator) -> None:
        collectives.all_reduce(comm, empty(comm), algorithm="double_tree", **({"chunks": chunks} if chunks else {}))

    simulated, bound = time_of(work, ranks, gamma), cost.double_tree(4 * N, ranks, ALPHA, BETA, gamma=gamma, chunks=chunks)
    uneven = 1 + 1e-9 if chunks else 1.01  # the best number of chunks need not divide the data
    assert simulated <= bound * uneven
    assert simulated >= bound / 2  # with one chunk a rank's two trees are at work at different times


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 100])
def test_the_double_tree_keeps_the_bound_of_sanders_and_others(ranks: int) -> None:
    for nbytes in (1e3, 1e6, 1e9):
        log = math.ceil(math.log2(ranks))
        bound = 4 * log * ALPHA + 2 * nbytes * BETA + 4 * math.sqrt(log * nbytes * ALPHA * BETA)
        assert cost.double_tree(nbytes, ranks, ALPHA, BETA) <= bound
        best = cost.best_chunks(nbytes, ranks, ALPHA, BETA)
        for other in {max(1, best - 1), best + 1}:
            near = cost.double_tree(nbytes, ranks, ALPHA, BETA, chunks=other)
            assert cost.double_tree(nbytes, ranks, ALPHA, BETA) <= near * (1 + 1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 5, 7, 8, 16])
def test_recursive_doubling(ranks: int) -> None:
    def work(comm: Communicator) -> None:
        mine, theirs = empty(comm), empty(comm)
        core = 2 ** int(math.log2(comm.size))
        if comm.rank >= core:
            comm.send(mine, comm.rank - core)
            comm.recv(mine, comm.rank - core)
            return
        if comm.rank + core < comm.size:
            comm.recv(theirs, comm.rank + core)
            comm.combine(mine, theirs)
        distance = 1
        while distance < core:
            comm.sendrecv(mine, comm.rank ^ distance, theirs, comm.rank ^ distance)
            comm.combine(mine, theirs)
            distance *= 2
        if comm.rank + core < comm.size:
            comm.send(mine, comm.rank + core)

    simulated = time_of(work, ranks, GAMMA)
    assert simulated == pytest.approx(cost.recursive_doubling(4 * N, ranks, ALPHA, BETA, gamma=GAMMA), rel=EXACT)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_in_switch_reduction_is_a_rank_on_the_switch_that_works_in_p_chunks(ranks: int) -> None:
    """It takes chunk c in while it gives chunk c - 1 out: p + 1 turns of n/p bytes."""

    def work(comm: Communicator) -> None:
        chunks, switch = empty(comm).chunk(comm.size - 1), comm.size - 1
        rooms = [torch.empty_like(chunks[0]) for _ in range(switch)]
        for turn in range(len(chunks) + 1):
            fresh, done = chunks[turn : turn + 1], chunks[turn - 1 : turn] if turn else ()
            if comm.rank < switch:
                comm.exchange([(chunk, switch) for chunk in fresh], [(chunk, switch) for chunk in done])
                continue
            sends = [(chunk, rank) for chunk in done for rank in range(switch)]
            comm.exchange(sends, [(room, rank) for _ in fresh for rank, room in enumerate(rooms)])

    cluster = star(ranks, BANDWIDTH, 0)
    simulated = simulate(work, cluster, ranks=cluster.devices + cluster.switches, device="meta", trace=False).time
    assert simulated == pytest.approx(cost.in_switch(4 * N, ranks, 0, BETA), rel=EXACT)


def test_in_switch_reduction_fits_what_was_measured() -> None:
    # NVIDIA/nccl issue 1455: bus bandwidth on 5, 6, 7 and 8 H100 with NVLS; one fitted B for all of them.
    for ranks, measured in ((5, 420e9), (6, 440e9), (7, 460e9), (8, 480e9)):
        seconds = cost.in_switch(1e9, ranks, 0, 1 / 308e9)
        assert cost.busbw("all_reduce", 1e9, seconds, ranks) == pytest.approx(measured, rel=0.025)


def test_three_levels() -> None:
    inner = [(4, 1e-6, 1e-11), (2, 2e-6, 1e-10)]
    by_hand = (6e-6 + 2 * 3 / 4 * 8e6 * 1e-11) + (4e-6 + 2e6 * 1e-10) + (4 * 3e-6 + 2 * 2 / 3 * 1e6 * 1e-9)
    assert cost.hierarchical(8e6, 24, 3e-6, 1e-9, inner=inner) == pytest.approx(by_hand, rel=EXACT)
    assert cost.hierarchical(8e6, 24, 3e-6, 1e-9) == cost.ring(8e6, 24, 3e-6, 1e-9)
    shared = cost.hierarchical(8e6, 8, 0, 1e-9, inner=[(4, 0, 0)], ports="node")
    assert shared == pytest.approx(4 * cost.hierarchical(8e6, 8, 0, 1e-9, inner=[(4, 0, 0)]), rel=EXACT)
    with pytest.raises(ValueError, match="9 ranks cannot be divided"):
        cost.hierarchical(1, 9, 0, 0, inner=[(4, 0, 0)])
    with pytest.raises(ValueError, match="ports='rank' is unknown: choose one of 'device', 'node'"):
        cost.hierarchical(1, 8, 0, 0, inner=[(4, 0, 0)], ports="rank")


@pytest.mark.parametrize(("ranks", "seconds"), [(8, 0.224028), (16, 0.240060)])
def test_the_ring_of_simgrid(ranks: int, seconds: float) -> None:
    # SimGrid 3.32, plain max-min sharing: 160 MB in equal chunks, 10 Gb/s and 1 us a link.
    assert cost.ring(160e6, ranks, 2e-6, 1 / 1.25e9) == pytest.approx(seconds, abs=1e-9)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(["flat", "tree", "ring", "halving_doubling", "blockwise"]), st.integers(2, 9), st.integers(1, 400))
def test_uneven_sizes_cost_no_more_than_a_chunk_too_long(algorithm: str, ranks: int, n: int) -> None:
    def work(comm: Communicator) -> None:
        collectives.all_reduce(comm, torch.empty(n, device=comm.device), algorithm=algorithm)

    up = 2 ** math.ceil(math.log2(ranks))
    whole = math.ceil(n / ranks) * ranks if algorithm in ("ring", "blockwise") else n + up  # every half rounded up
    least, most = (cost.all_reduce(algorithm, 4 * size, ranks, ALPHA, BETA) for size in (n, whole))
    assert least * (1 - EXACT) <= time_of(work, ranks) <= most * (1 + EXACT)


# ---- the other collectives --------------------------------------------------------------------------------------------


def call(name: str, algorithm: str) -> Callable[[Communicator], None]:
    """A call of a collective, n bytes in all; `gather` and `scatter` from and to rank 0."""

    def work(comm: Communicator) -> None:
        whole, part = empty(comm), empty(comm, comm.size)
        parts = [empty(comm, comm.size) for _ in range(comm.size)]
        rooted = parts if comm.rank == 0 else None
        arguments: dict[str, Sequence[Any]] = {
            "broadcast": (whole, 0),
            "reduce": (whole, 0, ReduceOp.SUM),
            "scatter": (part, rooted, 0),
            "gather": (part, rooted, 0),
            "all_gather": (parts, part),
            "reduce_scatter": (part, parts, ReduceOp.SUM),
            "all_to_all": (parts, [torch.empty_like(part) for _ in parts]),
        }
        getattr(collectives, name)(comm, *arguments[name], algorithm)

    return work


MOVING = [("broadcast", "flat"), ("broadcast", "tree"), ("reduce", "flat"), ("reduce", "tree"), ("scatter", "linear")]
MOVING += [("scatter", "tree"), ("gather", "linear"), ("gather", "tree"), ("all_gather", "ring"), ("all_gather", "bruck")]
MOVING += [("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("all_to_all", "pairwise"), ("all_to_all", "direct")]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "algorithm"), MOVING)
def test_a_collective_takes_what_its_formula_says(name: str, algorithm: str, ranks: int) -> None:
    formula = getattr(cost, name)
    assert time_of(call(name, algorithm), ranks) == pytest.approx(formula(algorithm, 4 * N, ranks, ALPHA, BETA), rel=EXACT)
    if "reduce" in name:
        with_gamma = formula(algorithm, 4 * N, ranks, ALPHA, BETA, gamma=GAMMA)
        assert time_of(call(name, algorithm), ranks, GAMMA) == pytest.approx(with_gamma, rel=EXACT)


def test_the_bruck_all_to_all_by_hand() -> None:
    # 4 ranks, n = 4 kB: in each of 2 steps half of the data moves.
    assert cost.all_to_all("bruck", 4000, 4, 1e-6, 1e-9) == pytest.approx(2 * (1e-6 + 2e-6), rel=EXACT)
    with pytest.raises(ValueError, match="ranks=6"):
        cost.all_to_all("bruck", 4000, 6, 1e-6, 1e-9)


# ---- parameter servers ------------------------------------------------------------------------------------------------


def push_and_pull(workers: int, servers: int) -> Callable[[Communicator], None]:
    """First all workers push to all servers, each server having a part, then they pull; all messages at once."""

    def work(comm: Communicator) -> None:
        ranks = range(comm.size)
        if comm.rank < workers:
            parts = empty(comm).tensor_split(servers)
            there = list(zip(parts, ranks[workers:], strict=True))
            comm.exchange(there, [])
            comm.exchange([], there)
        else:
            rooms = [(empty(comm, servers), worker) for worker in ranks[:workers]]
            comm.exchange([], rooms)
            comm.exchange(rooms, [])

    return work


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (4, 2), (3, 3), (2, 4), (6, 4)])
def test_parameter_servers(workers: int, servers: int) -> None:
    simulated = time_of(push_and_pull(workers, servers), workers + servers)
    assert simulated == pytest.approx(cost.parameter_servers(4 * N, workers, servers, ALPHA, BETA), rel=EXACT)
    if servers == 1:
        assert cost.one_server(4 * N, workers, ALPHA, BETA) == cost.parameter_servers(4 * N, workers, 1, ALPHA, BETA)


@pytest.mark.parametrize("machines", [1, 2, 5])
def test_colocated_servers_are_the_blockwise_all_reduce(machines: int) -> None:
    both = cost.colocated_servers(4 * N, machines, ALPHA, BETA), cost.blockwise(4 * N, machines, ALPHA, BETA)
    assert both[0] == pytest.approx(both[1], rel=EXACT)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_byteps_lies_between_all_reduce_and_as_many_servers_as_workers(n: int) -> None:
    times = [cost.byteps(1e9, n, k, 1e-9) for k in range(n + 1)]
    assert times[0] == pytest.approx(cost.ring(1e9, n, 0, 1e-9), rel=EXACT)
    assert times[n] == pytest.approx(1.0, rel=EXACT)
    if n > 2:  # two machines need no third
        assert times == sorted(times, reverse=True) and len(set(times)) == n + 1


def test_byteps_is_the_least_that_any_split_between_the_servers_can_give() -> None:
    """x n of the bytes to be spread over all n GPU machines, the rest over the k CPU machines: the fullest port decides."""
    n, k = 4, 2

    def fullest(on_gpu: Fraction) -> Fraction:
        gpu_part, cpu_part = on_gpu / n, (1 - on_gpu) / k
        gpu_port = (n - 1) * gpu_part + k * cpu_part + (n - 1) * gpu_part  # own pushes, and pulls of the others
        return max(gpu_port, n * cpu_part)

    best = min(fullest(Fraction(split, 1000)) for split in range(1001))
    assert cost.byteps(1, n, k, 1) == pytest.approx(float(best), rel=1e-2)


# ---- speeds -----------------------------------------------------------------------------------------------------------


def test_speeds_as_nccl_tests_print_them() -> None:
    assert cost.algbw(2**30, 8142.6e-6) / 1e9 == pytest.approx(131.9, abs=0.05)  # NVIDIA/nccl issue 527: 8 A100
    assert cost.busbw("all_reduce", 2**30, 8142.6e-6, 8) / 1e9 == pytest.approx(230.8, abs=0.05)
    factors = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "gather": 0.75}
    for collective, factor in (factors | {"scatter": 0.75, "broadcast": 1.0, "reduce": 1.0}).items():
        assert cost.busbw(collective, 8e9, 2.0, 4) == 4e9 * factor
    with pytest.raises(ValueError, match="collective='sum' is unknown: choose one of 'all_reduce'"):
        cost.busbw("sum", 1, 1, 2)
    with pytest.raises(ValueError, match="seconds=0 is not above 0"):
        cost.algbw(1, 0)


# ---- the choice -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.floats(0, 1e12), st.integers(1, 5000), st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_the_choice_is_the_cheapest_of_all_that_were_weighed(nbytes: float, ranks: int, alpha: float, beta: float) -> None:
    choice = cost.choose(nbytes, ranks, alpha, beta)
    times = [seconds for _, seconds, _ in choice.table]
    assert choice.seconds == times[0] <= min(times) * (1 + EXACT) and len(times) == len(CANDIDATES)
    assert choice == cost.choose(nbytes, ranks, alpha, beta)
    for name, seconds, latency in choice.table:
        assert 0 <= latency <= seconds * (1 + EXACT)
        if name != "blockwise":
            assert seconds == cost.all_reduce(name, nbytes, ranks, alpha, beta)


@pytest.mark.parametrize("ranks", [4, 5, 6, 8, 12, 16, 100, 1024])
def test_trees_for_small_tensors_least_bytes_for_large_ones(ranks: int) -> None:
    assert cost.choose(8, ranks, 1e-5, 1e-9).algorithm in ("tree", "double_tree", "halving_doubling")
    large = cost.choose(1e12, ranks, 1e-5, 1e-9)
    # For a power of two, halving and doubling moves as few bytes as the ring in fewer steps.
    assert large.algorithm == "halving_doubling" if ranks & (ranks - 1) == 0 else large.algorithm == "ring"
    assert cost.choose(8, ranks, 1e-5, 1e-9, overhead=0).algorithm == "blockwise"  # if messages at once cost nothing


def test_machines_make_hierarchical_a_candidate() -> None:
    choice = cost.choose(1e9, 24, 1e-5, 1e-9, inner=[(8, 1e-6, 1e-11)])
    assert choice.algorithm == "hierarchical" and len(choice.table) == 7
    assert choice.seconds == cost.hierarchical(1e9, 24, 1e-5, 1e-9, inner=[(8, 1e-6, 1e-11)])


def test_a_choice_tells_why() -> None:
    text = str(cost.choose(160e6, 6, alpha=10e-6, beta=1 / 16e9)).splitlines()
    assert text[0] == "all-reduce of 160,000,000 bytes, 6 ranks, alpha 10 us, 16 GB/s: ring"
    assert [line.split()[0] for line in text[2:]] == ["ring", "blockwise", "double_tree", "halving_doubling", "tree", "flat"]
    assert str(cost.choose(0, 1, 0, 0)).startswith("all-reduce of 0 bytes, 1 ranks, alpha 0 ns, infinite bandwidth: ring")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best", 1, 2, 0, 0), "algorithm='best' is unknown: choose one of 'flat', 'flat_together'"),
        (("ring", -1, 2, 0, 0), "nbytes=-1 is not a number from 0 up"),
        (("ring", 1, 0, 0, 0), "ranks=0 is not a whole number from 1 up"),
        (("ring", 1, 2.0, 0, 0), "ranks=2.0 is not a whole number from 1 up"),
        (("ring", 1, 2, math.nan, 0), "alpha=nan is not a number from 0 up"),
        (("ring", 1, 2, 0, math.inf), "beta=inf is not a number from 0 up"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as told:
        cost.all_reduce(*arguments)
    assert str(told.value).startswith(message)


# ---- aggregation on one machine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_aggregation_takes_what_its_formula_says(ranks: int) -> None:
    machine = pcie_tree(ranks, BANDWIDTH, HOP)
    model = Model(per_combined_byte=GAMMA)
    forms = {"flat_together": lambda comm: aggregate.on_device(comm, empty(comm)), "blockwise": blockwise}
    for name, work in forms.items():
        simulated = simulate(work, machine, device="meta", model=model, trace=False).time
        assert simulated == pytest.approx(cost.all_reduce(name, 4 * N, ranks, ALPHA, BETA, gamma=GAMMA), rel=EXACT)
    placed = machine.devices + machine.hosts
    simulated = simulate(on_host, machine, ranks=placed, device="meta", model=model, trace=False).time
    assert simulated == pytest.approx(cost.through_host(4 * N, ranks, ALPHA, BETA, gamma=GAMMA), rel=EXACT)


def blockwise(comm: Communicator) -> None:
    aggregate.blockwise(comm, empty(comm))


def on_host(comm: Communicator) -> None:
    aggregate.on_host(comm, empty(comm), comm.size - 1)


# ---- a message, measured ------------------------------------------------------------------------------------------------


def test_tensors_are_made_before_messages_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fills 16 MB beside a message of 4 bytes keeps the core from the rank that still waits: the 4 take longest."""
    made, zeros = [], torch.zeros

    def counted(*shape: Any, **how: Any) -> torch.Tensor:
        made.append(shape)
        return zeros(*shape, **how)

    monkeypatch.setattr(torch, "zeros", counted)
    seconds = simulate(cost.message_times, star(2, BANDWIDTH, HOP), [4, 40_000], False, 3)[0]
    assert len(made) == 2 * 2 * 2  # on each of two ranks, of each of two sizes, one to send and one to receive
    assert seconds == pytest.approx([ALPHA + n * BETA for n in (4, 40_000)])
