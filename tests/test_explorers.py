"""The topology explorer: what it shows against what a person works out, and its page in a browser."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from widget_page import middle, picture, shown

import d2lps
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.topology import Topology, dgx1, pcie_tree, ring, star
from d2lps.widgets import TopologyExplorer

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
    (lambda: TopologyExplorer({"two": star(2, 1e9)}, algorithms="ring"), "algorithms='ring' must be a list"),
    (lambda: TopologyExplorer({"two": star(2, 1e9)}, algorithms=[]), r"algorithms=\[\] must be a list"),
    (lambda: TopologyExplorer({"two": star(2, 1e9)}, nbytes=3), "nbytes=3 is less than one float32"),
])
def test_bad_arguments_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# ---- the page -----------------------------------------------------------------------------------------------------------


def explorer() -> TopologyExplorer:
    return TopologyExplorer({"ring": ring(3, 1e9), "PCIe": pcie_tree(2)}, nbytes=1e6, algorithms=["ring", "tree"])


def test_it_says_what_it_shows_and_is_small() -> None:
    said = repr(explorer())
    assert said.startswith("TopologyExplorer: all-reduce of 1,000,000 B. ring: ring 0.001333 s, tree ")
    assert len(json.dumps(explorer().data)) < 20_000


def test_it_fits_a_telephone_and_turns_dark(browser: Any) -> None:
    with shown(browser, explorer(), width=390) as page:
        color = "getComputedStyle(document.querySelector('.d2lps')).backgroundColor"
        assert page.evaluate(color) == "rgb(255, 255, 255)"
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        assert page.evaluate(color) == "rgb(22, 25, 29)"


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
