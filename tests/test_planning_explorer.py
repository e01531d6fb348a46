"""The planning explorer: what leaves a unit is what a trace shows, and its page goes down to a device and back."""

from typing import Any

import pytest
from widget_page import shown

from d2lps.parallel import Plan, Transformer, predict
from d2lps.parallel.prediction.messages import by_messages
from d2lps.planning import pods, predict_on_pods
from d2lps.topology import dgx_h100_pod
from d2lps.widgets import PlanningExplorer

SMALL = Transformer(layers=2, hidden=1024, heads=16, vocab=51200, sequence=512)
CLUSTER = pods(2, per_pod=4, oversubscription=4)
PLANS = {"tp 8": Plan(dp=4, tp=8, pp=2), "tp 2": Plan(dp=16, tp=2, pp=2, zero=1, overlap=False)}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return {name: predict_on_pods(SMALL, plan, CLUSTER, 2 * plan.dp) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def explorer(told: dict[str, Any]) -> PlanningExplorer:
    return PlanningExplorer(told)


def levels(explorer: PlanningExplorer, job: int = 0) -> dict[str, Any]:
    return {level["kind"]: level for level in explorer.data["jobs"][job]["levels"]}


def test_levels_have_what_their_parts_have(explorer: PlanningExplorer) -> None:
    found = levels(explorer)
    assert [level["count"] for level in found.values()] == [2, 2, 2, 8, 1]
    assert [level["devices"] for level in found.values()] == [64, 32, 16, 8, 1]
    assert found["pod"]["up"] == 32 * 50e9 / 4 and found["pod"]["over"] == 4
    assert [found[kind]["over"] for kind in ("rack", "machine", "device")] == [1, 1, 1]
    assert found["cluster"]["watts"] == 8 * 10_200 and found["cluster"]["up"] == 0


@pytest.mark.parametrize("name", PLANS)
def test_bytes_that_leave_a_pod_a_machine_and_a_device_are_the_traces(explorer: PlanningExplorer, told: Any, name: str) -> None:
    found = levels(explorer, list(PLANS).index(name))
    moved = by_messages(told[name].job, CLUSTER).trace.bytes_on_links()
    nodes = CLUSTER.graph.nodes
    out = {node: n for (node, to), n in moved.items() if node in CLUSTER.devices and str(to).startswith("pod")}
    machine = [sum(n for node, n in out.items() if nodes[node]["machine"] == f"node{k}") for k in range(8)]
    inside = [n for (node, to), n in moved.items() if node in CLUSTER.devices and not str(to).startswith("pod")]
    pod = [n for (node, to), n in moved.items() if to == "core"]
    wanted = {"pod": max(pod, default=0), "machine": max(machine), "device": max(out.values(), default=0)}
    for kind, nbytes in wanted.items():
        assert sum(found[kind]["sent"].values()) == pytest.approx(nbytes, rel=0.02), kind  # a piece of a ring is whole bytes
    assert sum(found["device"]["sent_inside"].values()) == pytest.approx(max(inside, default=0), rel=0.02)


@pytest.mark.parametrize(("given", "word"), [
    ({}, "needs at least one"),
    ({"flat": lambda: predict(SMALL, PLANS["tp 8"], dgx_h100_pod(8), 8)}, "has no pods"),
    ({"rack": lambda: predict_on_pods(SMALL, PLANS["tp 8"], CLUSTER, 8)}, "rack=3 machines: a pod's 4"),
])  # fmt: skip
def test_what_cannot_be_explored_is_named(given: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        PlanningExplorer({name: make() for name, make in given.items()}, rack=3 if "rack" in given else 2)


def test_it_says_what_it_shows(explorer: PlanningExplorer) -> None:
    assert repr(explorer).startswith("PlanningExplorer: tp 8, ") and "pod: 2 parts, 4 : 1" in repr(explorer)


def test_a_reader_goes_down_to_a_device_and_back(browser: Any, explorer: PlanningExplorer) -> None:
    with shown(browser, explorer) as page:
        drawn, path = page.locator("svg.unit"), page.locator(".path button")
        assert page.locator(".part").count() == 2 and path.count() == 1
        page.locator('[data-part="1"]').click()
        assert page.evaluate("model.get('path')") == [1] and path.all_inner_texts()[1].endswith("pod 1")
        assert "4 : 1" in page.locator(".facts").inner_text() and page.locator('.row[data-axis="dp"]').count() <= 1
        drawn.press("ArrowRight")
        assert drawn.get_attribute("aria-valuenow") == "1"
        for _ in range(3):
            drawn.press("Enter")
        assert page.evaluate("model.get('path')") == [1, 1, 0, 0] and page.locator('.row[data-axis="tp"]').count() == 1
        drawn.press("Enter")  # nothing is inside
        assert path.count() == 5
        drawn.press("Escape")
        assert page.evaluate("model.get('path')") == [1, 1, 0]
        path.nth(0).click()
        assert page.evaluate("model.get('path')") == []


def test_another_job_begins_at_the_top(browser: Any, explorer: PlanningExplorer) -> None:
    with shown(browser, explorer, width=390) as page:
        page.locator('[data-part="0"]').click()
        said = page.locator(".result").inner_text()
        page.locator('[data-action="job"]').select_option("1")
        assert page.evaluate("model.get('path')") == [] and page.locator(".result").inner_text() != said
