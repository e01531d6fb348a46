"""Steps predicted: prices against simulations, priced steps against steps message by message, and what can't be predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import d2lps
from d2lps import Communicator, OutOfMemory
from d2lps.parallel import Calibration, Plan, Prediction, Transformer, calibrate, measured, predict, search
from d2lps.parallel.prediction import priced
from d2lps.parallel.prediction.clock import Clock, Flow, Time
from d2lps.parallel.prediction.loads import LinkLoad, LinkLoads, speeds
from d2lps.parallel.prediction.messages import Groups, by_messages
from d2lps.parallel.prediction.predict import described
from d2lps.parallel.prediction.priced import play
from d2lps.parallel.prediction.prices import Price, Prices, axis_groups
from d2lps.topology import A100, Device, Topology, dgx_a100, dgx_a100_pod, fat_tree, multi_node, spine_leaf, star

POD, NARROW = dgx_a100_pod(2), spine_leaf(4, 4, spines=2, bandwidth=25e9, oversubscription=4, device=A100)
ONE_PORT = multi_node(dgx_a100(), 2, ports="node")
CLUSTERS = {"pod": POD, "oversubscribed": NARROW, "a port a machine": ONE_PORT}
EQUAL = partial(pytest.approx, rel=1e-9)

# ---- prices -----------------------------------------------------------------------------------------------------------


def together(prices: Prices, price: Price, groups: Sequence[tuple[int, ...]], nbytes: int) -> float:
    """Seconds of a collective in all these groups at once, message by message, each on its ranks of the cluster."""
    ranks = [rank for group in groups for rank in group]
    color = [number for number, group in enumerate(groups) for _ in group]

    def work(comm: Communicator) -> None:
        price.run(comm.split(color[comm.rank]), nbytes)

    nodes = [prices.cluster.devices[rank] for rank in ranks]
    return d2lps.simulate(work, prices.reached, ranks=nodes, device="meta", trace=False).time


def axes(plan: Plan) -> Iterator[tuple[str, str]]:
    sums = ("all_reduce", "all_gather", "reduce_scatter")
    asked = {"tp": sums, "dp": sums, "replicas": sums[:1], "edp": sums[:1], "ends": sums[:1]}
    asked |= {"ep": ("all_to_all",), "cp": ("pass_on",)}
    return ((axis, collective) for axis, some in asked.items() for collective in some if len(axis_groups(plan, axis)[0]) > 1)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(
    "plan", [Plan(dp=2, tp=8), Plan(dp=4, tp=2, pp=2, ep=2), Plan(dp=4, cp=4), Plan(dp=8, tp=2, zero=3, zero_group=4)], ids=str
)
def test_a_price_is_what_all_groups_take_at_once(name: str, plan: Plan) -> None:
    prices = Prices(plan, CLUSTERS[name])
    for axis, collective in axes(plan):
        price, groups = prices.price(axis, collective), axis_groups(plan, axis)
        for nbytes in (16, 48_000, 960_000_000):
            assert price(nbytes) == EQUAL(together(prices, price, groups, nbytes)), (axis, collective, nbytes)


@pytest.mark.parametrize(("name", "times"), [("pod", 1), ("oversubscribed", 2), ("a port a machine", 8)])
def test_groups_that_share_links_slow_one_another_down(name: str, times: float) -> None:
    """Of four groups two go by each of two spines; of eight all by a machine's one port."""
    plan = Plan(dp=4, tp=4) if name == "oversubscribed" else Plan(dp=2, tp=8)
    prices, groups = Prices(plan, CLUSTERS[name]), axis_groups(plan, "dp")
    price = prices.price("dp", "all_reduce")
    alone = together(prices, price, groups[:1], 1 << 30)
    assert price(1 << 30) / alone == pytest.approx(times, rel=0.01)


def test_neighbors_below_other_switches_are_other_neighbors() -> None:
    """Of four stages in a fat tree's pods of four devices, the second and the third are in two pods: two links farther."""
    prices = Prices(Plan(tp=2, pp=4), fat_tree(4, 25e9, 3e-6, A100))
    for place in range(3):
        price, pairs = prices.between(place, place + 1), [(2 * place + rank, 2 * place + 2 + rank) for rank in (0, 1)]
        assert price(48_000) == EQUAL(together(prices, price, pairs, 48_000)), place


@pytest.mark.parametrize("cluster", [star(128, 10e9, 5e-6), dgx_a100_pod(16)], ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_prices_of_many_ranks_go_on_as_those_of_fewer(cluster: Topology, collective: str) -> None:
    prices = Prices(Plan(dp=128), cluster)
    price = prices.price("dp", collective)
    assert prices.continued == {"dp"} and price.simulated == 64
    for nbytes in (1 << 14, 1 << 27):
        assert price(nbytes) == pytest.approx(together(prices, price, [tuple(range(128))], nbytes), rel=1e-6)


# ---- steps ------------------------------------------------------------------------------------------------------------

SMALL = Transformer(layers=4, hidden=2048, heads=16, vocab=32000, sequence=1024, dropout=0.1)
MIXED = Transformer(layers=4, hidden=1024, heads=16, vocab=32000, sequence=1024, experts=4, top_k=2, capacity=float("inf"))
CASES = [
    (SMALL, Plan(dp=16), 16, "oversubscribed"),
    (SMALL, Plan(dp=8, tp=2, zero=2, overlap=False), 8, "a port a machine"),
    (SMALL, Plan(dp=16, zero=3), 16, "oversubscribed"),
    (SMALL, Plan(dp=4, tp=2, pp=2), 8, "oversubscribed"),
    (SMALL, Plan(dp=4, tp=2, pp=2, overlap=False), 8, "pod"),
    (SMALL, Plan(tp=4, pp=4, sequence_parallel=True, recompute="full"), 4, "pod"),
    (SMALL, Plan(dp=8, pp=2, schedule="interleaved", interleave=2, zero=1), 16, "a port a machine"),
    (SMALL, Plan(dp=4, pp=4, schedule="zero_bubble"), 16, "oversubscribed"),
    (SMALL, Plan(cp=2, dp=2, tp=4), 4, "pod"),
    (SMALL, Plan(dp=4, pp=2, cp=2), 16, "oversubscribed"),
    (SMALL, Plan(dp=8, tp=2, zero=3), 16, "a port a machine"),
    (SMALL, Plan(dp=8, tp=2, zero=3, zero_group=4), 16, "oversubscribed"),
    (SMALL, Plan(dp=8, tp=2, zero=2, zero_group=4), 16, "a port a machine"),
    (SMALL, Plan(dp=4, pp=4, zero=2), 16, "oversubscribed"),
    (replace(SMALL, tied=True), Plan(dp=4, tp=2, pp=2, zero=3), 8, "a port a machine"),
    (replace(SMALL, tied=True), Plan(dp=8, pp=2, zero=2, zero_group=4, overlap=False), 16, "a port a machine"),
    (SMALL, Plan(dp=16, zero=3, overlap=False, recompute="full"), 16, "oversubscribed"),
    (MIXED, Plan(dp=16, ep=4, overlap=False), 16, "oversubscribed"),
    (MIXED, Plan(dp=16, ep=4), 16, "oversubscribed"),
    (MIXED, Plan(dp=16, ep=4, zero=3), 16, "a port a machine"),
    # These were up to 6% off: what is only waiting for latencies leaves its links to others, and stages share them, too.
    (MIXED, Plan(dp=16, ep=4, zero=3), 16, "oversubscribed"),
    (MIXED, Plan(dp=16, ep=4, zero=2), 32, "oversubscribed"),
    (MIXED, Plan(dp=8, tp=2, ep=2, zero=2), 8, "oversubscribed"),
    (MIXED, Plan(dp=8, tp=2, ep=4, zero=3), 8, "oversubscribed"),
    (MIXED, Plan(dp=8, tp=2, ep=4), 8, "oversubscribed"),
    (MIXED, Plan(dp=4, tp=2, cp=2, ep=4, zero=3), 8, "oversubscribed"),
    (SMALL, Plan(dp=2, tp=8, zero=3, sequence_parallel=True), 4, "oversubscribed"),
    (SMALL, Plan(dp=4, tp=2, pp=2, zero=3), 16, "oversubscribed"),
    (SMALL, Plan(dp=4, tp=2, pp=2, zero=3, schedule="interleaved", interleave=2), 16, "oversubscribed"),
    (SMALL, Plan(dp=4, tp=2, pp=2, zero=3, schedule="interleaved", interleave=2, overlap=False), 16, "oversubscribed"),
    (SMALL, Plan(dp=4, tp=2, pp=2, zero=1, schedule="interleaved", interleave=2), 16, "oversubscribed"),
    (replace(SMALL, tied=True), Plan(dp=4, tp=2, pp=2, zero=3), 8, "oversubscribed"),
]


@pytest.mark.parametrize(("model", "plan", "batch", "name"), CASES, ids=[f"{plan} {name}" for _, plan, _, name in CASES])
def test_a_priced_step_takes_what_its_messages_take(model: Transformer, plan: Plan, batch: int, name: str) -> None:
    job = described(model, plan, CLUSTERS[name], batch)
    assert Prediction(job, CLUSTERS[name]).time == pytest.approx(by_messages(job, CLUSTERS[name]).time, rel=0.02)


def test_messages_between_stages_share_ports_with_sums_of_gradients() -> None:
    """In the last passes each has half of a port; whoever leaves that out is 6% too fast."""
    model = Transformer(layers=8, hidden=4096, heads=32, vocab=32000, sequence=2048, dropout=0.1)
    plan, pod = Plan(dp=2, tp=8, pp=2, schedule="interleaved", interleave=4, micro_batch=2), dgx_a100_pod(4)
    job = described(model, plan, pod, 16)
    assert Prediction(job, pod).time == pytest.approx(by_messages(job, pod).time, rel=0.02)


@pytest.mark.parametrize(("model", "plan", "batch", "name"), CASES, ids=[f"{plan} {name}" for _, plan, _, name in CASES])
def test_to_overlap_is_never_slower(model: Transformer, plan: Plan, batch: int, name: str) -> None:
    """Gradients that travel by unit, behind one another, cost some latencies more than all at once: hence a thousandth."""
    plans = (replace(plan, overlap=overlap) for overlap in (True, False))
    meanwhile, after = (described(model, one, CLUSTERS[name], batch) for one in plans)
    assert Prediction(meanwhile, CLUSTERS[name]).time <= 1.001 * Prediction(after, CLUSTERS[name]).time


MESH = Plan(dp=8, tp=2, zero=3)
BESIDE = [
    (("dp", "all_gather"), ("dp", "reduce_scatter")), (("dp", "all_reduce"), ("tp", "all_reduce")),
    (("dp", "all_gather"), ("edp", "reduce_scatter")), (("ep", "all_to_all"), ("edp", "all_gather")),
]  # fmt: skip


def both(prices: Prices, two: Sequence[tuple[str, str]], sizes: Sequence[int], simulated: bool) -> list[float]:
    """When each of two collectives that begin at once is over everywhere: message by message, or by price."""

    def live(comm: Communicator | None) -> list[float]:
        time = Time(prices)
        world = Clock(time) if comm is None else Groups(comm, job, priced)
        ends: list[float] = []

        def program() -> None:
            started = [world.start(*asked, nbytes) for asked, nbytes in zip(two, sizes, strict=True)]
            for one in started:
                world.wait(one)
                ends.append(time.now if comm is None else comm.now())

        program() if comm is not None else time.run([program])
        return ends

    priced = {asked: prices.price(*asked) for asked in two}
    job = described(MIXED if prices.plan.ep > 1 else SMALL, prices.plan, prices.cluster, prices.plan.dp)
    if not simulated:
        return live(None)
    run = d2lps.simulate(live, prices.reached, ranks=prices.cluster.devices, device="meta", trace=False)
    return list(map(max, zip(*run, strict=True)))


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("two", BESIDE, ids=str)
def test_two_at_once_take_what_their_messages_take(name: str, two: Sequence[tuple[str, str]]) -> None:
    prices = Prices(replace(MESH, ep=2 if any("ep" in axis for axis, _ in two) else 1), CLUSTERS[name])
    whole = max(prices(*asked, 1 << 28) for asked in two)
    sizes = [round((1 << 28) * whole / prices(*asked, 1 << 28)) for asked in two]
    told = both(prices, two, sizes, simulated=False)
    assert told == pytest.approx(both(prices, two, sizes, simulated=True), rel=0.02)


def test_latencies_are_no_longer_beside_others() -> None:
    """Of few bytes hardly anything is on a link at a time: as many messages as like go beside them."""
    prices, two = Prices(MESH, NARROW), (("dp", "all_gather"), ("dp", "reduce_scatter"))
    told, alone = both(prices, two, [64, 64], simulated=False), [prices(*asked, 64) for asked in two]
    assert told == pytest.approx(alone, rel=0.01)
    assert told == pytest.approx(both(prices, two, [64, 64], simulated=True), rel=0.01)


@pytest.mark.parametrize("plan", [
    Plan(dp=4, tp=2, pp=2), Plan(dp=4, tp=2, pp=2, zero=1, schedule="interleaved", interleave=2), Plan(dp=2, cp=4, pp=2),
    Plan(dp=2, tp=4, pp=2, zero=1, schedule="zero_bubble"), Plan(tp=8, pp=2, sequence_parallel=True),
], ids=str)  # fmt: skip
def test_passes_that_meet_nothing_last_equally_long(plan: Plan, monkeypatch: Any) -> None:
    job, prices = described(SMALL, plan, POD, 8 * plan.dp), Prices(plan, POD)
    assert priced._alone(job, LinkLoads(prices)) == {0, 1}
    told = play(job, prices, job.micro_batches)
    monkeypatch.setattr(priced, "_alone", lambda *_: set())  # as if something might
    found = play(job, prices, job.micro_batches)
    assert told.time == EQUAL(found.time) and told.done == EQUAL(found.done)


LONG = [
    *(Plan(dp=2, pp=4, schedule=schedule, zero=zero) for schedule in ("one_f_one_b", "zero_bubble") for zero in (0, 3)),
    *(Plan(dp=2, pp=4, schedule="interleaved", interleave=2, zero=zero) for zero in range(4)), Plan(dp=4, pp=2, schedule="gpipe"),
    *(Plan(dp=8, zero=zero) for zero in (1, 2, 3)), Plan(dp=4, tp=2, zero=3, zero_group=2), Plan(tp=2, pp=4),
    Plan(dp=2, tp=2, pp=2, recompute="full"), Plan(dp=2, cp=2, pp=2),
]  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("plan", LONG, ids=str)
def test_a_long_step_continued_is_the_step_played(plan: Plan, overlap: bool) -> None:
    model = replace(SMALL, layers=8)
    plan = replace(plan, overlap=overlap)
    job = described(model, plan, POD, 24 * plan.dp, Calibration(overhead=1e-4))
    assert Prediction(job, POD).time == EQUAL(play(job, Prices(plan, POD), 24).time)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for _, plan, batch, _ in CASES[:8]:
        told = predict(SMALL, plan, POD, 2 * batch)
        assert sum(told.parts.values()) == EQUAL(told.time)
        assert told.parts["bubble"] >= -1e-9 * told.time and (told.parts["bubble"] > 1e-9) == (plan.pp > 1)
        assert told.trace.ranks == plan.pp


# ---- this machine -------------------------------------------------------------------------------------------------------


def test_a_described_machine_is_measured_as_described() -> None:
    wanted = star(4, 3e9, 2e-4, Device(5e10, 1e9, 1e10))
    found = d2lps.simulate(measured, wanted, trace=False)[3]
    assert found.bandwidth == EQUAL(wanted.bandwidth) and found.latency == EQUAL(wanted.latency)
    device = found.device("gpu3")
    assert (device.flops, device.memory_bandwidth) == EQUAL((5e10, 1e10))


def test_one_rank_alone_has_no_link_to_measure() -> None:
    with pytest.raises(ValueError, match="one rank alone"):
        d2lps.simulate(measured, star(1, 1e9))


def test_calibrating_finds_what_made_the_steps() -> None:
    wanted = Calibration(efficiency=0.61, overhead=3e-4)
    plans = Plan(dp=16), Plan(dp=2, tp=8, micro_batch=4)
    rows = [(SMALL, plan, 32, predict(SMALL, plan, POD, 32, wanted).time) for plan in plans]
    found = calibrate(rows, POD)
    assert (found.efficiency, found.overhead) == pytest.approx((0.61, 3e-4), rel=1e-4)
    one = calibrate([(*rows[0][:3], 2 * rows[0][3])], POD)
    assert one.efficiency < 0.61 and one.overhead == Calibration().overhead
    again = calibrate([(*rows[0][:3], factor * rows[0][3]) for factor in (1.99, 2.01)], POD)  # still one step
    assert (again.efficiency, again.overhead) == pytest.approx((one.efficiency, one.overhead), rel=1e-3)


# ---- what can't be --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "cluster", "batch", "told"),
    [
        (Plan(dp=32), POD, 32, "a plan of 32 ranks, and 2 x DGX A100 has 16 devices"),
        (Plan(dp=2), star(2, 1e9), 2, r"star\(2\): all devices must be alike, and say how fast they are"),
        (Plan(dp=16), POD, 24, "batch=24 is no multiple of dp=16 x micro_batch=1"),
        (Plan(dp=16), POD, 0, "batch=0 is not a whole number"),
        (Plan(tp=3), POD, 2, "heads=16 can't be shared out evenly to tp=3"),
        (Plan(pp=2, schedule="interleaved", interleave=2), POD, 3, "micro_batches=3 is no multiple of ranks=2"),
    ],
)
def test_what_cant_be_is_told_with_the_numbers(plan: Plan, cluster: Topology, batch: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        predict(SMALL, plan, cluster, batch)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((Plan(), SMALL, POD, 1), "Plan.* is no Transformer"),
        ((SMALL, Plan(), "pod", 1), "'pod' is no Topology"),
        ((SMALL, Plan(), POD, 1, 0), "0 is no Calibration"),
    ],
)
def test_what_is_something_else_is_named(given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        predict(*given)


def test_nothing_is_calibrated_with_nothing() -> None:
    with pytest.raises(ValueError, match="one measured row at least"):
        calibrate([], POD)


@pytest.mark.parametrize(("field", "value"), [("efficiency", 0), ("efficiency", 1.1), ("memory", -0.5), ("overhead", -1e-6)])
def test_a_calibration_that_is_none(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r} is not"):
        Calibration(**{field: value})


def test_memory_that_is_not_there_is_told_with_its_holders() -> None:
    big = replace(SMALL, layers=48, hidden=6144, heads=64)
    with pytest.raises(OutOfMemory, match=r"'gradients' needs .* held there: weights 44,293,251,072 B"):
        predict(big, Plan(dp=16), POD, 16)


def test_search_puts_the_fastest_first_and_says_what_the_others_lose() -> None:
    found = search(SMALL, POD, 32, micro_batches=(1, 2))
    times = [prediction.time for prediction in found.found]
    assert times == sorted(times) and found.best.time == times[0] and len(times) > 20
    assert all(sum(holders.values()) > found.limit == A100.memory for _, holders in found.lost)
    assert found.why(found.best) == "+0 s" and found.why(found.found[-1]).startswith(f"{times[-1] - times[0]:+.2g} s: ")
    for one in found.found[1:]:  # a part that is no smaller a difference than any that is not told, gain or loss
        told = [word.split() for word in found.why(one).partition(": ")[2].split(", ")]
        late = {label: one.parts[label] - found.best.parts[label] for label in one.parts}
        assert abs(late[told[0][0]]) == max(map(abs, late.values())) and f"{late[told[0][0]]:+.2g}" == told[0][1]
    with pytest.raises(ValueError, match="no plan fits"):
        search(replace(SMALL, layers=96, hidden=12288, heads=96), POD, 16, micro_batches=(1,))


LINKS = [{"a": 1.0}, {"a": 1.0, "b": 0.5}, {"b": 1.0}, {"b": 1.0, "c": 1.0}, {"c": 1.0}, {"d": 1.0}]
Sent = list[tuple[int, int, list[tuple[int, int]]]]  # when, by which links, and each phase's latency and seconds alone


def by_small_steps(sent: Sent) -> list[float]:
    """When each is there: from one moment to the next at which anything at all begins or ends, for all who are on links."""
    loads = [LinkLoad({(link, link): share for link, share in links.items()}, 1.0) for links in LINKS]
    phases, ends = [[list(map(float, phase)) for phase in one[2]] for one in sent], [0.0] * len(sent)
    waits, now = [float(one[0]) for one in sent], 0.0
    while any(phases):
        there = [one for one, left in enumerate(phases) if left]
        flows = [one for one in there if waits[one] <= now and phases[one][0][0] <= 1e-9]
        rates = dict(zip(flows, speeds([loads[sent[one][1]] for one in flows]), strict=True))
        until = {one: phases[one][0][1] / rates[one] if one in rates else phases[one][0][0] or 0.0 for one in there}
        until |= {one: waits[one] - now for one in there if waits[one] > now}
        least = min(until.values())
        for one in there:
            if waits[one] <= now:
                phases[one][0][one in rates] -= least * rates.get(one, 1.0)
                if one in rates and phases[one][0][1] <= 1e-9:
                    phases[one].pop(0)
                    ends[one] = now + least
        now += least
    return ends


PHASE = st.tuples(st.integers(0, 4), st.integers(1, 6))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.lists(PHASE, min_size=1, max_size=3)), min_size=1, max_size=7))
@settings(max_examples=300, deadline=None)
def test_who_comes_when_whose_end_was_foreseen_is_shared_with(sent: Sent) -> None:
    time = Time(Prices(Plan(), star(1, 1e9)))
    loads = [LinkLoad({(link, link): share for link, share in links.items()}, 1.0) for links in LINKS]
    ends = [0.0] * len(sent)

    def one(number: int) -> None:
        when, links, phases = sent[number]
        time.sleep(when)
        flow = Flow([(latency, loads[links], seconds) for latency, seconds in phases])
        time.ask(flow)
        time.wait(flow)
        ends[number] = time.now

    time.run([partial(one, number) for number in range(len(sent))])
    assert ends == pytest.approx(by_small_steps(sent))
