"""Race, sweep and topology explorer: what they show against what a person works out, and their pages in a browser."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from widget_page import middle, needs_chromium, picture, shown, until

import d2lps
from d2lps import cost
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.topology import Topology, dgx1, pcie_tree, ring, star
from d2lps.widgets import Race, Sweep, TopologyExplorer
from d2lps.widgets.race import progress


def tree_of_mine(comm: Communicator, tensor: torch.Tensor) -> None:
    all_reduce(comm, tensor, algorithm="tree")


def net(ranks: int) -> Topology:
    """One microsecond and 1 GB/s from rank to rank."""
    return star(ranks, bandwidth=1e9, latency=0.5e-6)


# ---- race ---------------------------------------------------------------------------------------------------------------


def test_progress_of_a_ring_of_two() -> None:
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.ones(4, device=comm.device), algorithm="ring")

    trace = d2lps.simulate(work, star(2, bandwidth=8.0)).trace  # two steps of 8 bytes, a second each
    complete, gathered = progress(trace)
    assert complete == [(0, 0), (1, 0.5), (2, 1)]
    assert gathered == [(0, 0.5), (1, 0.75), (2, 1)]


def test_a_race_is_won_by_the_fastest_and_equals_share_a_place() -> None:
    race = Race(star(4, bandwidth=1e9), ["tree", "ring", "halving_doubling", tree_of_mine], nbytes=16e6)
    lanes = race.data["lanes"]
    assert [lane["name"] for lane in lanes] == ["tree", "ring", "halving-doubling", "tree_of_mine"]
    assert [lane["place"] for lane in lanes] == [3, 1, 1, 3]
    assert [lane["seconds"] for lane in lanes] == pytest.approx([0.064, 0.024, 0.024, 0.064])
    assert race.data["end"] == max(race.data["stops"]) == pytest.approx(0.064)
    assert lanes[3]["complete"] == lanes[0]["complete"]


def test_a_tree_completes_one_tensor_then_twice_as_many() -> None:
    lane = Race(star(4, bandwidth=1e9), ["tree"], nbytes=1e9).data["lanes"][0]  # a second a step: two up, two down
    assert lane["complete"] == [[0, 0], [pytest.approx(2), 0.25], [pytest.approx(3), 0.5], [pytest.approx(4), 1]]


def test_a_race_says_its_result() -> None:
    assert repr(Race(star(2, bandwidth=1e9), ["ring"], nbytes=1e9)) == "Race: All-reduce: 1 GB on star(2): 1. ring 1 s"


# ---- sweep --------------------------------------------------------------------------------------------------------------


def test_every_point_of_a_sweep_is_the_formulas() -> None:
    names, sizes, ranks = ["tree", "ring", "halving_doubling"], [64, 6400, 640_000], [2, 4, 8]
    data = Sweep(net, names, sizes, ranks).data
    for p, rows in zip(ranks, data["times"], strict=True):
        for name, times in zip(names, rows, strict=True):
            assert times == pytest.approx([cost.all_reduce(name, n, p, 1e-6, 1e-9) for n in sizes])


def test_the_ring_overtakes_the_tree_where_the_formulas_cross() -> None:
    data = Sweep(net, ["tree", "ring"], [160, 16_000, 1_600_000], [4]).data
    start, crossing = data["reigns"][0]
    assert (start["best"], start["nbytes"], crossing["best"]) == (0, 160, 1)
    n = crossing["nbytes"]  # 4 alpha + 4 n beta = 6 alpha + 1.5 n beta
    assert n == pytest.approx(2e-6 / 2.5e-9)
    assert crossing["seconds"] == pytest.approx(cost.ring(n, 4, 1e-6, 1e-9)) == pytest.approx(cost.tree(n, 4, 1e-6, 1e-9))
    assert data["winners"] == [[[0], [1], [1]]]


def test_equally_fast_ones_win_together_and_the_first_reigns() -> None:
    data = Sweep(net, ["tree", tree_of_mine], [64, 6400], [4]).data
    assert data["winners"] == [[[0, 1], [0, 1]]]
    assert [reign["best"] for reign in data["reigns"][0]] == [0]


# ---- topology explorer -----------------------------------------------------------------------------------------------


def seconds(topology: Topology) -> float:
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.empty(250_000, device=comm.device), algorithm="ring")

    return d2lps.simulate(work, topology, device="meta").time


def test_without_a_cable_it_takes_as_long_as_a_simulation_without_it() -> None:
    topology = dgx1()
    machine = TopologyExplorer({"DGX-1": topology}, nbytes=1e6).data["machines"][0]
    names = [node["name"] for node in machine["nodes"]]
    assert machine["runs"][0][0]["seconds"] == seconds(topology)
    for cable, runs in list(zip(machine["cables"], machine["runs"][1:], strict=True))[::5]:
        less = topology.without(tuple(names[end] for end in cable["ends"]))
        run = (runs or machine["runs"][0])[0]
        if "lost" in run:
            with pytest.raises(ValueError, match="has no route"):
                seconds(less)
        else:
            assert run["seconds"] == seconds(less)


def test_a_ring_of_three_without_a_cable_goes_the_long_way() -> None:
    machine = TopologyExplorer({"ring": ring(3, 1e9)}, nbytes=3e6).data["machines"][0]
    assert [cable["ends"] for cable in machine["cables"]] == [[0, 1], [0, 2], [1, 2]]
    assert machine["routes"]["0 1"] == "0 1"
    assert machine["changed"][0] == {"0 1": "0 2 1", "1 0": "1 2 0"}
    whole, less = machine["runs"][0][0], machine["runs"][1][0]
    # 4 steps of 1 MB at 1 GB/s; the way back, which is free, takes what the missing cable carried
    assert (whole["seconds"], less["seconds"]) == (pytest.approx(0.004), pytest.approx(0.004))
    # links: 0 -> 1, 0 -> 2, 1 -> 0, 1 -> 2, 2 -> 1, 2 -> 0
    assert whole["bytes"] == "4000000 0 0 4000000 0 4000000"
    assert less["load"] == "0 1000 0 1000 1000 1000"


def test_who_has_no_route_is_named_and_an_unused_cable_changes_nothing() -> None:
    machine = TopologyExplorer({"PCIe": pcie_tree(2, 16e9, 0)}, nbytes=16e6).data["machines"][0]
    names = [[machine["nodes"][end]["name"] for end in cable["ends"]] for cable in machine["cables"]]
    assert names == [["gpu0", "pcie"], ["gpu1", "pcie"], ["cpu", "pcie"]]
    assert machine["runs"][1][0] == {"lost": "gpu0 → gpu1"}
    assert machine["changed"][0]["0 1"] is None
    assert machine["runs"][3][0]["seconds"] == machine["runs"][0][0]["seconds"] == pytest.approx(0.001)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "words"), [
    (lambda: TopologyExplorer({}), r"machines=\{\} is empty"),
    (lambda: TopologyExplorer({"big": star(90, 1e9)}), r"star\(90\) has 91 nodes, and a picture has room for 80"),
    (lambda: TopologyExplorer({"two": star(2, 1e9)}, algorithms=["rong"]), "rong"),
    (lambda: Race(star(2, 1e9), "ring"), "algorithms='ring' must be a list"),
    (lambda: Race(star(2, 1e9), []), r"algorithms=\[\] must be a list"),
    (lambda: Race(star(2, 1e9), ["ring"], nbytes=3), "nbytes=3 is less than one float32"),
    (lambda: Sweep(net, ["ring"], [1e6, 1e3], [2]), r"sizes=\[1000000, 1000\] must be"),
    (lambda: Sweep(net, ["ring"], [1e3, 1e6], []), r"ranks=\[\] must be"),
    (lambda: Sweep(net, ["ring"], [1e3, 1e6], [1, 2]), r"ranks=\[1, 2\] must be"),
])
def test_bad_arguments_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# ---- pages --------------------------------------------------------------------------------------------------------------

MAKE = {
    "race": lambda: Race(star(4, bandwidth=1e9), ["tree", "ring"], nbytes=16e6),
    "sweep": lambda: Sweep(net, ["tree", "ring"], [160, 1600, 16_000], [2, 4, 8]),
    "topology": lambda: TopologyExplorer({"ring": ring(3, 1e9), "PCIe": pcie_tree(2)}, nbytes=1e6, algorithms=["ring", "tree"]),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_sentence_and_a_picture_stand_in(kind: str) -> None:
    widget = MAKE[kind]()
    bundle, _ = widget._repr_mimebundle_()
    assert bundle["text/plain"] == repr(widget)
    assert widget._still().startswith(b"\x89PNG")
    assert len(json.dumps(widget.data)) < 20_000


@needs_chromium
@pytest.mark.parametrize("kind", MAKE)
def test_it_fits_a_telephone_and_turns_dark(browser: Any, kind: str) -> None:
    with shown(browser, MAKE[kind](), width=390) as page:
        color = "getComputedStyle(document.querySelector('.d2lps')).backgroundColor"
        assert page.evaluate(color) == "rgb(255, 255, 255)"
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        assert page.evaluate(color) == "rgb(22, 25, 29)"


@needs_chromium
def test_the_race_steps_and_plays(browser: Any) -> None:
    with shown(browser, MAKE["race"]()) as page:
        opening, said = picture(page), page.locator(".d2lps-now")
        assert 0 < page.evaluate("model.get('t')") < 0.024  # in the middle of the race
        page.locator('[data-action="next"]').click()
        until(page, opening)
        page.keyboard.press("Home")
        first = picture(page)
        assert first != opening
        page.keyboard.press("End")
        assert said.inner_text() == "tree finished in 64\u00a0ms."
        page.keyboard.press("Home")
        assert said.inner_text() == "All ranks start with their own data."
        assert picture(page) == first
        page.locator('[data-action="play"]').click()
        until(page, first)


@needs_chromium
def test_the_sweep_follows_cursor_and_slider(browser: Any) -> None:
    with shown(browser, MAKE["sweep"]()) as page:
        said, plot = page.locator(".now"), page.locator("svg.plot")
        assert said.inner_text().startswith("1.6\u00a0kB on 4 ranks: ring, ")
        plot.hover(position={"x": 70, "y": 100})
        assert said.inner_text().startswith("160\u00a0B on 4 ranks: tree, ")
        plot.focus()
        page.keyboard.press("End")
        assert said.inner_text().startswith("16\u00a0kB on 4 ranks: ring, ")
        page.locator('[data-action="ranks"]').focus()
        page.keyboard.press("Home")
        assert said.inner_text().startswith("16\u00a0kB on 2 ranks: ")


@needs_chromium
def test_a_reader_removes_a_cable_and_chooses_a_route(browser: Any) -> None:
    machines = {"ring": ring(3, 1e9), "PCIe": pcie_tree(2, 16e9, 0)}
    with shown(browser, TopologyExplorer(machines, 1e6, ["ring", "tree"])) as page:
        first, result, route = picture(page), page.locator(".result"), page.locator(".route")
        page.locator('[data-node="0"]').click()
        page.locator('[data-node="1"]').click()
        assert route.inner_text() == "gpu0 → gpu1: 1 link, 0\u00a0s, 1\u00a0GB/s"
        page.locator('[data-cable="0"]').focus()
        page.keyboard.press("Enter")
        assert "without gpu0 – gpu1: " in result.inner_text()
        assert route.inner_text() == "gpu0 → gpu2 → gpu1: 2 links, 0\u00a0s, 1\u00a0GB/s"
        page.keyboard.press("ArrowRight")
        assert page.locator(".about").inner_text().startswith("gpu0 – gpu2: 1\u00a0GB/s each way")
        page.locator('[data-action="restore"]').click()
        page.locator('[data-action="src"]').select_option("-1")
        page.locator('[data-action="dst"]').select_option("-1")
        assert "without" not in result.inner_text()
        page.locator('[data-action="machine"]').select_option("1")
        page.mouse.click(*middle(page.locator('[data-cable="0"] .reach')))
        assert "impossible, gpu0 → gpu1 has no route" in result.inner_text()
        assert page.locator(".hottest").inner_text() == ""
        page.keyboard.press("Escape")
        busiest = "Busiest: gpu0 → pcie, gpu1 → pcie, pcie → gpu0, 1 more, at 100 %"
        assert page.locator(".hottest").inner_text() == busiest
        page.locator('[data-action="machine"]').select_option("0")
        assert picture(page).replace('tabindex="0"', "") == first.replace('tabindex="0"', "")
