"""Gossip: what ranks hold after some steps is what the mixing matrices say, in both worlds; and deaths do not stop it."""

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import d2lps
from d2lps.gossip import GRAPHS, hops, mix, mixing_matrix, neighbors, push_sum, spectral_gap
from d2lps.topology import star

SIZES = (1, 2, 3, 5, 8, 13)
ONE = d2lps.Device(flops=1, memory=1e9, memory_bandwidth=1e9)


def values(size: int, columns: int = 7) -> np.ndarray:
    return np.random.default_rng(size).standard_normal((size, columns))


def mixed(comm: d2lps.Communicator, graph: str, steps: int) -> list[list[float]]:
    tensor = torch.from_numpy(values(comm.size)[comm.rank].reshape(1, -1).copy())
    for step in range(steps):
        mix(comm, tensor, graph, step)
    return tensor.tolist()


def expected(size: int, graph: str, steps: int) -> np.ndarray:
    matrices = [mixing_matrix(graph, size, step) for step in range(steps)]
    return reduce(np.matmul, reversed(matrices), np.eye(size)) @ values(size)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", SIZES)
def test_a_simulated_run_is_the_power_of_the_matrix(graph: str, size: int) -> None:
    run = d2lps.simulate(mixed, star(size, 1e9, 1e-6), graph, 5)
    np.testing.assert_allclose(np.concatenate(list(run)), expected(size, graph, 5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("graph", GRAPHS)
def test_processes_do_the_same(graph: str) -> None:
    run = d2lps.run(mixed, 3, graph, 4)
    np.testing.assert_allclose(np.concatenate(list(run)), expected(3, graph, 4), rtol=0, atol=1e-14)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", SIZES)
def test_each_matrix_is_doubly_stochastic_and_is_who_hears_whom(graph: str, size: int) -> None:
    for step in range(6):
        matrix = mixing_matrix(graph, size, step)
        assert np.allclose(matrix.sum(0), 1) and np.allclose(matrix.sum(1), 1) and (matrix >= 0).all()
        for rank in range(size):
            to, source = neighbors(graph, rank, size, step)
            assert sorted({rank, *source}) == matrix[rank].nonzero()[0].tolist()
            assert sorted({rank, *to}) == matrix[:, rank].nonzero()[0].tolist()


@pytest.mark.parametrize("size", (2, 4, 8, 64))
def test_published_gaps(size: int) -> None:
    """Ying et al. 2021: of the exponential graph, 2 / (1 + log2 p) for even p; one peer of it is exact after log2 p steps.

    Of a ring the eigenvalues are (1 + 2 cos(2 pi k / p)) / 3.
    """
    assert spectral_gap("exponential", size) == pytest.approx(2 / (1 + np.log2(size)))
    assert spectral_gap("one_peer", size) == 1.0
    if size > 2:
        assert spectral_gap("ring", size) == pytest.approx((2 - 2 * np.cos(2 * np.pi / size)) / 3)


@pytest.mark.parametrize(("graph", "size"), [("ring", 8), ("ring", 13), ("exponential", 8), ("exponential", 13), ("one_peer", 5)])
def test_no_start_is_further_from_the_mean_than_the_gap_says_and_one_is_as_far(graph: str, size: int) -> None:
    steps = 12  # a multiple of one_peer's round of three
    power = reduce(np.matmul, [mixing_matrix(graph, size, step) for step in range(steps)]) - 1 / size
    worst = np.linalg.svd(power)[2][0]
    assert np.linalg.norm(power @ worst) == pytest.approx((1 - spectral_gap(graph, size)) ** steps, rel=1e-9)


def test_a_step_takes_one_latency_and_the_bytes_that_are_promised() -> None:
    n = 8 * 7
    for graph, count in (("ring", 2), ("exponential", 3), ("one_peer", 1)):
        run = d2lps.simulate(mixed, star(8, bandwidth=1e9, latency=1.0), graph, 1)
        assert run.trace.bytes_sent().tolist() == [count * n] * 8
        assert run.time == pytest.approx(2.0, abs=1e-3) and run.trace.rounds == 1


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: hops("star", 4), ValueError, "graph='star'"),
    (lambda: hops("ring", 0), ValueError, "size=0"),
    (lambda: hops("ring", True), ValueError, "size=True"),
    (lambda: neighbors("ring", 4, 4), ValueError, "rank=4"),
    (lambda: d2lps.simulate(lambda comm: mix(comm, torch.ones(3, dtype=torch.int64)), star(2, 1e9)), TypeError, "torch.int64"),
    (lambda: d2lps.simulate(lambda comm: mix(comm, [1.0]), star(2, 1e9)), TypeError, "list"),
    (lambda: d2lps.simulate(lambda comm: mix(comm, torch.ones(1).expand(3)), star(2, 1e9)), ValueError, "of shape .3. was"),
], ids=["graph", "size", "bool", "rank", "integers", "no tensor", "expanded"])  # fmt: skip
def test_refusals(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# ---- deaths ---------------------------------------------------------------------------------------------------------------


def pushed(comm: d2lps.Communicator, graph: str, steps: int) -> tuple[list[float], list[int]]:
    """The value and the weight at the end, and whom this rank has found dead; a step begins every second."""
    carried, gone = torch.tensor([float(comm.rank), 1.0], dtype=torch.double), set[int]()
    for step in range(steps):
        with comm.compute("step", flops=1):
            pass
        push_sum(comm, carried, graph, step, gone)
    return carried.tolist(), sorted(gone)


def test_without_deaths_it_is_mixing() -> None:
    for graph in GRAPHS:
        run = d2lps.simulate(pushed, star(5, 1e9, 1e-6, device=ONE), graph, 3)
        matrix = reduce(np.matmul, [mixing_matrix(graph, 5, step) for step in (2, 1, 0)])
        np.testing.assert_allclose([value for (value, _), _ in run], matrix @ np.arange(5), atol=1e-14)
        assert all(weight == pytest.approx(1) and gone == [] for (_, weight), gone in run)


def test_processes_without_deaths() -> None:
    assert d2lps.run(pushed, 2, "one_peer", 1) == [([0.5, 1.0], [])] * 2


@settings(max_examples=12, deadline=None)
@given(graph=st.sampled_from(sorted(GRAPHS)), size=st.integers(3, 8), data=st.data())
def test_survivors_agree_on_a_mean_whoever_dies_and_when(graph: str, size: int, data: st.DataObject) -> None:
    most = 1 if graph == "ring" or size < 6 else 2  # two gaps part a circle, and then each part has a mean of its own
    deaths = data.draw(st.dictionaries(st.integers(0, size - 1), st.floats(0.5, 8), min_size=1, max_size=most))
    cluster = star(size, bandwidth=16, latency=0.25, device=ONE)  # a message takes 1.5 s: deaths meet some under way
    faults = [d2lps.Kill(cluster.devices[rank], at) for rank, at in deaths.items()]
    run = d2lps.simulate(pushed, cluster, graph, 160, faults=faults)
    left = [rank for rank in range(size) if rank not in deaths]
    means = [run[rank][0][0] / run[rank][0][1] for rank in left]
    assert np.ptp(means) < 1e-3 and 0 <= min(means) <= max(means) <= size - 1
    for rank in left:
        assert set(run[rank][1]) <= deaths.keys()


def test_what_a_death_before_the_first_step_leaves_is_the_mean_of_the_others() -> None:
    cluster = star(8, bandwidth=1e9, latency=1e-6, device=ONE)
    for graph in GRAPHS:
        run = d2lps.simulate(pushed, cluster, graph, 160, faults=[d2lps.Kill(cluster.devices[7], 0.5)])
        for rank in range(7):
            (value, weight), _ = run[rank]
            assert value / weight == pytest.approx(3.0, abs=1e-3)
        assert sum(run[rank][0][1] for rank in range(7)) == pytest.approx(7)


def test_mix_says_who_died() -> None:
    cluster = star(3, bandwidth=1e9, latency=1e-6, device=ONE)

    def work(comm: d2lps.Communicator) -> None:
        with comm.compute("step", flops=1):
            pass
        mix(comm, torch.ones(1))

    with pytest.raises(d2lps.RankDied, match="rank 2 has died"):
        d2lps.simulate(work, cluster, faults=[d2lps.Kill(cluster.devices[2], 0.5)])
