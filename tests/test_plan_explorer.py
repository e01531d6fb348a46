"""The plan explorer: of a plan it has what `predict` says, of what a device sends what a trace shows; and its page moves."""

from __future__ import annotations

import base64
import json
import random
import zlib
from itertools import product
from typing import Any

import pytest
from widget_page import shown

import d2lps
from d2lps.comm import OutOfMemory
from d2lps.parallel import Plan, Transformer, predict
from d2lps.parallel.prediction.prices import Prices, axis_groups
from d2lps.topology import dgx_a100_pod, dgx_h100_pod
from d2lps.widgets import PlanExplorer
from d2lps.widgets.plan_answers import _bytes
from d2lps.widgets.plan_explorer import FINE, HOLDERS, OPTIONS, PARTS

MODELS = {
    "wide": Transformer(layers=12, hidden=6144, heads=48, vocab=51200, sequence=2048, dropout=0.1),
    "odd": Transformer(layers=6, hidden=1536, heads=12, vocab=51200, sequence=1024),
}
CLUSTERS = {"16 A100": dgx_a100_pod(2), "32 H100": dgx_h100_pod(4)}
BATCH = {"wide": 64, "odd": 96}
CHOICES: dict[str, Any] = {"tp": (1, 2, 8), "pp": (1, 2), "micro_batch": (1, 4), "interleave": (1, 2), "zero": (0, 3)}
CHOICES["recompute"] = ("none", "full")
ALONE = "interleave=2 asks for a pipeline, and pp=1 is none"


@pytest.fixture(scope="module")
def explorer() -> PlanExplorer:
    return PlanExplorer(MODELS, CLUSTERS, BATCH, **CHOICES)


def table(explorer: PlanExplorer) -> dict[str, Any]:
    [packed] = json.loads(zlib.decompress(base64.b64decode(explorer.data["plans"])))
    return packed


def rows(explorer: PlanExplorer) -> list[tuple[dict[str, Any], int, list[float], list[float]]]:
    """Each plan's choices, its state, what it holds, and what is known where it fits."""
    packed = table(explorer)
    held, fits = (zip(*(map(float, column.split()) for column in packed[name]), strict=True) for name in ("held", "fits"))
    found = []
    for state, values in zip(map(int, packed["state"].split()), product(*explorer.options.values()), strict=True):
        choice = dict(zip(explorer.options, values, strict=True))
        found.append((choice, state, list(next(held)) if state < 1 else [], list(next(fits)) if state == 0 else []))
    return found


def plan_of(choice: dict[str, Any], ranks: int) -> Plan:
    fields = {name: choice[name] for name in OPTIONS}
    schedule = "interleaved" if choice["interleave"] > 1 else "one_f_one_b"
    return Plan(dp=max(1, ranks // (choice["tp"] * choice["pp"])), schedule=schedule, **fields)


# ---- what it has is what is predicted ---------------------------------------------------------------------------------


def test_every_kind_of_answer_is_predicts(explorer: PlanExplorer) -> None:
    why, all_rows = table(explorer)["why"], rows(explorer)
    for kind in (lambda state: state == 0, lambda state: state < 0, lambda state: state > 0):
        of_kind = [row for row in all_rows if kind(row[1])]
        for choice, state, held, fits in random.Random(0).sample(of_kind, 12):
            model, cluster = MODELS[choice["model"]], CLUSTERS[choice["cluster"]]
            plan = plan_of(choice, len(cluster.devices))
            if state > 0:
                told = why[state - 1]
                assert told == (ALONE if plan.interleave > 1 == plan.pp else refused(plan, model, choice))
                continue
            if state < 0:
                with pytest.raises(OutOfMemory):
                    predict(model, plan, cluster, BATCH[choice["model"]])
                assert sum(held) > FINE
                continue
            found = predict(model, plan, cluster, BATCH[choice["model"]])
            limit = explorer.data["clusters"][list(CLUSTERS).index(choice["cluster"])]["limit"]
            assert fits[0] == pytest.approx(found.time, rel=1e-3)
            assert fits[1 : 1 + len(PARTS)] == pytest.approx([FINE * found.parts[part] / found.time for part in PARTS], abs=0.51)
            assert held == pytest.approx([FINE * found.held.get(holder, 0) / limit for holder in HOLDERS], abs=0.51)


def refused(plan: Plan, model: Transformer, choice: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as wrong:
        plan.check(model, BATCH[choice["model"]], len(CLUSTERS[choice["cluster"]].devices))
    return str(wrong.value)


def test_it_opens_with_the_fastest_of_the_first_model_and_cluster(explorer: PlanExplorer) -> None:
    first = [fits for at, _, _, fits in rows(explorer) if (at["model"], at["cluster"]) == ("wide", "16 A100") and fits]
    assert explorer.answer.prediction is not None
    assert explorer.answer.prediction.time == pytest.approx(min(time for time, *_ in first), rel=1e-3)
    assert repr(explorer).startswith(f"PlanExplorer: {len(rows(explorer)):,} plans, ") and "wide on 16 A100" in repr(explorer)


def test_thousands_of_plans_are_small(explorer: PlanExplorer) -> None:
    count = len(rows(explorer))
    assert count == 2 * 2 * 3 * 2 * 2 * 2 * 2 * 2 * 2
    assert len(explorer.data["plans"]) < 25 * count


# ---- what a device sends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "axis"), [
    (Plan(dp=4, tp=4), "tp"), (Plan(dp=4, tp=4), "dp"), (Plan(dp=2, tp=8), "dp"), (Plan(dp=16), "dp"), (Plan(dp=8, pp=2), "dp"),
])  # fmt: skip
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_bytes_inside_a_machine_and_out_of_it_are_the_traces(plan: Plan, axis: str, collective: str) -> None:
    cluster, nbytes = dgx_a100_pod(2), 1 << 20
    prices = Prices(plan, cluster)
    price, ranks = prices.price(axis, collective), [cluster.devices[rank] for rank in axis_groups(plan, axis)[0]]
    trace = d2lps.simulate(price.run, cluster, nbytes, ranks=ranks, device="meta", trace=True).trace
    moved = trace.bytes_on_links()
    nodes = cluster.graph.nodes
    out = sum(n for (src, dst), n in moved.items() if src in cluster.devices and nodes[dst].get("machine") is None)
    within = sum(n for (src, dst), n in moved.items() if src in cluster.devices and nodes[dst].get("machine") is not None)
    assert _bytes(prices, axis, collective) == pytest.approx((within / nbytes / len(ranks), out / nbytes / len(ranks)), abs=1e-6)


def test_a_step_of_data_parallelism_sends_its_gradients_twice_around() -> None:
    model = MODELS["odd"]
    alone = {name: values[:1] for name, values in OPTIONS.items()}
    explorer = PlanExplorer({"odd": model}, {"16": dgx_a100_pod(2)}, 96, first=Plan(dp=16), **alone)
    inside, across = explorer.answer.links["dp"]
    gradients = explorer.answer.held["gradients"] / 2  # six micro-batches are added up in FP32, and travel in BF16
    assert inside == pytest.approx(2 * 7 / 8 * gradients) and across == pytest.approx(2 / 2 / 8 * gradients)
    assert explorer.answer.links["tp"] == (0, 0)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "told"), [
    ({"models": {}}, "at least one of each"), ({"clusters": {}}, "at least one of each"),
    ({"cp": (1, 2)}, "cp: there is no such choice"), ({"zero": (0, 4)}, "zero=4 is none of the stages"),
    ({"first": Plan(dp=8, tp=2)}, "first=dp=8 tp=2 is not among the plans"), ({"tp": ()}, "tp=() leaves nothing"),
])  # fmt: skip
def test_what_is_no_choice_is_named(changed: dict[str, Any], told: str) -> None:
    given = {"models": {"odd": MODELS["odd"]}, "clusters": {"16": dgx_a100_pod(2)}, "batch": 96, "tp": (1,), "pp": (1,)}
    with pytest.raises(ValueError, match=told.replace("(", r"\(").replace(")", r"\)")):
        PlanExplorer(**{**given, **changed})


# ---- the page ------------------------------------------------------------------------------------------------------------


def chosen(explorer: PlanExplorer, **wanted: Any) -> list[int]:
    options = zip(explorer.options.items(), explorer.chosen, strict=True)
    return [values.index(wanted[name]) if name in wanted else now for (name, values), now in options]


def cluster(page: Any) -> str:
    return page.locator(".cluster").evaluate("svg => svg.outerHTML")


def test_a_reader_moves_the_degrees(browser: Any, explorer: PlanExplorer) -> None:
    with shown(browser, explorer) as page:
        page.wait_for_selector(".machine")
        assert page.locator(".machine").count() == 2 and page.locator('[data-action="fastest"]').is_disabled()
        before = cluster(page)
        page.locator('[data-action="cluster"]').select_option("1")
        assert page.locator(".machine").count() == 4
        page.locator('[data-action="cluster"]').select_option("0")
        assert cluster(page) == before
        page.locator('.value:has([data-action="recompute"][value="1"])').click()  # beside it, as its label has said
        now = page.locator('.value:has([data-action="recompute"]:checked) small').inner_text()
        assert page.evaluate("model.get('chosen')")[6] == 1
        assert page.locator(".result").inner_text().startswith(now) and now.endswith(" s")
        page.locator('[data-action="recompute"]:checked').press("ArrowLeft")
        assert page.evaluate("model.get('chosen')")[6] == 0
        page.locator('[data-action="recompute"]:checked').press("ArrowRight")
        page.locator('[data-action="fastest"]').click()
        assert page.evaluate("model.get('chosen')") == explorer.chosen and cluster(page) == before


def test_what_has_no_room_and_what_cannot_be_are_told(browser: Any, explorer: PlanExplorer) -> None:
    with shown(browser, explorer, width=390) as page:
        page.wait_for_selector(".machine")
        result = page.locator(".result")
        heavy: dict[str, Any] = {"tp": 1, "pp": 1, "micro_batch": 4, "interleave": 1, "recompute": "none", "zero": 0}
        page.evaluate("chosen => model.set('chosen', chosen)", chosen(explorer, **heavy, sequence_parallel=False))
        assert result.inner_text().startswith("OutOfMemory: ") and "activations" in result.inner_text()
        assert page.locator(".memory .over").count() == 1 and "no step" in page.locator(".time").inner_text()
        page.evaluate("chosen => model.set('chosen', chosen)", chosen(explorer, tp=8, pp=2, interleave=1, model="odd"))
        assert "heads=12 can't be shared out evenly to tp=8" in result.inner_text()
        assert "no step" in page.locator(".memory").inner_text()


def test_the_groups_of_the_device_that_is_chosen(browser: Any, explorer: PlanExplorer) -> None:
    with shown(browser, explorer) as page:
        page.wait_for_selector(".machine")
        page.evaluate("chosen => model.set('chosen', chosen)", chosen(explorer, tp=2, pp=2, interleave=1))
        drawn = page.locator(".cluster")
        told = "16 devices; device 0 is in these groups: dp of 4, pp of 2, tp of 2. Arrow keys choose another device"
        assert drawn.get_attribute("aria-label") == told
        axes = page.locator(".cluster .way").evaluate_all("ways => ways.map((way) => way.dataset.axis)")
        assert sorted(axes) == ["dp", "pp", "tp"]
        before = cluster(page)
        drawn.press("ArrowRight")
        assert drawn.get_attribute("aria-valuenow") == "1" and cluster(page) != before
        x, y = drawn.evaluate("svg => { const { x, y } = svg.querySelector('.machine').getBoundingClientRect(); return [x, y] }")
        page.mouse.click(x + 4, y + 4)
        assert drawn.get_attribute("aria-valuenow") == "0"
