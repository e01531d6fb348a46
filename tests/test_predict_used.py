"""Predictions as anyone first asks for them, and as someone who doubts them does."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

import d2lps
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.parallel import Calibration, Plan, Transformer, calibrate, predict, search
from d2lps.parallel.prediction.messages import by_messages
from d2lps.parallel.prediction.prices import Prices
from d2lps.topology import A100, Topology, dgx_a100, dgx_a100_pod, star

SMALL = Transformer(layers=4, hidden=256, heads=8, vocab=1024, sequence=256)


def test_a_plan_of_one_rank_waits_for_nobody() -> None:
    prediction = predict(SMALL, Plan(), dgx_a100(), 8)
    assert prediction.parts["dp"] == 0 and prediction.time == predict(SMALL, Plan(overlap=False), dgx_a100(), 8).time


@pytest.mark.parametrize("batch", [0, -8, 8.0, True, "8", None, nan, inf])
def test_a_batch_is_a_number_of_sequences(batch: Any) -> None:
    for asked in (lambda: predict(SMALL, Plan(), dgx_a100(), batch), lambda: search(SMALL, dgx_a100(), batch)):
        with pytest.raises(ValueError, match=r"batch=.* is not a whole number from 1 up"):
            asked()


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "vocab", "sequence", "ffn", "kv_heads", "experts", "top_k"])
@pytest.mark.parametrize("value", [0, -8, 8.0, True, "8", nan])
def test_sizes_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* is not a whole number from 1 up"):
        replace(SMALL, **{name: value})


@pytest.mark.parametrize("seconds", [0, -1.0, True, "1", None, nan, inf])
def test_what_was_never_measured_is_not_fitted(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds=.* was never measured"):
        calibrate([(SMALL, Plan(), 8, seconds)], dgx_a100())


def test_a_ranking_is_one_line_however_long() -> None:
    found = search(SMALL, dgx_a100(), 64)
    assert repr(found) == f"<Ranking: {len(found.found)} plans fit, 0 do not; the best is {found.best}>"


def test_a_search_without_a_result_says_why() -> None:
    with pytest.raises(ValueError, match="no plan fits 16 ranks: ep=2 shares out experts, and the model has none"):
        search(SMALL, dgx_a100_pod(2), 64, like=Plan(ep=2))
    with pytest.raises(ValueError, match=r"no plan fits 8 ranks: dp=4 .* makes 4 ranks, and there are 8"):
        search(SMALL, dgx_a100(), 64, plans=[Plan(dp=4)])
    with pytest.raises(ValueError, match="none was named"):
        search(SMALL, dgx_a100(), 64, plans=[])
    with pytest.raises(ValueError, match=r"no plan fits into 80 GB a device; the nearest of 1, dp=8, needs weights [\d.]+"):
        search(replace(SMALL, hidden=16384, layers=8), dgx_a100(), 64, plans=[Plan(dp=8)])
    with pytest.raises(ValueError, match=r"ranks=2\.0 is not a whole number"):
        search(SMALL, dgx_a100(), 64, ranks=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["recompute", "zero", "micro_batches"])
@pytest.mark.parametrize("given", ["full", 3, None, (), iter("a")], ids=["text", "number", "none", "empty", "iterator"])
def test_what_a_search_is_to_try_are_several(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*: give all that are to be tried, as in {name}=\("):
        search(SMALL, dgx_a100(), 64, **{name: given})


@pytest.mark.parametrize("odd", [{"like": "dp=4"}, {"like": {}}, {"plans": Plan(dp=8)}, {"plans": ["dp=4"]}], ids=str)
def test_a_search_is_given_plans(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is no Plan|give several Plans"):
        search(SMALL, dgx_a100(), 64, **odd)


def test_a_search_that_nothing_suits_says_like_what() -> None:
    with pytest.raises(ValueError, match="no plan fits 8 ranks: no degrees of tp, pp and dp go with cp=3"):
        search(SMALL, dgx_a100(), 64, like=Plan(cp=3))


ODD = [("zero", 1.0), ("zero", True), ("sequence_parallel", 1), ("overlap", 3), ("recompute", ["full"])]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_a_plans_fields_are_what_they_are(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        Plan(**{name: value})


def test_a_search_keeps_the_schedule_that_it_is_given() -> None:
    found = search(SMALL, dgx_a100(), 64, like=Plan(schedule="zero_bubble"), micro_batches=[8], zero=[0], recompute=["none"])
    assert {one.job.plan.schedule for one in found.found} == {"zero_bubble", "interleaved"}


@pytest.mark.parametrize("plan", [Plan(dp=2, tp=2, overlap=False), Plan(pp=4), Plan(dp=4, zero=1)], ids=str)
def test_one_slow_link_is_seen_in_whichever_group_it_is(plan: Plan) -> None:
    even = star(4, 10e9, 1e-5, A100)
    slow = even.slowed(("gpu2", "switch"), 10)
    prediction = predict(SMALL, plan, slow, 8)
    assert prediction.time > 1.01 * predict(SMALL, plan, even, 8).time
    assert prediction.time == pytest.approx(by_messages(prediction.job, slow).time, rel=0.02)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("batch", [8, 64])
def test_a_bubble_is_the_formulas_where_stages_are_equal(schedule: str, chunks: int, batch: int) -> None:
    model = Transformer(layers=16, hidden=4096, heads=32, vocab=32, sequence=2048)
    roomy = dgx_a100(device=replace(A100, memory=1e15))
    parts = predict(model, Plan(pp=4, schedule=schedule, interleave=chunks), roomy, batch, Calibration(overhead=0.0)).parts
    assert parts["bubble"] / parts["compute"] == pytest.approx(3 / (chunks * batch), rel=0.01)


def test_a_slow_machine_far_away_is_seen() -> None:
    for slow in (dgx_a100_pod(4).straggler("node2/gpu5", 4), dgx_a100_pod(4).slowed(("node3/gpu1", "network"), 4)):
        prices, plan = Prices(Plan(dp=4, tp=8), slow), Plan(dp=4, tp=8)
        assert prices("dp", "all_reduce", 1e8) > 3 * Prices(plan, dgx_a100_pod(4))("dp", "all_reduce", 1e8)


def predicted(cluster: Topology) -> None:
    predict(SMALL, Plan(dp=2, tp=8), cluster, 8)


def reduced(cluster: Topology) -> None:
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.ones(64), algorithm="auto")

    d2lps.simulate(work, cluster)


@pytest.mark.parametrize("use", [predicted, reduced])
def test_what_is_known_of_a_cluster_goes_with_it(use: Callable[[Topology], object]) -> None:
    """One of 100,000 devices, with its prices, is more than a GB."""
    cluster = dgx_a100_pod(2)
    use(cluster)
    gone = weakref.ref(cluster)
    del cluster
    gc.collect()
    assert gone() is None
