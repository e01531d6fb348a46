"""Bets and choices: what a reader is asked, what is hidden until then, and that each choice shows what was made for it."""

import base64
import importlib
import inspect
import json
import zlib
from collections.abc import Callable
from itertools import combinations
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from widget_page import RENDER, picture, shown, until

import d2lps
from d2lps import collectives
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.topology import Device, star
from d2lps.trace.timeline import COLORS
from d2lps.widgets import Bet, Choices, Lanes, Player, collective_player, late_ring
from d2lps.widgets.lanes import draw
from d2lps.widgets.ready import ALGORITHMS
from d2lps.widgets.within import svg


def play(ranks: int, algorithm: str) -> Player:
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.ones(2 * comm.size, device=comm.device), algorithm=algorithm)

    return Player(d2lps.simulate(work, star(ranks, 1e9)).trace, title=f"{algorithm} on {ranks}")


def line(slope: float) -> Figure:
    figure, ax = plt.subplots()
    ax.plot([0, 1], [0, slope])
    return figure


def choices() -> Choices:
    options = {"ranks": [2, 3, 4], "algorithm": ["ring", "tree"]}
    return Choices(options, play, title="All-reduce", first={"ranks": 3}, names={"algorithm": "by"})


# ---- choices ------------------------------------------------------------------------------------------------------------


def test_make_is_called_once_for_each_combination() -> None:
    made: list[tuple[int, str, bool]] = []

    def make(n: int, how: str, late: bool) -> str:
        made.append((n, how, late))
        return f"{n} {how} {late}" if late else "in time"

    widget = Choices({"n": [1, 2, 3], "how": {"one way": "a", "another": "b"}, "late": [False, True]}, make)
    assert made == [(n, how, late) for n in (1, 2, 3) for how in "ab" for late in (False, True)]
    assert widget.data["which"] == "0 1 0 2 0 3 0 4 0 5 0 6"  # what is equal is stored once
    assert [option["kind"] for option in widget.data["options"]] == ["slider", "list", "switch"]
    assert widget.data["options"][1]["values"] == ["one way", "another"]


def test_scenes_share_one_script_and_what_is_alike_in_them() -> None:
    one, six = play(4, "ring"), choices()
    assert six._esm.count("class Player ") == six._esm.count("class Timed ") == 1
    assert len(six._esm) < len(one._esm) + 6000
    assert len(str(six.data)) < len(str(one.scene))


def test_what_is_held_in_a_widget_is_not_sent_to_the_browser() -> None:
    player = play(2, "ring")
    assert player.comm is None
    Bet("How many steps?", unit="steps", prediction=2, then=player)
    assert player.comm is None
    assert player.model_id == player.comm.comm_id  # once it is shown or referred to


def test_the_picture_goes_along_where_ipywidgets_is_7() -> None:
    class Old:
        def _ipython_display_(self) -> None:  # as Colab's ipywidgets has it: IPython would ask nobody else
            raise AssertionError

    class InColab(Bet, Old):
        pass

    data, _ = InteractiveShell.instance().display_formatter.format(InColab("How long?", unit="ms", prediction=3))
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} == set(data)


def test_a_figure_leaves_pyplot_and_has_an_alt() -> None:
    before = plt.get_fignums()
    widget = Choices({"slope": [1, 2]}, line, alt="A line that rises by {slope}.", first={"slope": 2})
    assert plt.get_fignums() == before
    assert repr(widget) == "Choices: slope 2 (of 1, 2): A line that rises by 2."


def test_a_figure_is_stored_small_and_takes_the_pages_colors() -> None:
    figure = line(2)
    figure.axes[0].set_title("a line", color="black")
    figure.axes[0].plot([0, 1], [0.123456789, 1], color="#0072b2")
    drawn = svg(figure)
    assert drawn == svg(figure)
    assert len(drawn) < 16_000
    assert "currentColor" in drawn
    assert "#0072b2" in drawn
    assert not [word for word in ("<style", "#ffffff", "#000000", "<metadata", "<?xml", 'id="axes') if word in drawn]
    assert "scale(0.1" in drawn  # letters keep their size


# ---- lanes, and players that are ready ----------------------------------------------------------------------------------


def two_of_them(comm: Communicator, late: float) -> None:
    """Rank 1 sleeps for `late` seconds before it gives rank 0 something."""
    data = torch.ones(250_000_000, device=comm.device)
    if comm.rank == 0:
        comm.recv(data, 1)
    else:
        comm.sleep(late)
        comm.send(data, 0)


def lanes(**options: Any) -> Lanes:
    cluster = star(2, bandwidth=1e9)
    runs = {f"{late} s late": d2lps.simulate(two_of_them, cluster, late, device="meta").trace for late in (1, 3)}
    return Lanes(runs, title="Who waits?", **options)


def test_lanes_stand_on_one_clock() -> None:
    data = lanes().data
    assert [run["seconds"] for run in data["runs"]] == pytest.approx([2, 4])  # a second for 1 GB
    assert data["end"] == pytest.approx(4)
    assert data["stops"] == pytest.approx([0, 1, 2, 3, 4])
    waits = [[bar["times"] for bar in lane["bars"] if bar["kind"] == "waiting"] for lane in data["runs"][1]["strip"]]
    assert waits == [["0 4"], ["3 4"]]


def test_lanes_are_drawn_on_one_clock_in_any_unit() -> None:
    cluster = star(2, bandwidth=1e9)
    runs = {f"{ms}": d2lps.simulate(lambda comm, ms=ms: comm.sleep(ms / 1000), cluster).trace for ms in (2, 8)}
    for ax in draw(Lanes(runs, ranks=[1], names=["the sender"]).data).axes:
        assert ax.get_xlabel() == "time (ms)" and ax.get_xlim()[1] == pytest.approx(8 * 1.02)
        assert [label.get_text() for label in ax.get_yticklabels()] == ["the sender"]


def test_lanes_show_the_ranks_that_are_asked_for() -> None:
    widget = lanes(ranks=[1], names=["the sender"])
    assert [lane["rank"] for run in widget.data["runs"] for lane in run["strip"]] == [0, 0]
    assert widget.data["ranks"] == [{"name": "the sender"}]
    assert "sleeping" in str(widget.data["runs"])


def three_of_them(comm: Communicator) -> None:
    """Rank 1 sleeps, the others compute."""
    if comm.rank == 1:
        comm.sleep(2)
    else:
        with comm.compute("a block", flops=1e9):
            pass


def beside_a_sleeper(name: str = "the run", **options: Any) -> Lanes:
    cluster = star(3, 1e9, device=Device(flops=1e9, memory=1e9, memory_bandwidth=1e9))
    return Lanes({name: d2lps.simulate(three_of_them, cluster).trace}, ranks=[0, 2], **options)


def legend(widget: Lanes) -> list[str]:
    return [text.get_text() for text in draw(widget.data).legends[0].get_texts()]


def test_the_still_of_lanes_draws_what_is_shown_and_names_no_more() -> None:
    ax = draw(beside_a_sleeper().data).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 2"]
    assert [text.get_text() for text in ax.texts] == ["a block"] * 2  # between them is no lane of rank 1
    assert legend(beside_a_sleeper()) == ["computing"]


@pytest.mark.filterwarnings("error")
def test_in_the_still_of_lanes_no_text_lies_over_another() -> None:
    """Of a run, or of a rank, with a very long name."""
    names = ["a very long name of a rank, of which only the beginning is shown", "b"]
    widget = beside_a_sleeper("a run with a long name, " * 6, names=names, title="Longer than the picture " * 6)
    with plt.rc_context():
        d2lps.style()  # as chapters do
        drawn = draw(widget.data)
        FigureCanvasAgg(drawn).draw()
    ax = drawn.axes[0]
    beyond = [label for label in ax.get_xticklabels() if label.get_position()[0] > ax.get_xlim()[1]]  # is not drawn
    texts = [text for text in drawn.findobj(Text) if text.get_text() and text.get_visible() and text not in beyond]
    boxes = [text.get_window_extent() for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert min(box.x0, box.y0) >= 0 and box.x1 <= drawn.bbox.width and box.y1 <= drawn.bbox.height, text
    for (one, this), (other, that) in combinations(zip(texts, boxes, strict=True), 2):
        assert not this.overlaps(that), (one, other)


def many_blocks(comm: Communicator) -> None:
    for _ in range(400):
        comm.sleep(250, "train")
        comm.sleep(20)
    comm.sleep(2000)


def day() -> Lanes:
    """400 blocks of some minutes, and a sleep of half an hour."""
    return Lanes({"a day": d2lps.simulate(many_blocks, star(1, 1e9)).trace})


def test_edges_hide_no_short_block_in_the_still_of_lanes() -> None:
    drawn = draw(day().data)
    assert drawn.axes[0].get_xlabel() == "time (h)"
    edges = {tuple(bars.get_facecolor()[0]): list(bars.get_linewidth()) for bars in drawn.axes[0].collections}
    assert edges[to_rgba(COLORS["computing"])] == [0] * 400
    assert edges[to_rgba(COLORS["sleeping"])] == [0] * 400 + [0.75]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_collective_has_a_player_for_all_its_algorithms(name: str) -> None:
    widget = collective_player(name)
    count = len(ALGORITHMS[name])
    assert len(widget.data["which"].split()) == 5 * count
    assert name.replace("_", "-") in repr(widget)
    assert len(json.dumps(widget.data)) < 40_000
    signature = getattr(collectives, name).__module__
    for algorithm in ALGORITHMS[name]:
        assert algorithm in inspect.getsource(importlib.import_module(signature))


def test_a_late_rank_makes_the_ring_as_late() -> None:
    made: list[Any] = []
    widget = late_ring(ranks=4, delays=(0, 2), nbytes=4_000_000)
    for thing in unpacked(widget.data["things"]):
        made.append((thing["state"]["scene"]["title"], thing["state"]["scene"]["end"]))
    assert [end for title, end in made if "0 steps" in title] == pytest.approx([0.006] * 4)  # 2 (p - 1) steps of 1 ms
    assert [end for title, end in made if "2 steps" in title] == pytest.approx([0.008] * 4)


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


# ---- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: Choices({}, line, first={"slope": 2}), ValueError, "slope"),
    (lambda: Choices({"slope": []}, line), ValueError, "0 combinations"),
    (lambda: Choices({"a": range(15), "b": range(15)}, str), ValueError, "225 combinations"),
    (lambda: Choices({"slope": [1, 2]}, line, first={"slope": 3}), ValueError, "'slope': 3"),
    (lambda: Choices({"slope": [1, 2]}, line), ValueError, "alt="),
    (lambda: Choices({"x": [1, 2]}, lambda x: x), TypeError, "1 is no widget"),
    (lambda: Lanes({}), ValueError, r"traces=\{\} is empty"),
    (lambda: lanes(ranks=[2]), ValueError, r"ranks=\[2\]: the traces have \[2, 2\] ranks"),
    (lambda: lanes(names=["one"]), ValueError, "names has 1 entries, but 2 ranks"),
    (lambda: collective_player("all_reduced"), ValueError, "name='all_reduced' is no collective"),
    (lambda: Bet("Why?"), ValueError, "needs one of them"),
    (lambda: Bet("Who?", choices=["a", "b"], prediction="c"), ValueError, "prediction='c' is none of the choices"),
    (lambda: Bet("How long?", unit="s", measurement="c"), ValueError, "measurement='c' is no number"),
    (lambda: Bet("How long?", unit="s", measurement=1, then=3), TypeError, "3 is no widget"),
])  # fmt: skip
def test_bad_arguments_are_named(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


# ---- stills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    choices,
    lanes,
    late_ring,
    lambda: Choices({"slope": [1, 2]}, line, alt="A line that rises by {slope}."),
    lambda: Bet("Who wins?", choices=["tree", "ring"], prediction="ring", then=["Because.", play(2, "ring")]),
    lambda: Bet("How long?", unit="ms", prediction=3, measurement=4.5),
])  # fmt: skip
def test_a_sentence_and_a_picture_stand_in(make: Callable[[], Any]) -> None:
    widget = make()
    bundle, _ = widget._repr_mimebundle_()
    assert bundle["text/plain"] == repr(widget)
    assert widget._still().startswith(b"\x89PNG")
    assert widget._still() == widget._still()


# ---- pages --------------------------------------------------------------------------------------------------------------


def test_a_choice_shows_what_was_made_for_it(browser: Any) -> None:
    with shown(browser, choices()) as page:
        title = page.locator(".d2lps-player .d2lps-title")
        assert title.inner_text() == "ring on 3"
        first = picture(page)
        page.locator('[data-action="algorithm"]').select_option("1")
        assert title.inner_text() == "tree on 3"
        assert picture(page) != first
        page.locator('[data-action="ranks"]').focus()
        page.keyboard.press("ArrowRight")
        assert title.inner_text() == "tree on 4"
        assert page.locator(".d2lps-player").count() == 1
        page.locator('[data-action="next"]').click()
        second = picture(page)
        until(page, second)
        assert page.evaluate("model.get('chosen')") == [2, 1]
        page.evaluate("model.set('chosen', [1, 0])")  # as Python does
        assert title.inner_text() == "ring on 3"
        assert picture(page) == first


def test_a_knob_shows_another_figure_and_says_it(browser: Any) -> None:
    with shown(browser, Choices({"slope": [1, 2, 3]}, line, alt="A line that rises by {slope}."), width=390) as page:
        plot, knob = page.locator(".d2lps-plot"), page.locator('[data-action="slope"]')
        plot.wait_for()
        first = picture(page)
        assert plot.get_attribute("aria-label") == "A line that rises by 1."
        knob.focus()
        page.keyboard.press("End")
        assert plot.get_attribute("aria-label") == "A line that rises by 3."
        assert picture(page) != first
        assert knob.get_attribute("aria-valuetext") == "3"


def test_a_picture_that_stands_twice_finds_its_clips_in_itself(browser: Any) -> None:
    """Else one would look for them in the other, which may be hidden, and draw over its edges."""
    widget = Choices({"slope": [1, 2]}, line, alt="A line that rises by {slope}.")
    with shown(browser, widget) as page:
        page.locator(".d2lps-plot").wait_for()
        page.evaluate("void (window.destroyFirst = destroy)")
        beside = RENDER.replace("el: document.body", "el: document.body.appendChild(document.createElement('div'))")
        page.evaluate(beside, {"esm": widget._esm, "css": widget._css, "state": json.loads(json.dumps(widget._state()))})
        page.locator(".d2lps-plot").nth(1).wait_for()
        clips = "plot => [...plot.querySelectorAll('[clip-path]')].map((each) => each.getAttribute('clip-path').slice(5, -1))"
        plots = page.locator(".d2lps-plot").all()
        mine, other = (plot.evaluate(clips) for plot in plots)
        assert mine and other and set(mine).isdisjoint(other)
        assert all(plots[0].locator(f"[id='{name}']").count() == 1 for name in mine)
        page.evaluate("destroy(), document.body.lastChild.remove(), void (window.destroy = destroyFirst)")


def test_a_short_card_keeps_its_ranks_number(browser: Any) -> None:
    names = [f"machine in the cellar {rank}" for rank in range(8)]
    run = d2lps.simulate(lambda comm: all_reduce(comm, torch.ones(8, device=comm.device)), star(8, 1e9))
    with shown(browser, Player(run.trace, names=names), width=320) as page:
        page.locator(".card .name").first.wait_for()
        found = page.locator(".card .name").all_text_contents()
        assert found != names
        assert [name[-1] for name in found] == list("01234567")


def test_lanes_step_together_and_say_who_waited(browser: Any) -> None:
    with shown(browser, lanes(), width=390) as page:
        heads, said, first = page.locator(".head"), page.locator(".d2lps-now"), picture(page)
        assert heads.all_inner_texts() == ["1 s late", "3 s late"]
        page.locator('[data-action="next"]').click()
        until(page, first)
        page.keyboard.press("End")
        assert [text.split("\n")[-1] for text in heads.all_inner_texts()] == [
            "waited for 75 % of the time so far", "waited for 63 % of the time so far"]  # fmt: skip
        assert said.inner_text() == "1 s late ends at 2\u00a0s. 3 s late ends at 4\u00a0s."


def test_where_nobody_waits_lanes_say_who_slept_and_what_that_was(browser: Any) -> None:
    def work(comm: Communicator) -> None:
        comm.sleep(3.0 - comm.rank, "train")  # rank 1 has ended a second earlier, and does nothing then
        comm.sleep(1.0)

    widget = Lanes({"a day": d2lps.simulate(work, star(2, 1e9)).trace}, sleeping="saving")
    assert legend(widget) == ["computing", "saving"]
    with shown(browser, widget, width=390) as page:
        page.locator('[data-action="next"]').click()
        page.keyboard.press("End")
        assert page.locator(".head").inner_text().split("\n")[-1] == "saving: 38 % of the time so far"
        assert page.locator(".d2lps-legend").inner_text().split() == ["computing", "saving"]


def test_edges_hide_no_short_block_of_lanes_and_a_day_has_hours(browser: Any) -> None:
    with shown(browser, day(), width=390) as page:
        computing = page.locator("rect.computing").evaluate_all("bars => bars.map((bar) => getComputedStyle(bar).stroke)")
        assert set(computing) == {"none"}
        assert page.locator("rect.sleeping").last.evaluate("bar => getComputedStyle(bar).stroke") != "none"
        assert page.locator(".axis text").all_text_contents() == ["0", "20\u00a0h"]
        page.locator('[data-action="last"]').click()
        assert page.locator(".d2lps-now").inner_text() == "a day ends at 30.6\u00a0h."


def test_a_reader_makes_a_rank_late_and_sees_it_in_the_lanes(browser: Any) -> None:
    with shown(browser, late_ring()) as page:
        strip = page.locator(".strip svg").first
        strip.wait_for()
        first = strip.evaluate("svg => svg.outerHTML")
        page.locator('[data-action="late"]').focus()
        page.keyboard.press("ArrowRight")
        assert "Rank 1 is 2 steps late" in page.locator(".d2lps-player .d2lps-title").inner_text()
        assert page.locator(".strip svg").first.evaluate("svg => svg.outerHTML") != first


def test_a_bet_hides_its_result_until_it_is_made(browser: Any) -> None:
    choices, right = ["the tree", "the ring"], "the ring"
    bet = Bet("Who wins?", choices=choices, prediction=right, measurement=right, then=play(3, "ring"))
    with shown(browser, bet) as page:
        result, inner = page.locator(".result"), page.locator(".d2lps-player")
        inner.wait_for(state="attached")
        assert not result.is_visible()
        assert not inner.is_visible()
        assert "predicted" not in page.locator(".d2lps-bet").inner_text()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert result.is_visible()
        assert inner.is_visible()
        assert page.locator(".verdict").inner_text() == "It is: the ring."
        assert page.locator(".choice").all_inner_texts() == ["the tree\nyour bet", "the ring\npredicted\nmeasured"]
        assert page.locator(".verdict").evaluate("node => node === document.activeElement")
        first = picture(page)
        page.locator('[data-action="next"]').click()
        until(page, first)


@pytest.mark.parametrize(("bet", "words"), [
    ("30", "Your bet is 2 times what was measured."), ("3", "What was measured is 5 times your bet."),
    ("15.5", "You are within a tenth of what was measured."), ("15", "You were right."),
    ("-1", "It is: 15 ms."), ("0", "It is: 15 ms."),
])  # fmt: skip
def test_a_number_is_judged_by_the_measurement(browser: Any, bet: str, words: str) -> None:
    with shown(browser, Bet("How long?", unit="ms", prediction=12, measurement=15), width=390) as page:
        page.locator('[data-action="submit"]').click()  # nothing was said yet
        assert not page.locator(".result").is_visible()
        page.keyboard.type(bet)
        page.keyboard.press("Enter")
        assert page.locator(".verdict").inner_text() == words
        assert page.locator(".bar").all_inner_texts() == [f"your bet\n{bet} ms", "predicted\n12 ms", "measured\n15 ms"]


def test_one_click_skips_a_bet_and_print_shows_everything(browser: Any) -> None:
    with shown(browser, Bet("How long?", unit="ms", prediction=12, then=choices())) as page:
        page.locator(".d2lps-player").wait_for(state="attached")
        assert not page.locator(".d2lps-player").is_visible()
        page.emulate_media(media="print")
        assert page.locator(".d2lps-player").is_visible()
        assert page.locator(".bar").all_inner_texts() == ["predicted\n12 ms"]
        assert not page.locator('[data-action="skip"]').is_visible()
        page.emulate_media(media="screen")
        page.locator('[data-action="skip"]').click()
        assert page.locator(".d2lps-player").is_visible()
        assert page.locator(".verdict").inner_text() == "Here it is, without a bet."
        page.locator('[data-action="algorithm"]').select_option("1")
        assert page.locator(".d2lps-player .d2lps-title").inner_text() == "tree on 3"
