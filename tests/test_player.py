"""The player: the scene of small runs against what a person works out, and the page in a browser."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from beside import beside
from oracles import told
from widget_page import chromium, needs_chromium, picture, shown, until

import d2lps
from d2lps import kvstore
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.topology import ring, star
from d2lps.trace import Trace
from d2lps.widgets import Player
from d2lps.widgets.player import circle


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


def test_a_sentence_and_a_picture_stand_in() -> None:
    player = Player(two_ranks(), title="Two")
    bundle, _ = player._repr_mimebundle_()
    assert bundle["text/plain"] == "Player: Two, 2 ranks, 4 messages (reduce-scatter 1/1; all-gather 1/1)"
    assert player._still().startswith(b"\x89PNG")
    assert player._still() == player._still()


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


def test_where_nothing_is_computed_or_beside_or_where_rounds_count_there_is_no_strip() -> None:
    assert "strip" not in scene(two_ranks(), clock="time")
    assert "strip" not in scene(under_a_backward_pass())
    assert "strip" in scene(beside(two_ranks()), clock="time")  # nothing computes, but all happens beside
    assert "strip" in scene(beside(two_ranks(), (0, "sleep", "", 0.0, 1.0), lane=0), clock="time")


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
    def height(trace: Trace) -> int:
        return int.from_bytes(Player(trace, clock="time")._still()[20:24])  # as PNG tells it

    silent = told("", "")
    assert height(beside(silent, (0, "compute", "alone", 0.0, 1.0))) > height(silent) + 100
    assert height(under_a_backward_pass()) > height(two_ranks()) + 100


# ---- the page -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@needs_chromium
@pytest.mark.parametrize("clock", ["rounds", "time"])
@pytest.mark.parametrize("width", [760, 390])
def test_the_picture_depends_on_the_time_alone(browser: Any, clock: str, width: int) -> None:
    with shown(browser, Player(slow_cable(), clock=clock), width, reduced_motion="reduce") as page:
        forth = [picture(page)]
        for _ in range(6):
            page.locator('[data-action="next"]').click()
            forth.append(picture(page))
        back = [forth[-1]]
        for _ in range(6):
            page.locator('[data-action="previous"]').click()
            back.append(picture(page))
        assert len(set(forth)) == 7
        assert forth == back[::-1]


@needs_chromium
def test_buttons_keys_and_slider_move_it(browser: Any) -> None:
    with shown(browser, Player(slow_cable(), clock="time", title="Slow")) as page:
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


@needs_chromium
def test_it_plays_to_the_end_and_pauses(browser: Any) -> None:
    with shown(browser, Player(two_ranks())) as page:
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
        assert page.locator("g.complete").count() == 4


@needs_chromium
@pytest.mark.parametrize("width", [760, 390])
def test_the_strip_moves_with_the_clock_and_a_reader_points_at_a_time_in_it(browser: Any, width: int) -> None:
    with shown(browser, Player(under_a_backward_pass(), clock="time"), width, reduced_motion="reduce") as page:
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


@needs_chromium
def test_without_a_strip_a_player_has_one_picture(browser: Any) -> None:
    with shown(browser, Player(two_ranks(), clock="time")) as page:
        assert page.locator(".d2lps svg").count() == 1


@needs_chromium
def test_a_run_without_messages_that_only_computes_plays_too(browser: Any) -> None:
    silent = told("", "")
    trace = beside(silent, (0, "compute", "alone", 0.0, 1.0))
    with shown(browser, Player(trace, clock="time"), reduced_motion="reduce") as page:
        assert page.locator(".strip rect.computing").count() == 1
        page.locator('[data-action="next"]').click()
        assert page.evaluate("model.get('t')") == 1
