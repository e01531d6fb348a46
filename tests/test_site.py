"""The built site in a real browser, with the network off: what a reader sees who has no Python.

D2LPS_SITE names a built site; without it the site is built first.
"""

import functools
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dark_pictures
import nbformat
import pytest
from chapters import chapters
from compared import reachable, views
from execute import listed
from normalize import models
from widget_page import middle, needs_chromium

from d2lps import figures

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[1]
AXE = ROOT / "_build/node/node_modules/axe-core/axe.min.js"
# The theme complains of a reader's first visit, when no mode is stored yet.
ALLOWED = ("Got invalid theme mode",)
SECONDS = 1000  # playwright counts in milliseconds

pytestmark = needs_chromium


class Quiet(SimpleHTTPRequestHandler):
    """A file server that does not print each request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built site."""
    if "D2LPS_SITE" not in os.environ:
        subprocess.run(["make", "book"], cwd=ROOT, check=True)
    return ROOT / os.environ.get("D2LPS_SITE", "_build/html")


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site's address on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def context(browser: "playwright.Browser") -> Iterator["playwright.BrowserContext"]:
    """One reader, whose browser keeps what it has loaded for one page for the next."""
    with browser.new_context() as context:
        yield context


@pytest.fixture
def page(context: "playwright.BrowserContext", address: str) -> Iterator["playwright.Page"]:
    """A page that reaches nothing but the site; at the end it must have found no fault."""
    page = context.new_page()
    faults = watch(page, address)
    yield page
    page.close()
    assert faults == []


def watch(page: "playwright.Page", address: str) -> list[str]:
    """Collect requests to elsewhere, failed ones, errors of the console and exceptions."""
    faults: list[str] = []
    here = (address, "file:", "data:", "blob:")
    page.on("request", lambda request: request.url.startswith(here) or faults.append(f"elsewhere: {request.url}"))
    page.on("requestfailed", lambda request: faults.append(f"not loaded: {request.url}"))
    page.on("response", lambda response: response.status < 400 or faults.append(f"{response.status}: {response.url}"))
    page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    page.on("console", lambda message: message.type == "error" and not message.text.startswith(ALLOWED)
            and faults.append(f"console: {message.text}"))
    return faults


def test_a_request_to_elsewhere_fails_and_is_a_fault(context: "playwright.BrowserContext", address: str) -> None:
    page = context.new_page()
    faults = watch(page, address)
    for url in ("https://example.org/x.png", "http://192.0.2.1/y.png"):  # names and numbers kept for examples
        page.set_content(f'<img src="{url}">')
        page.wait_for_function("document.querySelector('img').complete", timeout=30 * SECONDS)
        assert {f"elsewhere: {url}", f"not loaded: {url}"} <= set(faults)
    page.close()


LANDING, *_ = PAGES = listed()
CHAPTERS = [chapter.page for chapter in chapters(ROOT)]


QUICK = [LANDING, "book/one_machine/ring_synchronization", "book/parallel_training/hybrid_parallelism"]  # which `make test` opens


def for_each(names: list[str]) -> pytest.MarkDecorator:
    """For each of these pages; the tests of a page go to one worker, which opens it once for all that look (see `seen`)."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.xdist_group(name)] + [pytest.mark.slow] * (name not in QUICK)

    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


def test_the_pages_that_make_test_opens_are_there() -> None:
    assert set(QUICK) <= set(PAGES)



# Where a widget of this class is on its page.
SELECTORS = {"Player": ".d2lps-player", "TopologyExplorer": ".d2lps-topology",
             "Bet": ".d2lps-bet", "Choices": ".d2lps-choices", "Lanes": ".d2lps-lanes",
             "StepPlayer": ".d2lps-steps:not(.d2lps-plans, .d2lps-planning)", "PlanExplorer": ".d2lps-plans",
             "PlanningExplorer": ".d2lps-planning"}


def widgets(name: str) -> list[str]:
    """The classes of the library's widgets that the page's notebook shows, in their order; the landing page shows a player."""
    if name == LANDING:
        return ["Player"]
    path = ROOT / f"{name}.ipynb"
    if not path.exists():
        return []
    notebook = nbformat.read(path, as_version=4)
    shown = [widget for cell in notebook.cells for view in views(cell) for widget in reachable(notebook, view)]
    classes = [models(notebook)[widget].state.get("_anywidget_id", "") for widget in shown]
    return [each.rpartition(".")[2] for each in classes if each.startswith("d2lps.widgets.")]


WITH_WIDGETS = [name for name in PAGES if widgets(name)]


PICTURE = "svg:not(legend svg)"  # a legend's samples of lines never change


def drawing(widget: "playwright.Locator") -> str:
    """The widget's picture as text."""
    return widget.locator(PICTURE).first.evaluate("svg => svg.outerHTML")


def wait_for(page: "playwright.Page", widget: "playwright.Locator", what: str, picture: str) -> None:
    """Wait until the widget's picture is ("==") or is not ("!=") the given one."""
    code = f"([widget, picture]) => widget.querySelector('{PICTURE}').outerHTML {what}= picture"
    page.wait_for_function(code, arg=[widget.element_handle(), picture], timeout=30 * SECONDS)


def settle(widget: "playwright.Locator") -> str:
    """Wait for the end of the gliding from one step to the next, and return the picture."""
    before = ""
    while (picture := drawing(widget)) != before:
        before = picture
        widget.page.wait_for_timeout(0.2 * SECONDS)
    return picture


def open_widgets(page: "playwright.Page", url: str, name: str) -> list["playwright.Locator"]:
    """Load a page, unfold its solutions as a reader would, wait until all its widgets have drawn; return them."""
    page.goto(url)
    page.wait_for_function("!document.querySelector('.solution.dropdown:not(.toggle)')", timeout=30 * SECONDS)
    page.evaluate("document.querySelectorAll('.toggle-hidden button.toggle-button').forEach(button => button.click())")
    outermost, expected = ", ".join(f"{each}:not(.d2lps {each})" for each in SELECTORS.values()), widgets(name)
    found = page.locator(outermost)
    for index, kind in enumerate(expected):
        found.nth(index).wait_for(state="attached", timeout=30 * SECONDS)
        assert f" {SELECTORS[kind][1:]} " in f" {found.nth(index).get_attribute('class')} "
        if kind == "Bet":  # what it hides is looked at like everything else
            found.nth(index).locator('[data-action="skip"]').click()
    if name == LANDING:
        take_over(page)
    assert found.count() == len(expected)
    page.wait_for_function("!document.querySelector('.d2lps [aria-busy]')", timeout=30 * SECONDS)
    inner = [widget.locator(".d2lps:not(:has(.d2lps))") for widget in found.all()]
    moving = [within.first if within.count() else widget for widget, within in zip(found.all(), inner, strict=True)]
    for widget in moving:
        widget.locator("svg :is(path, rect), .choice, .bar").first.wait_for(state="attached", timeout=30 * SECONDS)
    # A bet or a choice that holds no widget is looked at in test_bets.py.
    kept = [widget for widget in moving if not widget.evaluate("node => node.matches('.d2lps-bet, .d2lps-choices')")]
    for number, widget in enumerate(kept):  # a name, by which the browser itself finds it: Playwright searches all of the page
        widget.evaluate("(node, number) => node.dataset.moves = number", number)
    return [page.locator(f'[data-moves="{number}"]') for number in range(len(kept))]


def take_over(page: "playwright.Page") -> None:
    """Stop what plays by itself, as a reader would; it must not begin again by itself."""
    page.locator('[data-action="play"][data-state="playing"]').click(timeout=30 * SECONDS)
    page.locator('[data-action="first"]').click()


def by_mouse(page: "playwright.Page", widget: "playwright.Locator") -> None:
    """What a reader does first with a mouse: the next step, another plan, a cable less."""
    if (button := widget.locator('button[data-action="next"]')).count():
        button.click()
    elif (block := widget.locator(".block")).count():
        block.first.click()
    elif (choice := widget.locator('[data-action="tp"]:not(:checked)')).count():
        choice.last.click(force=True)
    elif (part := widget.locator("[data-part]")).count():
        part.last.click()
    else:
        page.mouse.click(*middle(widget.locator(".cable .reach").first))


def by_keyboard(page: "playwright.Page", widget: "playwright.Locator") -> None:
    """With keys, what can come after that: the step before, the first plan, the cable put back."""
    if widget.locator('button[data-action="next"]').count():
        widget.focus()
        page.keyboard.press("ArrowLeft")
    elif widget.locator(".block").count():
        widget.focus()
        page.keyboard.press("ArrowRight")
    elif (choice := widget.locator('[data-action="tp"]:checked')).count():
        choice.focus()
        page.keyboard.press("ArrowLeft")
    elif (unit := widget.locator("svg.unit")).count():
        unit.focus()
        page.keyboard.press("Enter")
    else:
        widget.locator('.cable[tabindex="0"]').focus()
        page.keyboard.press("Enter")


@for_each(PAGES)
def test_page_is_without_a_fault_and_its_widgets_move(page: "playwright.Page", address: str, name: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    found = open_widgets(page, f"{address}/{name}.html", name)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it does not fit a telephone"
    page.set_viewport_size({"width": 1280, "height": 720})
    page.wait_for_load_state("networkidle")
    assert page.locator("article h1").first.is_visible()
    for widget in found:
        if (start := widget.locator('button[data-action="first"]')).count():
            start.click()  # it opens in mid-story, where a step forth and one back do not lead
        first = settle(widget)
        by_mouse(page, widget)
        wait_for(page, widget, "!=", first)
        second = settle(widget)
        assert second != first
        by_keyboard(page, widget)
        wait_for(page, widget, "!=", second)
        if (play := widget.locator('button[data-action="play"]')).count():
            wait_for(page, widget, "==", first)  # one step forth and one back
            page.keyboard.press("ArrowRight")
            wait_for(page, widget, "!=", first)
            widget.locator('button[data-action="previous"]').click()
            wait_for(page, widget, "==", first)
            play.click()
            wait_for(page, widget, "!=", first)
            wait_for(page, widget, "!=", drawing(widget))
            play.click()  # what plays on would take the processor from those that follow


@for_each(WITH_WIDGETS)
def test_without_javascript_a_picture_stands_in(browser: "playwright.Browser", address: str, name: str) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{address}/{name}.html")
        pictures = page.locator("noscript img").all()
        assert len(pictures) >= len(widgets(name))
        for picture in pictures:
            assert picture.is_visible()
            assert picture.get_attribute("alt")
            assert picture.evaluate("image => image.complete && image.naturalWidth") > 0


@pytest.mark.skipif(not WITH_WIDGETS, reason="no page has a widget yet")
def test_site_works_from_a_folder(page: "playwright.Page", site: Path) -> None:
    name = WITH_WIDGETS[1]
    widget = open_widgets(page, (site / f"{name}.html").resolve().as_uri(), name)[0]
    first = drawing(widget)
    by_mouse(page, widget)
    wait_for(page, widget, "!=", first)


def test_the_landing_page_plays_by_itself_until_a_reader_takes_over(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}/{LANDING}.html")
    play, scrub = page.locator('[data-action="play"]'), page.locator('[data-action="scrub"]')
    playing = page.locator('[data-action="play"][data-state="playing"]')
    playing.wait_for(timeout=30 * SECONDS)
    assert page.evaluate("document.querySelector('.d2lps-player').getBoundingClientRect().top") < 800, "it is out of sight"
    page.evaluate("document.querySelector('[data-action=last]').click()")  # by no reader's hand
    assert play.get_attribute("data-state") != "playing"
    playing.wait_for(timeout=30 * SECONDS)  # it begins again
    play.click()
    where = scrub.input_value()
    page.wait_for_timeout(4 * SECONDS)  # longer than it would rest
    assert play.get_attribute("data-state") != "playing"
    assert scrub.input_value() == where


def test_the_landing_page_keeps_still_for_those_who_want_less_motion(browser: "playwright.Browser", address: str) -> None:
    with browser.new_context(reduced_motion="reduce") as context:
        page = context.new_page()
        page.goto(f"{address}/{LANDING}.html")
        play = page.locator('[data-action="play"]')
        play.wait_for(timeout=30 * SECONDS)
        page.wait_for_timeout(2 * SECONDS)
        assert play.get_attribute("data-state") != "playing"


# ---- what a reader sees, page by page -------------------------------------------------------------------------------

SEEN = """() => {
  const ALT = /alt="[^"]*/g;
  const shown = (element) => element.getClientRects().length > 0;
  const all = (what) => [...document.querySelectorAll("article " + what)];
  const plots = all(".cell_output img").filter((image) => !image.closest("noscript") && !image.matches(".d2lps-dark"));
  const captionOf = (image) => image.closest("figure")?.querySelector("figcaption")?.innerText.trim() ?? "";
  const tops = all(".d2lps-player, .d2lps-steps").map((player) => player.getBoundingClientRect().top + scrollY);
  return {
    alts: [...all("img").map((image) => image.alt), ...all("noscript").flatMap((each) => each.textContent.match(ALT) ?? [""])],
    captions: plots.map(captionOf),
    player: tops.length ? Math.min(...tops) : null,
    wide: all(".cell_input pre").filter((code) => shown(code) && code.scrollWidth > code.clientWidth)
      .map((code) => code.innerText),
    formulas: all(".math mjx-container").filter(shown).map((formula) => formula.getBoundingClientRect().height),
    unformed: all("mjx-merror").length,
  };
}"""
LETTERS = """() => [...document.querySelectorAll("article figure img.d2lps-light")]
  .filter((image) => image.getClientRects().length)
  .map((image) => [image.getBoundingClientRect().width / image.getAttribute("width"), image.alt])"""
MOST = 3e6  # bytes that a page may load, uncompressed
TWO_SCREENS = 1600  # pixels
SMALLEST = 8  # pixels of a letter on a telephone
LETTER = 9 / 72 * 160  # pixels of a figure's smallest letter: 9 points at figures.style()'s 160 dots an inch


def wait_for_widgets(page: "playwright.Page", url: str) -> None:
    """Load a page and wait until every widget has its place."""
    page.goto(url)
    views = "document.querySelectorAll('script[type=\"application/vnd.jupyter.widget-view+json\"]')"
    drawn = f"[...{views}].every(view => view.parentElement.querySelector('.widget-subarea > *'))"
    page.wait_for_function(drawn, timeout=30 * SECONDS)
    page.wait_for_load_state("networkidle")


@pytest.fixture(scope="module")
def seen(browser: "playwright.Browser", address: str) -> Callable[[str], dict[str, Any]]:
    """What a reader sees of a page: on a wide screen, light and dark, and on a telephone. One look for many tests."""

    @functools.cache
    def look(name: str) -> dict[str, Any]:
        loaded: dict[str, int] = {}
        with browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce") as context:
            context.add_init_script("localStorage.setItem('mode', 'light'); localStorage.setItem('theme', 'light')")
            page = context.new_page()
            page.on("response", lambda response: loaded.update({response.url.removeprefix(address): len(response.body())}))
            wait_for_widgets(page, f"{address}/{name}.html")
            found = page.evaluate(SEEN)
            page.evaluate("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
            page.wait_for_load_state("networkidle")
            page.evaluate(AXE.read_text())
            faults = {"light": axe(page, "{}")}
            page.emulate_media(color_scheme="dark")
            page.evaluate("Object.assign(document.documentElement.dataset, { mode: 'dark', theme: 'dark' })")
            faults["dark"] = axe(page, "{ runOnly: ['color-contrast'] }")  # only colors differ
            page.set_viewport_size({"width": 390, "height": 844})
            return found | {"loaded": loaded, "faults": faults, "letters": page.evaluate(LETTERS)}

    return look


def axe(page: "playwright.Page", options: str) -> list[tuple[str, list[str]]]:
    """What axe finds, but for the theme's own: a label that hides the words of "Show code cell source"."""
    where = "{ include: ['article'], exclude: ['details.hide > summary'] }"
    found = page.evaluate(f"axe.run({where}, {{ resultTypes: ['violations'], ...{options} }})")
    return [(fault["id"], [node["html"][:200] for node in fault["nodes"]]) for fault in found["violations"]]


def is_sentence(text: str) -> bool:
    """Whether a text has at least three words, a capital letter or number at its beginning and a full stop at its end.

    >>> is_sentence("Two curves rise."), is_sentence("two curves")
    (True, False)
    """
    return len(text.split()) > 2 and (text[0].isupper() or text[0].isdigit()) and text[-1] in ".?!"


@for_each(PAGES)
def test_a_page_loads_what_it_needs_and_no_more(seen: Callable[[str], dict[str, Any]], name: str) -> None:
    loaded = seen(name)["loaded"]
    assert sum(loaded.values()) < MOST, sorted(loaded.items(), key=lambda item: -item[1])[:6]
    assert not [url for url in loaded if "fontawesome.js" in url or ("mathjax" in url and not url.endswith(".woff"))]


@for_each(PAGES)
def test_formulas_are_typeset(seen: Callable[[str], dict[str, Any]], site: Path, name: str) -> None:
    written = (site / f"{name}.html").read_text()
    assert "\\(" not in "".join(part.partition("</span>")[0] for part in written.split('class="math ')[1:])
    assert ('class="math ' in written) == ("formulas.css" in written)
    assert all(height > 5 for height in seen(name)["formulas"])
    assert seen(name)["unformed"] == 0


@for_each(PAGES)
def test_every_picture_has_a_sentence_for_those_who_cannot_see_it(seen: Callable[[str], dict[str, Any]], name: str) -> None:
    assert [alt for alt in seen(name)["alts"] if not is_sentence(alt.removeprefix('alt="'))] == []


@for_each(PAGES)
def test_every_plot_has_a_caption_with_a_number(seen: Callable[[str], dict[str, Any]], name: str) -> None:
    number = re.compile(r"Figure \d+(\.\d+)? ?\S")
    assert [caption for caption in seen(name)["captions"] if not number.match(caption) or not is_sentence(caption)] == []


@for_each([LANDING, *CHAPTERS])
def test_the_first_player_is_within_two_screens(seen: Callable[[str], dict[str, Any]], name: str) -> None:
    top = seen(name)["player"]
    assert top is not None
    assert top < TWO_SCREENS


@for_each(PAGES)
def test_code_fits_its_column(seen: Callable[[str], dict[str, Any]], name: str) -> None:
    assert seen(name)["wide"] == []


@for_each(PAGES)
def test_figures_can_be_read_on_a_telephone(seen: Callable[[str], dict[str, Any]], name: str) -> None:
    assert [(alt, share * LETTER) for share, alt in seen(name)["letters"] if share * LETTER < SMALLEST] == []


@pytest.mark.parametrize("page_name", CHAPTERS)
def test_a_chapter_says_what_its_card_needs(page_name: str) -> None:
    said = nbformat.read(ROOT / f"{page_name}.ipynb", as_version=4).metadata.get("d2lps", {})
    assert 10 <= said.get("minutes", 0) <= 180
    assert said.get("needs")
    assert is_sentence(said.get("teaser", ""))
    assert said.get("picture")


@pytest.mark.parametrize("mode", ["light", "dark"])
@for_each(PAGES)
def test_axe_finds_nothing_of_ours(seen: Callable[[str], dict[str, Any]], name: str, mode: str) -> None:
    assert seen(name)["faults"][mode] == []


def test_the_palette_is_the_same_in_plots_and_players_and_on_the_page() -> None:
    players = (ROOT / "d2lps/widgets/player.css").read_text()
    common = (ROOT / "d2lps/widgets/common.css").read_text()
    page = (ROOT / "book/_static/d2lps.css").read_text()
    for rank, (light, dark) in enumerate(zip(figures.COLORS, dark_pictures.DARK, strict=True)):
        assert re.search(rf"--rank-{rank}: (light-dark\({light}, {dark}\)|{light});", players), rank
        assert dark == light or f"{light}, {dark}" in players
    for color in figures.COLORS[:4]:
        assert color in page
    assert f"--page: light-dark(#ffffff, {dark_pictures.GROUND})" in common
    assert f"--ink: light-dark(#1f2328, {dark_pictures.INK})" in common
    assert f"--pst-color-background: {dark_pictures.GROUND};" in page


def test_who_reads_in_the_dark_prints_in_the_light(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}/{CHAPTERS[0]}.html")
    page.evaluate("Object.assign(document.documentElement.dataset, { mode: 'dark', theme: 'dark' })")
    shade = "() => getComputedStyle(document.querySelector('article p')).color"
    bright = page.evaluate(shade)
    page.emulate_media(media="print")
    page.wait_for_function(f"({shade})() !== {bright!r}")
    assert max(map(int, re.findall(r"\d+", page.evaluate(shade)))) < 64
    assert page.locator("img.d2lps-dark").first.is_hidden()
    page.emulate_media(media="screen")
    page.wait_for_function(f"({shade})() === {bright!r}")


def test_paper_has_whole_lines_and_players_and_colored_legends(page: "playwright.Page", address: str) -> None:
    page.set_viewport_size({"width": 700, "height": 1000})  # what a sheet has between its margins
    wait_for_widgets(page, f"{address}/book/parallel_training/pipeline_parallelism.html")
    page.emulate_media(media="print")
    assert page.evaluate("""() => [...document.querySelectorAll("article pre")].filter((pre) => pre.scrollWidth > pre.clientWidth)
      .map((pre) => pre.innerText)""") == []
    assert not page.locator("details.above-input").first.is_visible()
    for kept, value in (("breakInside", "avoid"), ("printColorAdjust", "exact")):
        assert page.locator(".d2lps-player").first.evaluate("(node, kept) => getComputedStyle(node)[kept]", kept) == value


def test_a_table_of_long_names_fits_a_telephone(page: "playwright.Page", address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{address}/book/parallel_training/pipeline_parallelism.html")
    table = page.locator("table", has_text="torch.distributed.pipelining")
    assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")


def test_a_page_says_what_it_is_to_those_who_link_to_it(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}/{LANDING}.html")
    for name in ("og:title", "og:description", "og:site_name"):
        assert page.locator(f'meta[property="{name}"]').get_attribute("content")
    description = page.locator('meta[name="description"]').get_attribute("content")
    assert description.startswith("How do machines")


def test_an_address_that_leads_nowhere_leads_home(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}/404.html")
    assert page.locator("h1").inner_text() == "No such page"
    page.locator("a").click()
    page.wait_for_load_state("networkidle")
    assert page.locator("h1").first.inner_text().startswith("Dive into Parameter Servers")
