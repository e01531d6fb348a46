"""The topology that follows the work: right sums in both worlds, ranks that change together, and never far behind the best."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from adaptive_prices import NETS, TOPOLOGIES, Stage, fixed, oracle, played
from hypothesis import given, settings
from hypothesis import strategies as st

import d2lps
from d2lps import cost
from d2lps.adaptive import AdaptiveAllReduce, Controller, Estimate, by_link, neighbors
from d2lps.collectives import all_reduce
from d2lps.simulator import simulate
from d2lps.topology import multi_node, star

EVERY = ("ring", "tree", "double_tree", "blockwise", "flat", "halving_doubling")
SIZES = (1, 2, 3, 5, 8)


# ---- never far behind -------------------------------------------------------------------------------------------------

stages = st.builds(
    Stage, steps=st.integers(60, 300), nbytes=st.sampled_from([10**k for k in range(3, 9)]), buckets=st.sampled_from([8, 16]),
    narrowed=st.sampled_from([1.0, 1.0, 4.0]), ranks=st.sampled_from([8, 8, 4]),
)  # fmt: skip


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(NETS)), st.lists(stages, min_size=1, max_size=6))
def test_at_most_a_tenth_behind_the_best_fixed_topology_and_ahead_where_stages_differ(net: str, job: list[Stage]) -> None:
    best = min(fixed(net, job, name) for name in TOPOLOGIES)
    mine, least = played(net, job, Controller()), oracle(net, job)
    assert least - 1e-9 <= mine <= 1.10 * best
    if best > 1.15 * least:
        assert mine < best


def test_where_stages_differ_it_wins_by_much() -> None:
    job = [Stage(100, 10_000_000), Stage(20_000, 1000), Stage(200, 1_000_000)]
    best = min(fixed("two machines", job, name) for name in TOPOLOGIES)
    assert played("two machines", job, Controller()) < 0.85 * best


def whole(comm: d2lps.Communicator, job: list[Stage]) -> list[tuple[int, str]]:
    summing = AdaptiveAllReduce(comm)
    for stage in job:
        for _ in range(stage.steps):
            summing.step([torch.empty(stage.nbytes, dtype=torch.uint8, device=comm.device) for _ in range(stage.buckets)])
    return summing.history


def test_whole_simulations_take_what_the_prices_say() -> None:
    job = [Stage(25, 1_000_000, 4), Stage(25, 1000, 4)]
    net = NETS["two machines"]
    run = simulate(whole, net, job, device="meta", ranks=net.devices[::2], trace=False)
    controller = Controller()
    assert run.time == pytest.approx(played("two machines", job, controller), rel=0.01)
    assert run.results == [controller.history] * 8
    assert len(controller.history) > 1


# ---- the controller alone ---------------------------------------------------------------------------------------------


def told(controller: Controller, price, steps: int, buckets: int = 8, ranks: int = 8) -> list[str]:
    """Steps of buckets of 1 MB that take what `price(name, how many of the buckets go this way)` says; where the last went."""
    for _ in range(steps):
        plan = controller.plan([10**6] * buckets, ranks)
        while controller.due:
            short = price(controller.current, buckets) / 100
            controller.observe({(name, 10**6): price(name, plan.count(name)) for name in plan} | {(plan[-1], 16): short}, 1e-6)
    return plan


def test_one_bucket_tries_and_then_all_follow() -> None:
    prices = {"ring": 1.0, "double_tree": 0.5, "blockwise": 2.0}
    controller, plans = Controller(first="ring"), []
    for _ in range(8):
        plans.append(told(controller, lambda name, _: prices[name], steps=1))
    tried = next(plan for plan in plans if "double_tree" in plan)
    assert tried.count("double_tree") == 1
    assert plans[-1].count("double_tree") >= 7
    assert controller.history == [(1, "ring"), (controller.history[-1][0], "double_tree")]


def test_it_falls_back_when_all_together_are_slower_than_the_one_that_tried() -> None:
    controller = Controller(["ring", "blockwise"], first="ring", patience=1e6)
    told(controller, lambda name, many: 1.0 if name == "ring" else 0.5 if many == 1 else 3.0, steps=60)
    assert controller.current == "ring"
    assert [name for _, name in controller.history[:3]] == ["ring", "blockwise", "ring"]
    assert controller.history[2][0] - controller.history[1][0] <= 2


def test_it_does_not_change_for_little_and_not_for_what_connections_would_eat_up() -> None:
    prices = {"ring": 1.0, "blockwise": 0.97}
    controller = Controller(list(prices), first="ring", gain=0.05)
    told(controller, lambda name, _: prices[name], steps=50)
    assert controller.history == [(1, "ring")]
    controller = Controller(list(prices), first="ring", gain=0.01, horizon=10)
    controller.plan([10**6], 8)
    controller.observe({("ring", 10**6): 1.0, ("ring", 16): 0.01}, setup=1.0)  # 10 steps save 0.3 s
    controller.observe({("blockwise", 10**6): 0.97, ("blockwise", 16): 0.01}, setup=1.0)
    controller.plan([10**6], 8)
    assert controller.history == [(1, "ring")]


def test_who_is_slower_is_tried_ever_more_rarely() -> None:
    prices = {"ring": 1.0, "blockwise": 8.0}
    controller = Controller(list(prices), first="ring", patience=50)
    told(controller, lambda name, _: prices[name], steps=1000)
    after_first = [step for step, _ in controller.trials][1:]
    assert len(after_first) >= 5
    assert all(b - a >= 50 * np.log(8 * 0.95) for a, b in pairwise(after_first))
    assert {name for _, name in controller.history} == {"ring"}


def test_it_finds_out_when_the_network_changes_under_it() -> None:
    prices = {"ring": 1.0, "blockwise": 0.5}
    controller = Controller(list(prices))
    assert told(controller, lambda name, _: prices[name], steps=30)[-1] == "blockwise"
    prices["blockwise"] = 2.0
    assert told(controller, lambda name, _: prices[name], steps=20)[-1] == "ring"
    prices["blockwise"] = 0.5  # which nobody sees who goes by the ring: it takes patience
    assert told(controller, lambda name, _: prices[name], steps=200)[-1] == "blockwise"


@pytest.mark.parametrize(
    ("options", "word"),
    [({"topologies": []}, "empty"),
     ({"topologies": ["ring", "star"]}, "'star'"), ({"first": "flat"}, "'flat'"), ({"gain": 1.0}, "1.0"),
     ({"patience": 0}, "0 is not"), ({"horizon": 0}, "horizon=0"), ({"every": 1.5}, "every=1.5")],
)  # fmt: skip
def test_bad_options_are_named(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Controller(**options)


def test_times_that_are_none_and_topologies_that_cannot_be_are_named() -> None:
    controller = Controller(["ring", "tree"])
    for key, time, word in ((("ring", 8), float("nan"), "nan"), (("ring", 8), -1.0, "-1.0"), (("star", 8), 1.0, "'star'")):
        with pytest.raises(ValueError, match=word):
            controller.observe({key: time})
    assert not controller.estimate.rows
    with pytest.raises(ValueError, match="'hierarchical'"):  # which has a formula, and no connections of its own here
        simulate(lambda comm: AdaptiveAllReduce(comm, Controller(["ring", "hierarchical"])), star(2, 1e9))


# ---- estimates --------------------------------------------------------------------------------------------------------


def test_a_formula_stands_in_for_what_was_never_measured() -> None:
    estimate = Estimate(patience=100)
    for nbytes in (8, 10**6):
        estimate.learn("ring", 8, nbytes, cost.all_reduce("ring", nbytes, 8, 5e-6, 1e-9), 1)
    assert estimate.seconds("ring", 8, 3e6) == pytest.approx(cost.all_reduce("ring", 3e6, 8, 5e-6, 1e-9))
    assert estimate.seconds("tree", 4, 3e6) == pytest.approx(cost.all_reduce("tree", 3e6, 4, 5e-6, 1e-9))
    assert estimate.knows("ring", 8, 3e6)
    assert not estimate.knows("ring", 8, 5e6)  # too far from what was measured
    assert not estimate.knows("tree", 8, 10**6)
    assert estimate.hopeful("tree", 8, 3e6) < estimate.seconds("tree", 8, 3e6)


def test_a_changed_time_drops_what_was_known_and_noise_does_not() -> None:
    estimate = Estimate(patience=100)
    estimate.learn("ring", 8, 8, 1e-6, 1)
    estimate.learn("ring", 8, 1000, 1e-3, 1)
    assert estimate.learn("ring", 8, 1000, 1.1e-3, 2) == 1.0
    assert estimate.seconds("ring", 8, 1000) == pytest.approx(1.05e-3)
    assert estimate.learn("ring", 8, 1000, 4.2e-3, 3) == pytest.approx(4.0)
    assert set(estimate.rows["ring", 8]) == {1000}
    assert estimate.learn("ring", 8, 1001, 0.0, 4) == 1.0  # no clock tells; nothing to divide by


def test_messages_tell_their_links() -> None:
    net = multi_node(star(2, 1e9, 1e-6), 2, 1e8, 10e-6)

    def work(comm: d2lps.Communicator) -> None:
        for numel in (1, 1000):
            all_reduce(comm, torch.empty(numel, device=comm.device), algorithm="ring")

    trace = simulate(work, net, device="meta").trace
    found = by_link(trace, lambda src, dst: "inside" if src // 2 == dst // 2 else "between")
    assert found["inside"] == pytest.approx((2e-6, 1e-9), rel=1e-3)
    assert found["between"][1] == pytest.approx(1e-8, rel=1e-3)
    alone = simulate(lambda comm: all_reduce(comm, torch.empty(4, device=comm.device)), net, device="meta").trace
    with pytest.raises(ValueError, match="have 4 bytes"):
        by_link(alone, lambda src, dst: "any")


# ---- in both worlds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("name", EVERY)
def test_neighbors_are_those_that_a_trace_shows(name: str, size: int) -> None:
    trace = simulate(lambda comm: all_reduce(comm, torch.empty(500, device=comm.device), algorithm=name), star(size, 1e9),
                     device="meta").trace  # fmt: skip
    seen = [{end for pair in trace.bytes_by_link() if rank in pair for end in pair} - {rank} for rank in range(size)]
    assert seen == [neighbors(name, rank, size) for rank in range(size)]


def sums(comm: d2lps.Communicator, steps: int) -> tuple[bool, list[tuple[int, str]], list[tuple[int, str]]]:
    """Buckets of all lengths, integers in doubles; whether every sum is right, and what was decided."""
    summing, right = AdaptiveAllReduce(comm, Controller(EVERY, every=2, patience=5)), True
    for step in range(steps):
        buckets = [torch.arange(n, dtype=torch.float64) + comm.rank + step for n in (7, 1000, 0, 3, 1000)]
        summing.step(buckets)
        for bucket in buckets:
            wanted = comm.size * (torch.arange(len(bucket), dtype=torch.float64) + step) + sum(range(comm.size))
            right &= torch.equal(bucket, wanted)
    return right, summing.history, summing.controller.trials


def alike(results: list, tried: int) -> None:
    right, history, trials = results[0]
    assert right
    assert results == [results[0]] * len(results)
    assert len({name for _, name in trials + history}) >= tried


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_right_and_all_ranks_change_together_in_a_simulation(size: int) -> None:
    alike(list(simulate(sums, star(size, 1e9, 1e-6), 16)), tried=1 if size == 1 else 3)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_right_and_all_ranks_change_together_on_processes(size: int) -> None:
    alike(list(d2lps.run(sums, size, 12)), tried=1)


def test_what_is_open_stays_open_and_what_is_new_shakes_hands() -> None:
    def work(comm: d2lps.Communicator) -> list[int]:
        summing, opened = AdaptiveAllReduce(comm, Controller(["ring", "blockwise"], first="ring"), round_trips=3), []
        for _ in range(6):
            summing.step([torch.empty(1000, device=comm.device)] * 2)
            opened.append(len(summing.open))
        return opened

    run = simulate(work, star(5, 1e9, 1e-6), device="meta")
    assert run[0][0] == 2
    assert run[0][-1] == 4
    hands = [name.startswith("handshake") for name in run.trace.steps]
    shaken = np.array(hands)[run.trace.messages["step"]]
    assert set(run.trace.messages["nbytes"][shaken]) == {64}
    assert shaken.sum() == 10 * 3 * 2  # each pair once: there and back, three times


def test_one_controller_may_go_on_with_fewer_ranks() -> None:
    def work(comm: d2lps.Communicator) -> list[str]:
        controller = Controller()
        for group in (comm, comm.split(comm.rank // 2)):
            summing = AdaptiveAllReduce(group, controller)
            for _ in range(12):
                summing.step([torch.empty(250, device=comm.device)] * 4)
        return controller.current

    assert simulate(work, star(8, 1e9, 1e-6), device="meta").results == ["blockwise"] * 8


def test_buckets_as_short_as_what_the_ranks_agree_by_end_too() -> None:
    def work(comm: d2lps.Communicator) -> int:
        summing = AdaptiveAllReduce(comm)
        for _ in range(5):
            summing.step([torch.zeros(2, dtype=torch.float64)])  # 16 bytes, as two numbers
        return len(summing.history)

    assert simulate(work, star(3, 1e9), trace=False)[0] >= 1


def test_an_average_is_one() -> None:
    def work(comm: d2lps.Communicator) -> list[float]:
        AdaptiveAllReduce(comm).step(buckets := [torch.full((3,), float(comm.rank))], d2lps.ReduceOp.AVG)
        return buckets[0].tolist()

    assert simulate(work, star(3, 1e9)).results == [[1.0] * 3] * 3
