"""The player: the scene of small runs against what a person works out, and the page in a browser."""

from typing import Any

import numpy as np
import pytest
import torch
from beside import beside
from matplotlib.patches import ConnectionPatch
from oracles import told
from widget_page import picture, shown, there_and_back, until

import d2lps
from d2lps import kvstore
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.topology import fat_tree, ring, spine_leaf, star
from d2lps.trace import Trace
from d2lps.widgets import Player
from d2lps.widgets.board import circle


def sum_up(comm: Communicator, numel: int = 4) -> None:
    x = torch.ones(numel, device=comm.device)
    all_reduce(comm, x, algorithm="ring")


def scene(trace: Trace, **options: Any) -> dict[str, Any]:
    return Player(trace, **options).scene


def two_ranks() -> Trace:
    """16 bytes round a ring of two, 8 bytes in a second: two rounds of one second each."""
    return d2lps.simulate(sum_up, star(2, bandwidth=8.0)).trace


def slow_cable() -> Trace:
    """A ring in which one message is still in flight while the others have arrived."""
    return d2lps.simulate(sum_up, ring(4, 4.0).slowed(("gpu1", "gpu2"), 3)).trace


# ---- the scene ----------------------------------------------------------------------------------------------------------


def test_each_rank_has_a_row_cut_into_the_rings_chunks() -> None:
    drawn = scene(two_ranks())
    assert drawn["rows"] == [{"rank": 0, "name": "x"}, {"rank": 1, "name": "x"}]
    cells = [(cell["row"], cell["start"], cell["stop"]) for cell in drawn["cells"]]
    assert cells == [(0, 0, 0.5), (0, 0.5, 1), (1, 0, 0.5), (1, 0.5, 1)]
    assert [(held["label"], held["from"]) for held in drawn["initial"]] == [("0", [0]), ("1", [0]), ("0", [1]), ("1", [1])]
    assert drawn["whole"] == 2


def test_cells_change_where_the_ring_adds_and_where_it_copies() -> None:
    changes = [(c["t"], c["cell"], c["how"], c["from"]) for c in scene(two_ranks())["changes"]]
    assert changes == [(1, 2, "combine", [0, 1]), (1, 1, "combine", [0, 1]), (2, 0, "recv", [0, 1]), (2, 3, "recv", [0, 1])]


@pytest.mark.parametrize("clock", ["rounds", "time"])
def test_messages_last_from_stop_to_stop(clock: str) -> None:
    drawn = scene(two_ranks(), clock=clock)
    assert [stop["t"] for stop in drawn["stops"]] == [0, 1, 2]
    messages = [(m["src"], m["dst"], m["start"], m["end"], m["bytes"]) for m in drawn["messages"]]
    assert messages == [(0, 1, 0, 1, 8), (1, 0, 0, 1, 8), (0, 1, 1, 2, 8), (1, 0, 1, 2, 8)]
    assert drawn["stops"][1]["label"] == "reduce-scatter 1/1"
    assert drawn["stops"][1]["text"] == "0 → 1: part 0, 8 B; 1 → 0: part 1, 8 B"
    says = [stop["say"] for stop in drawn["stops"]]
    assert says[1:] == [f"2 messages in this step. What arrives is {what}." for what in ("added to what is there", "kept")]


def test_time_ends_with_the_last_sum() -> None:
    def exchange(comm: Communicator) -> None:
        mine, theirs = torch.ones(4), torch.zeros(4)
        comm.sendrecv(mine, 1 - comm.rank, theirs, 1 - comm.rank)
        comm.combine(mine, theirs)

    model = d2lps.simulator.Model(per_combined_byte=0.5)
    drawn = scene(d2lps.simulate(exchange, star(2, bandwidth=8.0), model=model).trace, clock="time")
    assert drawn["stops"][-1]["t"] == 2
    assert drawn["end"] == drawn["changes"][-1]["t"] == 10


def test_only_some_rows_and_places_of_ones_own() -> None:
    def gather(comm: Communicator) -> None:
        mine, theirs = torch.ones(2), torch.zeros(2)
        comm.sendrecv(mine, 1 - comm.rank, theirs, 1 - comm.rank)

    trace = d2lps.simulate(gather, star(2, bandwidth=8.0)).trace
    assert [row["name"] for row in scene(trace)["rows"]] == ["mine", "theirs"] * 2
    drawn = scene(trace, show=["theirs"], layout=[(0, 0.5), (1, 0.5)])
    assert [row["name"] for row in drawn["rows"]] == ["theirs"] * 2
    assert [(rank["x"], rank["y"]) for rank in drawn["ranks"]] == [(0, 0.5), (1, 0.5)]
    assert drawn["whole"] == 0  # nothing is summed
    assert np.allclose(circle(4), [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)])


def test_more_messages_than_a_browser_holds_are_cut_after_a_whole_round() -> None:
    drawn = scene(d2lps.simulate(sum_up, star(40, bandwidth=8.0), 400).trace)  # 78 rounds of 40 messages
    assert len(drawn["messages"]) == 3000 == 40 * (len(drawn["stops"]) - 1)
    assert drawn["note"] == "Only the first 3,000 of 3,120 messages are drawn."


@pytest.mark.parametrize(("bad", "words"), [
    ({"clock": "hours"}, "clock='hours'"),
    ({"layout": [(0, 0)]}, "layout has 1 entries, but the trace has 2 ranks"),
    ({"names": ["a", "b", "c"]}, "names has 3 entries, but the trace has 2 ranks"),
    ({"show": ["y"]}, r"no rank had a tensor named \['y'\], only \['incoming', 'x'\]"),
])
def test_bad_arguments_are_named(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Player(two_ranks(), **bad)


def test_a_store_that_adds_up_push_after_push_with_cards_that_say_who_is_who() -> None:
    def worker(kv: Any, steps: int) -> None:
        gradient = torch.ones(3)
        kv.init("w", torch.zeros(3))
        for _ in range(steps):
            kv.push("w", gradient).wait()

    def whose(steps: int, **options: Any) -> Any:
        drawn = scene(kvstore.simulate(worker, star(3, 8.0), 2, 1, steps, consistency="asp", trace=True).trace, **options)
        assert drawn["stops"][-1]["text"].startswith("server → " if "names" in options else "2 → ")
        return [rank["name"] for rank in drawn["ranks"]], drawn["changes"][-1]["from"]

    names = ["worker 0", "worker 1", "server"]
    assert whose(1) == (["0", "1", "2"], [0, 1, 2])  # the server has begun with something of its own
    assert whose(2) == (["0", "1", "2"], [0, 0, 1, 1, 2])
    assert whose(2, names=names, once=False) == (names, [0, 1, 2])


def test_the_picture_that_stands_in_has_an_arrow_for_each_message_of_a_step() -> None:
    drawn = Player(two_ranks())._figure()
    arrows = [artist for artist in drawn.artists if isinstance(artist, ConnectionPatch)]
    rows = [(arrow.xy1[1], arrow.xy2[1]) for arrow in arrows]
    assert rows == [(0.5, 1.5), (1.5, 0.5)] * 2  # from rank 0 to rank 1 and back, twice
    assert len(Player(d2lps.simulate(pushes, star(3, 8.0)).trace)._figure().artists) == 2  # bundles


def test_the_picture_that_stands_in_is_as_wide_as_a_page_and_of_many_steps_leaves_no_message_out() -> None:
    for ranks in (2, 4, 8):
        drawn = Player(d2lps.simulate(sum_up, star(ranks, 8.0), 8, trace=True).trace)._figure()
        assert drawn.get_figwidth() <= 5.6
        titles = [ax.get_title() for ax in drawn.axes]
        assert (titles[0], titles[-1]) == ("start", f"all-gather {ranks - 1}/{ranks - 1}")
        arrows = [artist for artist in drawn.artists if isinstance(artist, ConnectionPatch)]
        assert len(arrows) == ranks * 2 * (ranks - 1)


def test_a_sentence_and_a_picture_stand_in() -> None:
    player = Player(two_ranks(), title="Two")
    bundle, _ = player._repr_mimebundle_()
    assert bundle["text/plain"] == "Player: Two, 2 ranks, 4 messages (reduce-scatter 1/1; all-gather 1/1)"
    assert player._still().startswith(b"\x89PNG")
    assert player._still() == player._still()


# ---- what an author says, and what lies below ---------------------------------------------------------------------------


def test_an_authors_sentences_stand_at_their_steps() -> None:
    def says(given: Any) -> list[str]:
        return [stop["say"] for stop in scene(two_ranks(), sentences=given)["stops"]]

    assert says({"reduce-scatter": "Add.", "all-gather 1/1": "Pass on.", 0: "Look."}) == ["Look.", "Add.", "Pass on."]
    assert says({2: "Pass on."})[1] == "2 messages in this step. What arrives is added to what is there."
    assert says(["Add.", "Pass on."])[1:] == ["Add.", "Pass on."]
    with pytest.raises(ValueError, match=r"sentences has \['reduce'\], but the steps are called \['start', 'reduce-scatter 1/1'"):
        says({"reduce": "Add."})
    with pytest.raises(ValueError, match="sentences has 4 entries, but there are 2 steps and the start"):
        says(["a"] * 4)
    badges = scene(two_ranks(), badges={"all-gather": {1: "7"}})["stops"]
    assert [stop.get("badges") for stop in badges] == [None, None, [{"rank": 1, "text": "7"}]]
    with pytest.raises(ValueError, match="badges has"):
        scene(two_ranks(), badges={"7": {0: "7"}})


def test_a_player_opens_in_the_middle_of_the_first_message_or_where_it_is_told_to() -> None:
    assert Player(two_ranks()).t == Player(two_ranks(), clock="time").t == 0.5
    assert Player(slow_cable(), clock="time", at=1.5).t == pytest.approx((3 + 6) / 2)
    with pytest.raises(ValueError, match="at=3 is no step: there are 2"):
        Player(two_ranks(), at=3)


def pushes(comm: Communicator) -> None:
    """16 messages from every other rank to rank 0, which adds them up."""
    mine, sums = torch.ones(16), torch.zeros(16)
    if comm.rank:
        comm.exchange([(mine[k : k + 1], 0) for k in range(16)], [])
    else:
        came = [torch.zeros(16) for _ in range(1, comm.size)]
        comm.exchange([], [(came[r - 1][k : k + 1], r) for r in range(1, comm.size) for k in range(16)])
        for part in came:
            comm.combine(sums, part)


@pytest.mark.parametrize("clock", ["rounds", "time"])
def test_messages_that_go_the_same_way_together_are_one_bundle(clock: str) -> None:
    drawn = scene(d2lps.simulate(pushes, star(3, bandwidth=8.0)).trace, clock=clock)
    found = [(m["src"], m["dst"], m["n"], m["bytes"], len(m["parts"])) for m in drawn["messages"]]
    assert found == [(1, 0, 16, 64, 16), (2, 0, 16, 64, 16)]
    assert drawn["stops"][1]["say"].startswith("2 send to rank 0.")


def test_a_simulated_cluster_lies_below_the_cards() -> None:
    drawn = scene(two_ranks())
    assert [(node["name"], node["kind"]) for node in drawn["nodes"]] == [("switch", "switch")]
    assert (drawn["links"], drawn["routes"]) == ("0 2 1 2", {"0 1": "0 2 1", "1 0": "1 2 0"})
    assert "links" not in scene(two_ranks(), topology=False) and "links" not in scene(two_ranks(), layout=[(0, 0), (1, 0)])
    assert scene(two_ranks(), layout=[(0, 0), (1, 0)], topology=True)["nodes"][0]["x"] == 0.5  # between its neighbors
    with pytest.raises(ValueError, match="topology=True needs a simulated run"):
        scene(d2lps.run(sum_up, 2, trace=True).trace, topology=True)
    racks = scene(d2lps.simulate(sum_up, spine_leaf(racks=2, per_rack=2, spines=1, bandwidth=8.0)).trace)
    assert racks["groups"] == [{"name": "rack 0", "ranks": [0, 1]}, {"name": "rack 1", "ranks": [2, 3]}]
    assert [rank["y"] for rank in racks["ranks"]] == [racks["ranks"][0]["y"]] * 4
    assert scene(two_ranks(), groups={"a machine": [1]})["groups"] == [{"name": "a machine", "ranks": [1]}]
    with pytest.raises(ValueError, match=r"groups has \[2\], but the ranks are 0 to 1"):
        scene(two_ranks(), groups={"a machine": [1, 2]})
    assert "links" not in scene(d2lps.simulate(sum_up, fat_tree(4, 8.0, 0.0)).trace)  # 16 cards in a row cannot be read


def test_a_run_is_told_in_the_steps_of_a_text_of_which_some_send_nothing() -> None:
    steps = {"1 think": None, "2 share": "all-gather", "3 rest": None}
    drawn = scene(two_ranks(), steps=steps, sentences=["One.", "Two.", "Three."], badges={"1 think": {0: "1"}})
    assert [(stop["t"], stop["label"]) for stop in drawn["stops"]] == [*enumerate(["start", *steps])]
    assert [stop["say"] for stop in drawn["stops"][1:]] == ["One.", "Two.", "Three."] and drawn["end"] == 3
    assert [(m["src"], m["start"], m["end"]) for m in drawn["messages"]] == [(0, 1, 2), (1, 1, 2)]
    assert [(c["t"], c["cell"]) for c in drawn["changes"]] == [(2, 0), (2, 3)]
    assert [held["from"] for held in drawn["initial"]] == [[0], [0, 1], [0, 1], [1]]  # the reduce-scatter has been
    both = scene(two_ranks(), steps={"all": "reduce-scatter"})
    assert [(m["start"], m["end"]) for m in both["messages"]] == [(0, 0.5)] * 2 + [(0.5, 1)] * 2
    with pytest.raises(ValueError, match=r"'push'}: the rounds from there on are called \['reduce-scatter 1/1', 'all-gather"):
        scene(two_ranks(), steps={"one": "push"})
    with pytest.raises(ValueError, match="steps= needs clock='rounds'"):
        scene(two_ranks(), steps=steps, clock="time")


def around(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    token = torch.zeros(2)
    if comm.rank == 0:
        comm.send(token, right)
        comm.recv(token, left)
    else:
        comm.recv(token, left)
        comm.send(token, right)


def test_lines_are_noted_where_they_are_asked_for() -> None:
    for trace in (d2lps.simulate(around, star(2, 8.0), trace="lines").trace, d2lps.run(around, 2, trace="lines").trace):
        drawn = scene(trace, code=around)
        assert drawn["code"]["name"] == "around" and drawn["code"]["lines"][4] == "        comm.send(token, right)"
        assert [(m["src_lines"], m["dst_lines"]) for m in drawn["messages"]] == [([4], [7]), ([8], [5])]
    assert two_ranks().lines == [] and "src_line" not in two_ranks().messages
    with pytest.raises(ValueError, match="code= needs a trace with lines"):
        scene(two_ranks(), code=sum_up)
    with pytest.raises(ValueError, match="code=pushes: no message was posted at a line of it"):
        scene(trace, code=pushes)
    with pytest.raises(ValueError, match="trace='line' is unknown"):
        d2lps.simulate(around, star(2, 8.0), trace="line")
    with pytest.raises(ValueError, match="trace='line' is unknown"):
        d2lps.run(around, 2, trace="line")


def test_in_a_collective_of_the_library_the_line_is_the_readers() -> None:
    drawn = scene(d2lps.simulate(sum_up, star(2, 8.0), trace="lines").trace, code=sum_up)
    assert {(*m["src_lines"], *m["dst_lines"]) for m in drawn["messages"]} == {(2, 2)}


# ---- the strip ----------------------------------------------------------------------------------------------------------


def under_a_backward_pass() -> Trace:
    """The ring of two beside ranks that compute, rank 1 with a sleep in between and for longer than messages move."""
    blocks = [(0, "compute", "backward", 0.0, 1.5), (1, "compute", "backward", 0.0, 1.0), (1, "sleep", "", 1.0, 1.5)]
    return beside(two_ranks(), *blocks, (1, "compute", "optimizer", 2.0, 4.0), (0, "memory", "activations", 0.0, 9.0, 64.0))


def test_a_strip_tells_what_each_lane_does_when() -> None:
    drawn = scene(under_a_backward_pass(), clock="time")
    found = [(lane["rank"], {(bar["kind"], bar["label"]): bar["times"] for bar in lane["bars"]}) for lane in drawn["strip"]]
    collective = {("waiting", ""): "0 1 1 2", ("moving", ""): "0 1 1 2"}
    assert found == [
        (0, {("computing", "backward"): "0 1.5"}),
        (0, collective),
        (1, {("computing", "backward"): "0 1", ("sleeping", ""): "1 1.5", ("computing", "optimizer"): "2 4"}),
        (1, collective),
    ]
    assert (drawn["end"], drawn["stops"][-1]["t"]) == (4, 2)  # to the end of the optimizer's step


def test_a_collective_that_was_started_lies_beside_what_its_rank_does_meanwhile() -> None:
    def work(comm: Communicator) -> None:
        gradient = torch.ones(4)
        under_way = comm.start(all_reduce, gradient)
        comm.sleep(1.5)
        under_way.wait()

    drawn = scene(d2lps.simulate(work, star(2, bandwidth=8.0)).trace, clock="time")
    found = [(lane["rank"], {bar["kind"]: bar["times"] for bar in lane["bars"]}) for lane in drawn["strip"]]
    own, beside = {"sleeping": "0 1.5", "waiting": "1.5 2"}, {"waiting": "0 1 1 2", "moving": "0 1 1 2"}
    assert found == [(0, own), (0, beside), (1, own), (1, beside)]
    assert [stop["t"] for stop in drawn["stops"]] == [0, 1, 2]


def test_where_seconds_count_there_is_a_strip_and_where_rounds_count_there_is_none() -> None:
    lanes = [{bar["kind"]: bar["times"] for bar in lane["bars"]} for lane in scene(two_ranks(), clock="time")["strip"]]
    assert lanes == [{"waiting": "0 1 1 2", "moving": "0 1 1 2"}] * 2
    assert "strip" not in scene(under_a_backward_pass())
    assert "strip" in scene(beside(two_ranks()), clock="time")  # all happens beside


def test_a_strip_of_many_short_bars_is_as_fine_as_a_picture_and_no_finer() -> None:
    blocks = [(0, "compute", "step", t / 10_000, (t + 0.5) / 10_000) for t in range(20_000)]
    strip = scene(beside(two_ranks(), *blocks, (0, "compute", "last", 2.0, 2.5)), clock="time")["strip"]
    assert [(bar["label"], bar["times"]) for bar in strip[0]["bars"]] == [("step", "0 1.99995"), ("last", "2 2.5")]


def test_a_strip_of_a_shortened_run_ends_with_what_is_drawn() -> None:
    trace = d2lps.simulate(sum_up, star(40, bandwidth=8.0), 400).trace
    drawn = scene(beside(trace, (0, "compute", "long", 0.0, 1000.0)), clock="time")
    assert drawn["end"] == drawn["stops"][-1]["t"] < 1000
    assert drawn["strip"][0]["bars"][0]["times"] == f"0 {drawn['end']:.6g}"


def test_on_a_real_clock_two_collectives_that_ran_beside_have_steps_of_their_own() -> None:
    """A second ring of two, ten seconds later: no message of it has waited for one of the first."""

    def work(comm: Communicator) -> None:
        pair = comm.split(comm.rank // 2)
        comm.sleep(10 * (comm.rank // 2))
        sum_up(pair)

    trace = beside(d2lps.simulate(work, star(4, bandwidth=8.0)).trace)
    drawn = scene(trace, clock="time")
    assert [stop["t"] for stop in drawn["stops"]] == [0, 1, 2, 11, 12]
    assert [stop["text"].count("→") for stop in drawn["stops"]] == [0, 2, 2, 2, 2]
    assert [stop["t"] for stop in scene(trace)["stops"]] == [0, 1, 2]


def test_the_picture_that_stands_in_has_a_timeline_below_even_without_a_message() -> None:
    def height(trace: Trace, clock: str) -> int:
        return int.from_bytes(Player(trace, clock=clock)._still()[20:24])  # as PNG tells it

    silent = told("", "")
    for trace in (silent, beside(silent, (0, "compute", "alone", 0.0, 1.0)), two_ranks(), under_a_backward_pass()):
        assert height(trace, "time") > height(trace, "rounds") + 100


# ---- the page -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["rounds", "time"])
@pytest.mark.parametrize("width", [760, 390])
def test_the_picture_depends_on_the_time_alone(browser: Any, clock: str, width: int) -> None:
    with shown(browser, Player(slow_cable(), clock=clock), width, reduced_motion="reduce") as page:
        assert len(there_and_back(page, 6)) == 7


def test_buttons_keys_and_slider_move_it(browser: Any) -> None:
    with shown(browser, Player(slow_cable(), clock="time", title="Slow", at=0)) as page:
        first, counter = picture(page), page.locator(".d2lps-counter")
        page.locator('[data-action="next"]').click()
        until(page, first)
        page.keyboard.press("ArrowLeft")  # before the step is over: back to where it began
        until(page, first, same=True)
        page.locator(".d2lps").focus()
        page.keyboard.press("End")
        assert counter.inner_text().startswith("step 6 of 6")
        page.keyboard.press("Home")
        assert picture(page) == first
        page.locator('[data-action="scrub"]').fill("2.5")
        assert page.evaluate("model.get('t')") == 2.5
        page.evaluate("model.set('t', 0)")  # as another widget that is linked to it would
        assert picture(page) == first


def test_it_plays_to_the_end_and_pauses(browser: Any) -> None:
    with shown(browser, Player(two_ranks())) as page:
        assert page.locator(".d2lps svg[role=img]").count() == 1  # where rounds count there is no strip
        play, first = page.locator('[data-action="play"]'), picture(page)
        play.click()
        assert play.get_attribute("aria-label") == "Pause"
        until(page, first)
        play.click()
        stopped = picture(page)
        page.wait_for_timeout(100)
        assert picture(page) == stopped
        page.locator('[data-action="speed"]').select_option("4")
        play.click()
        page.wait_for_function("model.get('t') === 2")
        assert play.get_attribute("aria-label") == "Play"
        assert page.locator(".cell g.complete").count() == 4
        assert page.locator("g.token").count() == 0  # all have arrived


@pytest.mark.parametrize("width", [760, 390])
def test_the_strip_moves_with_the_clock_and_a_reader_points_at_a_time_in_it(browser: Any, width: int) -> None:
    with shown(browser, Player(under_a_backward_pass(), clock="time", at=0), width, reduced_motion="reduce") as page:
        strip, now = page.locator(".strip svg"), page.locator(".strip .now")
        assert strip.get_attribute("aria-label") == "What every rank does over time, backward, optimizer"
        assert page.locator(".strip .rank").all_text_contents() == ["rank 0", "rank 1"]
        assert page.locator(".strip rect.computing").count() == 3
        assert page.locator(".strip .d2lps-legend span").all_inner_texts() == ["computing", "sleeping", "waiting", "messages"]
        titles = page.locator(".strip title").all_text_contents()
        assert "optimizer: 2\u00a0s to 4\u00a0s" in titles and "sleeping: 1\u00a0s to 1.5\u00a0s" in titles
        places = [now.get_attribute("d")]
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Home"):
            page.locator(".d2lps").focus()
            page.keyboard.press(key)
            places.append(now.get_attribute("d"))
        assert len(set(places)) == 4 and places[0] == places[-1]
        strip.scroll_into_view_if_needed()
        box = page.locator(".strip .bed").first.bounding_box()
        page.mouse.click(box["x"] + box["width"] / 4, box["y"] + 5)
        assert page.evaluate("model.get('t')") == pytest.approx(1, abs=0.02)
        assert page.locator(".d2lps-counter").inner_text().startswith("step 1 of 2")


def test_a_run_without_messages_that_only_computes_plays_too(browser: Any) -> None:
    silent = told("", "")
    trace = beside(silent, (0, "compute", "alone", 0.0, 1.0))
    with shown(browser, Player(trace, clock="time"), reduced_motion="reduce") as page:
        assert page.locator(".strip rect.computing").count() == 1
        page.locator('[data-action="next"]').click()
        assert page.evaluate("model.get('t')") == 1


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_it_opens_with_arrows_that_stay_faded_until_the_next_step(browser: Any, motion: str) -> None:
    with shown(browser, Player(two_ranks()), reduced_motion=motion) as page:
        arrows, trails = page.locator("g.arrows .arrow:not(.trail) .shaft"), page.locator("g.arrows .trail .shaft")
        assert (arrows.count(), page.locator("g.token").count(), trails.count()) == (2, 2, 0)
        page.evaluate("model.set('t', 1)")
        assert page.locator("g.token").count() == 0 and trails.count() == 2
        assert [arrow.get_attribute("opacity") for arrow in page.locator("g.arrows .trail").all()] == ["0.550"] * 2
        page.evaluate("model.set('t', 1.3)")  # the next step is on its way
        assert (arrows.count(), trails.count()) == (2, 2)
        assert 0 < float(page.locator("g.arrows .trail").first.get_attribute("opacity")) < 0.3
        page.evaluate("model.set('t', 2)")
        assert trails.count() == 2
        page.locator(".d2lps").press("Home")
        assert arrows.count() == trails.count() == 0 and page.locator(".d2lps-now").first.inner_text().startswith("start")


@pytest.mark.parametrize("width", [760, 390])
def test_bundles_are_thick_and_counted_and_tokens_lie_under_cards(browser: Any, width: int) -> None:
    with shown(browser, Player(d2lps.simulate(pushes, star(4, bandwidth=8.0)).trace), width) as page:
        assert page.locator("g.token .label").all_text_contents() == ["×16"] * 3
        assert page.locator("g.arrow title").all_text_contents()[1] == "2 → 0: 16 messages, 64\u00a0B"
        order = page.locator(".d2lps-player > svg").evaluate("svg => [...svg.children].map((node) => node.classList[0])")
        assert order.index("board") < order.index("arrows") < order.index("tokens") < order.index("card") < order.index("marks")


def test_on_a_telephone_names_are_whole(browser: Any) -> None:
    names, places = [f"device {rank}" for rank in range(4)], [(rank / 3, 0.0) for rank in range(4)]
    with shown(browser, Player(d2lps.run(sum_up, 4, trace=True).trace, names=names, layout=places), 390) as page:
        assert page.locator(".card .name").all_text_contents() == names
        for name, frame in zip(page.locator(".card .name").all(), page.locator(".card .frame").all(), strict=True):
            assert name.bounding_box()["width"] <= frame.bounding_box()["width"]


@pytest.mark.parametrize("width", [760, 340])
def test_a_message_passes_under_no_card_but_its_own(browser: Any, width: int) -> None:
    def across(comm: Communicator) -> None:
        x = torch.full((1,), float(comm.rank))
        if comm.rank == 2:
            comm.send(x, 0)
        elif comm.rank == 0:
            comm.recv(x, 2)

    with shown(browser, Player(d2lps.run(across, 4, trace=True).trace), width) as page:
        token, cards = page.locator("g.token").bounding_box(), page.locator(".card .frame").all()
        assert not any(overlap(token, card.bounding_box()) for card in cards)


def test_thick_arrows_carry_more_bytes(browser: Any) -> None:
    def work(comm: Communicator) -> None:
        sizes = [0, 4, 64, 1024]
        if comm.rank:
            comm.send(torch.ones(sizes[comm.rank]), 0)
        else:
            comm.exchange([], [(torch.zeros(sizes[rank]), rank) for rank in range(1, 4)])

    with shown(browser, Player(d2lps.simulate(work, star(4, bandwidth=8.0)).trace, show=None)) as page:
        widths = [float(shaft.evaluate("path => path.style.strokeWidth")) for shaft in page.locator("g.arrows .shaft").all()]
        assert widths[0] < widths[1] < widths[2]


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two boxes share a point."""
    sides = (("x", "width"), ("y", "height"))
    return all(max(one[at], other[at]) < min(one[at] + one[long], other[at] + other[long]) for at, long in sides)


def test_links_in_use_are_colored_machines_have_boxes_and_badges_show_in_their_step(browser: Any) -> None:
    trace = d2lps.simulate(sum_up, spine_leaf(racks=2, per_rack=2, spines=1, bandwidth=8.0)).trace
    with shown(browser, Player(trace, badges={"reduce-scatter 2/3": {3: "5"}}), reduced_motion="reduce") as page:
        assert page.locator("text.group").all_text_contents() == ["rack 0", "rack 1"]
        assert page.locator("text.node").all_text_contents() == ["leaf0", "spine0", "leaf1"]
        used, badges = page.locator(".board .link.used"), page.locator(".badge text")
        assert (page.locator(".board .link").count(), used.count(), badges.count()) == (6, 6, 0)
        page.locator('[data-action="next"]').click()
        page.locator('[data-action="next"]').click()
        assert badges.all_text_contents() == ["5"]
        badge = page.locator(".badge rect").bounding_box()
        captions = [caption.bounding_box() for caption in page.locator("text.row").all()]
        assert not any(overlap(badge, caption) for caption in captions)
        page.locator('[data-action="first"]').click()
        page.evaluate("model.set('t', 0)")
        assert badges.count() == 0


@pytest.mark.parametrize("width", [760, 390])
def test_bytes_and_the_legend_are_unfolded_by_keyboard(browser: Any, width: int) -> None:
    with shown(browser, Player(two_ranks(), sentences={"reduce-scatter": "Each gives away half."}), width) as page:
        messages, legend = page.locator("summary").all()
        assert messages.inner_text() == "Messages" and legend.inner_text() == "What do I see?"
        told = page.get_by_text("0 → 1: part 0, 8 B; 1 → 0: part 1, 8 B")
        assert page.locator(".d2lps-now").first.inner_text() == "reduce-scatter 1/1 Each gives away half."
        assert not told.first.is_visible() and not page.locator(".d2lps-see").is_visible()
        messages.press("Enter")
        assert told.last.is_visible()
        legend.press(" ")
        items = page.locator(".d2lps-see li").all_inner_texts()
        assert [text.split()[-1] for text in items[:2]] == ["1", "it"]
        assert any("colored while messages" in text for text in items)
        assert model_time(page) == 0.5  # the space did not play


def model_time(page: Any) -> float:
    return float(page.evaluate("model.get('t')"))


@pytest.mark.parametrize("width", [760, 390])
def test_the_lines_that_run_are_lit(browser: Any, width: int) -> None:
    player = Player(d2lps.simulate(around, star(2, 8.0), trace="lines").trace, code=around)
    with shown(browser, player, width, reduced_motion="reduce") as page:
        lit = page.locator(".lines .lit code")
        assert lit.all_text_contents() == ["        comm.send(token, right)", "        comm.recv(token, left)"]
        assert page.locator(".lines .lit .who").evaluate_all("all => all.map((who) => who.title)") == ["0", "1"]
        assert page.locator(".card .key").count() == 2  # also of rank 1, whose color no card holds
        page.locator('[data-action="last"]').click()
        assert page.locator(".lines .lit .who").evaluate_all("all => all.map((who) => who.title)") == ["0", "1"]
        assert lit.all_text_contents() == ["        comm.recv(token, left)", "        comm.send(token, right)"]
        page.locator('[data-action="first"]').click()
        assert lit.count() == 0
