"""A step of parallel training as a picture: what its scene says of small runs, and the page in a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from beside import beside
from oracles import told
from widget_page import shown, there_and_back

import d2lps
from d2lps import Communicator
from d2lps.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from d2lps.parallel import Mesh, Plan, Transformer
from d2lps.topology import star
from d2lps.topology.device import Device
from d2lps.widgets import StepPlayer, plan_player
from d2lps.widgets.ready import _cluster, _step
from d2lps.widgets.step_scene import _ranks
from d2lps.widgets.step_story import _apart

CARD = Device(1e12, 1e9, 1e12)
SMALL = Transformer(layers=2, hidden=16, heads=2, vocab=96, sequence=8)


def two_axes(comm: Communicator) -> None:
    """On 4 ranks: a block of a second, an all-reduce along tp, a block, an all-gather along dp; 8 B held from the first on."""
    mesh = Mesh(comm, dp=2, tp=2)
    comm.sleep(1.0, "F0")
    release = comm.hold(8, "activations block0")
    with mesh.tp.about("x", "B T D", "B T D", partial=True):
        all_reduce(mesh.tp, torch.zeros(4, device=comm.device))
    comm.sleep(2.0, "B0")
    release()
    with mesh.dp.about("block0 weights", "P_*", "P"):
        all_gather(mesh.dp, [torch.zeros(2, device=comm.device) for _ in range(2)], torch.zeros(2, device=comm.device))


def simulated() -> StepPlayer:
    """8 bytes take a second."""
    return StepPlayer(d2lps.simulate(two_axes, star(4, 8.0, 0, CARD), trace=True).trace, title="Two axes")


def test_each_message_has_the_axis_of_its_group_and_each_card_its_place_in_the_mesh() -> None:
    scene = simulated().scene
    assert [(axis["name"], axis["size"]) for axis in scene["axes"]] == [("tp", 2), ("dp", 2)]
    names = {axis["style"]: axis["name"] for axis in scene["axes"]}
    sent = sorted((start, names[style], src, dst, end) for src, dst, start, end, _, style in scene["messages"])
    along_tp = [(t, "tp", src, dst, t + 1) for t in (1, 2) for src, dst in ((0, 1), (1, 0), (2, 3), (3, 2))]
    assert sent == along_tp + [(5, "dp", src, dst, 6) for src, dst in ((0, 2), (1, 3), (2, 0), (3, 1))]
    assert [(rank["x"], rank["y"]) for rank in scene["ranks"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("axes", "places"),
    [
        ({"dp": [(0, 1, 2, 3)], "ep": [(0, 1), (2, 3)]}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ({"cp": [(0, 1, 2, 3)], "dp": [(0, 1, 2, 3)]}, [(0, 0), (1, 0), (2, 0), (3, 0)]),
        ({"dp": [(0, 1), (2, 3)], "ep": [(0, 1), (2, 3)], "pp": [(0, 2), (1, 3)]}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
    ids=["experts of two ranks", "a sequence, for the gradients a batch", "all three"],
)
def test_an_axis_within_another_has_a_row_or_column_of_its_own(axes: Any, places: Any) -> None:
    assert [(rank["x"], rank["y"]) for rank in _ranks(4, axes)] == places


def test_a_shape_tells_which_piece_each_rank_has_before_and_after() -> None:
    tensor, other, weights, _ = simulated().scene["episodes"]
    assert (tensor["start"], tensor["end"], tensor["ranks"], other["ranks"]) == (1, 3, [0, 1], [2, 3])
    before, after = tensor["shapes"]
    assert (before["text"], before["partial"], before["own"]) == ("x[B_dp, T, D]{U_tp}", True, [0, 0])
    assert (after["text"], after["partial"]) == ("x[B_dp, T, D]", False)
    assert other["shapes"][0]["own"] == [1, 1] and before["grid"] == [1, 2]  # the other half of the batch
    before, after = weights["shapes"]
    assert (weights["about"], before["text"], before["own"]) == ("block0", "weights[P_dp]", [0, 1])
    assert (after["text"], after["grid"], after["own"]) == ("weights[P]", [1, 1], [-1, -1])


def test_a_step_leads_to_where_something_begins_or_ends_and_says_what_happens_until_then() -> None:
    stops = [(stop["t"], stop["label"], stop["say"]) for stop in simulated().scene["stops"]]
    assert stops == [
        (0, "start", "Nothing has been computed yet."),
        (1, "forward 0", "On all ranks."),
        (3, "all-reduce along tp: x[B_dp, T, D]{U_tp} → x[B_dp, T, D]", ""),
        (5, "backward 0", "On all ranks."),
        (6, "all-gather along dp: block0 weights[P_dp] → weights[P]", ""),
    ]
    assert StepPlayer(simulated_trace(), sentences={2: "Sums."}).scene["stops"][2]["say"] == "Sums."
    assert _apart([1, 2, 2.1, 2.6, 5], 0.5) == [1, 2.1, 2.6, 5]


def simulated_trace() -> Any:
    return d2lps.simulate(two_axes, star(4, 8.0, 0, CARD), trace=True).trace


def test_what_is_held_grows_and_shrinks() -> None:
    assert simulated().scene["held"] == [{"activations": [1, 8, 5, 0]}] * 4
    assert StepPlayer(simulated_trace(), since=2.0).scene["held"] == [{"activations": [0, 8, 3, 0]}] * 4


def test_what_was_before_is_left_out() -> None:
    scene = StepPlayer(simulated_trace(), since=2.0).scene
    assert scene["end"] == 4 and [block[1:5] for block in scene["blocks"]] == [[1, 3, "B", "B0"]] * 4
    assert {(start, end) for _, _, start, end, *_ in scene["messages"]} == {(0, 1), (3, 4)}


def test_the_shapes_say_which_collective_it_is() -> None:
    def work(comm: Communicator) -> None:
        tp = Mesh(comm, tp=2).tp
        half, one = torch.zeros(2), torch.zeros(1)
        with tp.about("x", "B T D", "B T_* D", partial=True):
            reduce_scatter(tp, one, [torch.zeros(1), torch.zeros(1)])
        comm.sleep(1.0)
        with tp.about("tokens", "E C_* D", "E_* C D"):
            all_to_all(tp, [torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1)])
        comm.sleep(1.0)
        with tp.about("grad x", "B T D", "B T D", partial=True):
            all_reduce(tp, half)
        comm.sleep(1.0)
        with tp.about("keys x", "B T_* D"):
            tp.sendrecv(one, 1 - tp.rank, torch.zeros(1), 1 - tp.rank)
        comm.sleep(1.0)
        all_reduce(tp, half)

    labels = [stop["label"] for stop in StepPlayer(d2lps.simulate(work, star(2, 8.0), trace=True).trace).scene["stops"]]
    said = [label for label in labels if "along" in label]
    assert said[:4] == [
        "reduce-scatter along tp: x[B, T, D]{U_tp} → x[B, T_tp, D]",
        "all-to-all along tp: tokens[E, C_tp, D] → tokens[E_tp, C, D]",
        "all-reduce along tp: grad x[B, T, D]{U_tp} → grad x[B, T, D]",
        "send along tp: keys x[B, T_tp, D]",
    ]
    assert said[4:] == ["reduce-scatter along tp", "all-gather along tp"]  # nobody has said what it is about


def test_blocks_are_read_in_each_of_their_spellings() -> None:
    labels = ["1F0", "3F0", "forward 2 stage 1", "backward 2 stage 1", "weights 2 stage 1", "optimizer"]
    trace = beside(told("", ""), *((0, "compute", label, float(k), k + 1.0) for k, label in enumerate(labels)))
    found = [(block[3], block[4]) for block in StepPlayer(trace).scene["blocks"]]
    assert found == [("F", "1F0"), ("F", "3F0"), ("F", "1F2"), ("B", "1B2"), ("W", "1W2"), ("", "optimizer")]
    trace = beside(told("", ""), (0, "compute", "1F0", 0.0, 1.0), (1, "compute", "2B1", 0.0, 1.0))
    assert [block[4] for block in StepPlayer(trace).scene["blocks"]] == ["F0", "B1"]  # a stage a rank: it needs no number


def test_a_step_on_processes_is_a_picture_too() -> None:
    scene = StepPlayer(d2lps.run(quickly, 4, trace=True).trace).scene
    assert [axis["name"] for axis in scene["axes"]] == ["tp", "dp"]
    assert len(scene["messages"]) == 12 and {tuple(held) for held in scene["held"]} == {("activations",)}


def quickly(comm: Communicator) -> None:
    comm.sleep = lambda seconds, label="": None  # type: ignore[method-assign]
    two_axes(comm)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="nothing is computed and nothing sent"):
        StepPlayer(told("", ""))
    with pytest.raises(ValueError, match="names has 1 entries, but the trace has 4 ranks"):
        StepPlayer(simulated_trace(), names=["a"])
    with pytest.raises(ValueError, match="heads=2"):
        plan_player(SMALL, {"tp 4": Plan(tp=4)})


def test_a_sentence_stands_in() -> None:
    bundle, _ = simulated()._repr_mimebundle_()
    said = "StepPlayer: Two axes: 4 ranks (tp 2, dp 2), messages: 8 along tp, 4 along dp; 6 s"
    assert bundle["text/plain"] == said


# ---- plans --------------------------------------------------------------------------------------------------------------


def most(player: StepPlayer, kind: str) -> list[float]:
    return [max(held[kind][1::2]) for held in player.scene["held"]]


def test_a_pipeline_holds_more_at_its_begin_and_one_f_one_b_less_than_gpipe() -> None:
    gpipe, one = (_step(SMALL, Plan(pp=2, schedule=schedule), "", 8, _cluster) for schedule in ("gpipe", "one_f_one_b"))
    assert most(gpipe, "activations")[0] == pytest.approx(4 * most(one, "activations")[0], rel=0.2)  # 8 micro-batches, or 2
    assert [len([block for block in one.scene["blocks"] if block[0] == 0 and block[3] == kind]) for kind in "FB"] == [8, 8]
    assert all(held["activations"][-1] == 0 for held in one.scene["held"])
    assert {axis["name"] for axis in one.scene["axes"]} == {"pp"}


def test_what_zero_shares_out_is_seen_and_so_is_what_it_gathers() -> None:
    whole, shared = (_step(SMALL, Plan(dp=2, zero=zero), "", 4, _cluster) for zero in (0, 3))
    assert most(shared, "weights")[0] == pytest.approx(most(whole, "weights")[0] / 2, rel=0.01)
    assert most(shared, "optimizer")[0] == pytest.approx(most(whole, "optimizer")[0] / 2, rel=0.01)
    assert "gathered" not in whole.scene["held"][0] and most(shared, "gathered")[0] < most(whole, "weights")[0]
    said = {stop["label"] for stop in shared.scene["stops"]}
    assert "all-gather along dp: block1 weights[P_dp] → weights[P]" in said


# ---- the page -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [760, 390])
def test_the_picture_depends_on_the_time_alone(browser: Any, width: int) -> None:
    with shown(browser, simulated(), width, reduced_motion="reduce") as page:
        assert len(there_and_back(page, 4)) == 5


def test_a_message_wears_its_axis_and_a_card_says_what_its_rank_does(browser: Any) -> None:
    with shown(browser, simulated()) as page:
        page.evaluate("model.set('t', 2.5)")
        assert page.locator(".token text").all_text_contents() == ["tp"] * 4
        assert page.locator(".card .shape").all_text_contents() == ["x[B_dp, T, D]{U_tp}"] * 4
        assert page.locator(".card .hatch").count() == 4 and page.locator(".card .cell").count() == 8
        assert page.locator(".card .amount").all_text_contents() == ["8\u00a0B"] * 4
        assert page.locator(".d2lps-now").inner_text().startswith("all-reduce along tp: x[B_dp, T, D]{U_tp}")
        page.evaluate("model.set('t', 4)")
        assert page.locator(".token").count() == 0 and page.locator(".card .doing").all_text_contents() == ["backward 0"] * 4
        page.evaluate("model.set('t', 5.5)")
        assert page.locator(".token text").all_text_contents() == ["dp"] * 4
        assert page.locator(".card .own").count() == 4 and page.locator(".card .held").count() == 0


def test_it_follows_a_finger_on_the_track(browser: Any) -> None:
    with shown(browser, simulated()) as page:
        box = page.locator("svg.track").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
        assert 2 < page.evaluate("model.get('t')") < 4


def test_a_reader_chooses_a_plan(browser: Any) -> None:
    choices = plan_player(SMALL, {"dp 2": Plan(dp=2), "tp 2": Plan(tp=2, micro_batch=4)}, batch=4, first="tp 2")
    assert len(json.dumps(choices.data)) < 40_000
    assert repr(choices).startswith("Choices: Plan tp 2 (of dp 2, tp 2): StepPlayer: tp 2: a step takes ")
    with shown(browser, choices, 390) as page:
        legend = page.locator(".d2lps-steps .d2lps-legend span")
        legend.first.wait_for()
        assert legend.all_inner_texts() == ["tp 2: ranks share each layer"]
        page.locator("select[data-action=plan]").select_option("0")
        assert legend.all_inner_texts() == ["dp 2: ranks share the batch"]
