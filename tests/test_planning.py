"""Planning: intervals and goodput against lives with failures; clusters of pods; prices against every message; routes."""

import random
from collections import Counter
from math import log
from typing import Any

import pytest
import torch

from d2lps import OutOfMemory, simulate
from d2lps.parallel import Calibration, Plan, Transformer
from d2lps.parallel.prediction.messages import by_messages
from d2lps.parallel.prediction.prices import axis_groups
from d2lps.planning import adaptive_routing, clos, daly, ecmp, goodput, lives, mtbf, pods, predict_on_pods, young
from d2lps.planning.published import KOKOLIS, LLAMA3, loss
from d2lps.planning.shared import SharedPrices
from d2lps.topology import fat_tree
from d2lps_book.check.planning import _survived

HOUR, DAY = 3600.0, 86400.0
H100 = Calibration(efficiency=0.7, fused_attention=True)

# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (900, 9.1)])
def test_dalys_interval_is_that_of_his_figures(mean: float, minutes: float) -> None:
    assert daly(300, mean) / 60 == pytest.approx(minutes, abs=0.5)


@pytest.mark.parametrize("mean", [0.5 * HOUR, 3 * HOUR, 24 * HOUR])
@pytest.mark.parametrize("save", [5.0, 60.0, 600.0])
def test_dalys_interval_is_nearly_the_best_and_youngs_hardly_worse(save: float, mean: float) -> None:
    best = max(goodput(60 * k / 4, save, 300, mean) for k in range(1, 4 * 600))
    assert goodput(daly(save, mean), save, 300, mean) > 0.999 * best
    assert goodput(young(save, mean), save, 300, mean) > (0.99 if save < mean / 20 else 0.95) * best


@pytest.mark.parametrize(("save", "restart", "mean"), [(60, 600, LLAMA3.mtbf), (60, 1200, 0.4 * HOUR), (0.001, 0.001, HOUR)])
def test_goodput_is_what_lives_have(save: float, restart: float, mean: float) -> None:
    interval = daly(60, mean)
    run = lives(8, 600 * mean, interval, save, restart, mean)
    assert sum(run) / 8 == pytest.approx(goodput(interval, save, restart, mean), rel=0.03)
    assert len(set(run)) == 8  # each has its own luck


@pytest.mark.parametrize(("interval", "save", "restart"), [(100, 5, 50), (700, 20, 300), (3000, 1, 900)])
def test_a_life_is_what_its_failures_leave_of_it(interval: float, save: float, restart: float) -> None:
    chance, now, failures = torch.Generator().manual_seed(0), 0.0, list[float]()
    for _ in range(500):
        now -= 1000 * log(1 - torch.rand((), generator=chance, dtype=torch.float64).item())
        failures.append(now)
    [share] = lives(1, 20_000, interval, save, restart, mtbf=1000)
    assert share == pytest.approx(20_000 / _survived(failures, 20_000, interval, save, restart))


def test_the_same_failures_whatever_the_interval() -> None:
    traces = [lives(1, 50_000, tau, 10, 100, 5000, trace=True).trace for tau in (500, 3000)]
    kept = [trace.bars()["computing"] for trace in traces]
    sums = [float((table["end"] - table["start"]).sum()) for table in kept]
    assert sums == pytest.approx([50_000, 50_000])


@pytest.mark.parametrize(("call", "word"), [
    (lambda: young(0, 1), "save=0"), (lambda: daly(1, -2), "mtbf=-2"), (lambda: mtbf(0, 5.0), "devices=0"),
    (lambda: goodput(1, 1, -1, 1), "restart=-1"), (lambda: lives(1, 100, 9000, 1, 1, 60), "would never end"),
    (lambda: lives(0, 9, 10, 1, 1, 60), "jobs=0"), (lambda: lives(1, 0, 10, 1, 1, 60), "work=0"),
    (lambda: goodput(float("nan"), 1, 1, 1), "interval=nan"),
])  # fmt: skip
def test_what_is_no_time_is_named(call: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()


def test_it_never_gets_through_rather_than_overflows() -> None:
    assert goodput(1e6, 1, 1, 1) == 0.0 and goodput(1, 1, 1e6, 1) == 0.0


def test_published_rates_are_what_is_told() -> None:
    assert LLAMA3.mtbf / HOUR == pytest.approx(3.1, abs=0.05)
    assert KOKOLIS[1024] == 7.9 * HOUR and loss(70e9, 1.4e12) == pytest.approx(1.94, abs=0.01)


# ---- pods ---------------------------------------------------------------------------------------------------------------


def test_pods_share_what_leads_out_of_them() -> None:
    net = pods(3, per_pod=2, oversubscription=4)
    assert len(net.devices) == 48 and net.graph.edges["pod1", "core"]["bandwidth"] == 16 * 50e9 / 4
    inside, across, far = (net.route("node0/gpu0", to) for to in ("node0/gpu1", "node1/gpu0", "node2/gpu0"))
    assert [len(route.links) for route in (inside, across, far)] == [2, 2, 4]
    assert far.bandwidth == 50e9  # alone, a device fills its port


@pytest.mark.parametrize(("given", "word"), [((0, 1), "count=0"), ((1, 0), "per_pod=0"), ((1, 1, 0.5), "oversubscription=0.5")])
def test_what_is_no_pod_is_named(given: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pods(*given)


@pytest.mark.parametrize(("k", "tiers"), [(4, 3), (8, 3), (64, 3)])
def test_clos_is_the_fat_tree_of_its_switches(k: int, tiers: int) -> None:
    found = clos(k**3 // 4, radix=k)
    assert (found.tiers, found.switches) == (tiers, 5 * k * k // 4)
    if k < 64:
        tree = fat_tree(k)
        assert found.switches == len(tree.switches) and found.cables == len(tree.links) / 2


def test_tiers_grow_with_devices() -> None:
    assert [clos(n).tiers for n in (64, 65, 2048, 2049, 65_536, 65_537)] == [1, 2, 2, 3, 3, 4]
    for wrong, word in (((0,), "devices=0"), ((100, 5), "radix=5")):
        with pytest.raises(ValueError, match=word):
            clos(*wrong)


# ---- prices against messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_pod", "count", "ratio", "plan", "batch"), [
    (4, 2, 7, Plan(dp=4, tp=8, pp=2), 8), (4, 2, 7, Plan(dp=4, tp=4, pp=4, zero=1), 8), (16, 4, 28, Plan(dp=16, tp=2, pp=16), 16),
], ids=["64 tp 8", "64 tp 4", "512"])  # fmt: skip
def test_a_step_on_pods_takes_what_its_messages_take(per_pod: int, count: int, ratio: int, plan: Plan, batch: int) -> None:
    few = Transformer(layers=max(4, plan.pp), hidden=8192, heads=64, vocab=51200, sequence=1024)
    net = pods(count, per_pod, oversubscription=ratio)
    told = predict_on_pods(few, plan, net, batch, H100)
    assert told.time == pytest.approx(by_messages(told.job, net).time, rel=0.02)


def test_what_does_not_fit_is_refused_as_predict_does() -> None:
    large = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    with pytest.raises(OutOfMemory, match="'gradients' needs"):
        predict_on_pods(large, Plan(dp=8, tp=8), pods(1, per_pod=8), batch=128)


def test_a_group_of_many_pods_is_sampled_in_each_of_them() -> None:
    net, plan = pods(4, per_pod=32), Plan(dp=128, tp=8)
    prices = SharedPrices(plan, net)
    group = axis_groups(plan, "dp")[0]
    sample = prices._sample(group, 64)
    assert len(sample) == 64 and Counter(prices.pods[group[place]] for place in sample) == {f"pod{k}": 16 for k in range(4)}


def test_who_shares_a_link_to_the_core_gets_a_share_of_it() -> None:
    """Stages in two pods: 32 messages at once through an uplink that has room for 8 ports."""
    net = pods(2, per_pod=4, oversubscription=4)
    assert SharedPrices(Plan(dp=32, pp=2), net).between(0, 1)(1e9) == pytest.approx(32 * 1e9 / (8 * 50e9 * 0.9), rel=0.01)


# ---- routes -------------------------------------------------------------------------------------------------------------


def swapped(tree: Any, seed: int) -> tuple[list[int], list[tuple[str, str]]]:
    to = random.Random(seed).sample(range(len(tree.devices)), len(tree.devices))
    return to, [(f"gpu{i}", f"gpu{j}") for i, j in enumerate(to) if i != j]


def fullest(topology: Any, pairs: list[tuple[str, str]]) -> int:
    return max(Counter(link for pair in pairs for link in topology.route(*pair).links).values())


@pytest.mark.parametrize("seed", range(5))
def test_adaptive_ways_collide_less_and_are_as_short(seed: int) -> None:
    tree = fat_tree(4)
    _, pairs = swapped(tree, seed)
    by_chance, looking = ecmp(tree, pairs, seed), adaptive_routing(tree, pairs)
    assert fullest(looking, pairs) <= fullest(by_chance, pairs) and fullest(looking, pairs) <= 2
    for pair in pairs:
        lengths = {len(topology.route(*pair).links) for topology in (tree, by_chance, looking)}
        assert len(lengths) == 1 and looking.route(*pair).latency == pytest.approx(tree.route(*pair).latency)


def test_the_simulator_takes_the_ways_that_are_given() -> None:
    tree = fat_tree(4)
    to, pairs = swapped(tree, 1)

    def send(comm: Any) -> None:
        out, room = torch.empty(25_000_000, device="meta"), torch.empty(25_000_000, device="meta")
        if to[comm.rank] != comm.rank:
            comm.exchange([(out, to[comm.rank])], [(room, to.index(comm.rank))])

    for routed in (ecmp(tree, pairs, 1), adaptive_routing(tree, pairs)):
        took = simulate(send, routed, device="meta", trace=False).time
        assert took == pytest.approx(fullest(routed, pairs) * 100e6 / 50e9, rel=0.02)


def test_a_node_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="'gpu99' is not a node"):
        ecmp(fat_tree(4), [("gpu0", "gpu99")])
