"""The rule that makes one change of many workers' pushes, against numpy, and with workers that send nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from d2lps import kvstore
from d2lps.kvstore import Refused
from d2lps.kvstore.core.reductions import RULES, aligned, make_rule
from d2lps.topology import star


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("trim", [1, 2])
def test_rules_agree_with_numpy(workers: int, trim: int) -> None:
    each = torch.randn(workers, 4, 3, generator=torch.Generator().manual_seed(workers))
    pushes = {worker: [(None, gradient)] for worker, gradient in enumerate(each)}
    wanted = {"sum": each.numpy().sum(0), "mean": each.numpy().mean(0), "median": np.median(each.numpy(), 0)}
    for name, value in wanted.items():
        rows, found = make_rule(name)(torch.zeros(4, 3), pushes, workers)
        assert rows is None
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6)
    rows, found = make_rule("trimmed_mean", trim)(torch.zeros(4, 3), pushes, workers)
    middle = np.sort(each.numpy(), 0)[trim:-trim].mean(0) if workers > 2 * trim else np.median(each.numpy(), 0)
    np.testing.assert_allclose(found, middle, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_rows_are_what_the_whole_tensor_would_be(name: str) -> None:
    """Some rows of some workers, some of them twice, and one worker with several pushes."""
    generator = torch.Generator().manual_seed(0)
    pushes: dict[int, Any] = {}
    for worker in range(5):
        rows = [torch.randint(0, 7, (3,), generator=generator) for _ in range(1 + (worker == 2))]
        pushes[worker] = [(at, torch.randn(3, 2, generator=generator)) for at in rows]
    dense = {w: [(None, torch.zeros(7, 2).index_add_(0, at, values)) for at, values in mine] for w, mine in pushes.items()}
    rows, values = RULES[name](torch.zeros(7, 2), pushes, 5)
    _, whole = RULES[name](torch.zeros(7, 2), dense, 5)
    torch.testing.assert_close(torch.zeros(7, 2).index_add_(0, rows, values), whole)
    mixed = pushes | {0: dense[0]}
    torch.testing.assert_close(RULES[name](torch.zeros(7, 2), mixed, 5)[1], whole)


def test_what_a_worker_has_not_pushed_is_zero() -> None:
    rows, values = aligned(torch.zeros(9, 1), [(torch.tensor([2]), torch.ones(1, 1)), (torch.tensor([7]), torch.ones(1, 1))])
    assert rows is not None and rows.tolist() == [2, 7] and values.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]


def train(kv: Any, rule: dict[str, Any], optimizer: str | None, garbage: dict[int, float], sparse: bool) -> list[float]:
    """Ten steps towards (1, 2, 3, 4), where the workers in `garbage` send the same number in all elements."""
    goal, weights = torch.arange(1.0, 5.0).view(4, 1), torch.zeros(4, 1)
    kv.init("w", weights)
    kv.set_optimizer(optimizer, **rule, **({"lr": 0.5} if optimizer else {}))
    for _ in range(10):
        kv.pull("w", weights).wait()
        step = (weights - goal) if optimizer else 0.5 * (goal - weights)
        sent = torch.full((4, 1), garbage[kv.rank]) if kv.rank in garbage else step
        if sparse:
            kv.push_rows("w", torch.arange(4), sent)
        else:
            kv.push("w", sent)
        kv.clock()
    kv.pull("w", weights).wait()
    return weights.flatten().tolist()


@pytest.mark.parametrize("rule", [{"reduction": "median"}, {"reduction": "trimmed_mean", "trim": 2}])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_workers_that_send_nonsense_do_no_harm(rule: dict[str, Any], optimizer: str | None, sparse: bool) -> None:
    nonsense = {1: 1e30, 3: float("nan")}
    run = kvstore.simulate(train, star(7, 1e9), 5, 2, rule, optimizer, nonsense, sparse, split=8, trace=False)
    honest = kvstore.simulate(train, star(7, 1e9), 5, 2, rule, optimizer, {}, sparse, split=8, trace=False)
    assert run == honest == [run[0]] * 5
    assert run[0] == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=0.01)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_a_mean_one_worker_spoils_all(reduction: str) -> None:
    run = kvstore.simulate(train, star(6, 1e9), 5, 1, {"reduction": reduction}, "sgd", {1: float("nan")}, False, trace=False)
    assert all(value != value for value in run[0])


def test_nonsense_does_no_harm_on_real_servers_either() -> None:
    garbage = {2: float("nan")}
    assert kvstore.run(train, 3, 2, {"reduction": "median"}, "sgd", garbage, False, split=8) == [
        pytest.approx([1.0, 2.0, 3.0, 4.0], abs=0.01)
    ] * 3


@pytest.mark.parametrize("consistency", ["ssp", "asp", "adaptive"])
@pytest.mark.parametrize("reduction", ["median", "trimmed_mean"])
def test_without_rounds_there_is_nothing_to_compare(consistency: str, reduction: str) -> None:
    with pytest.raises(Refused, match=f"reduction='{reduction}' compares the pushes of a round: choose consistency 'bsp'"):
        kvstore.simulate(train, star(4, 1e9), 3, 1, {"reduction": reduction}, None, {}, False, consistency=consistency)
