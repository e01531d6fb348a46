"""The built site in a real browser, with the network off: what a reader sees who has no Python.

D2LPS_SITE names a built site; without it the site is built first.
"""

import functools
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
from compared import reachable, views
from execute import listed
from normalize import models
from widget_page import chromium, middle, needs_chromium

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[1]
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


@pytest.fixture(scope="session")
def browser() -> Iterator["playwright.Browser"]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
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


# Where a widget of this class is on its page.
SELECTORS = {"Player": ".d2lps-player", "Race": ".d2lps-race", "Sweep": ".d2lps-sweep", "TopologyExplorer": ".d2lps-topology",
             "Bet": ".d2lps-bet", "Choices": ".d2lps-choices", "Lanes": ".d2lps-lanes"}


def widgets(name: str) -> list[str]:
    """The classes of the library's widgets that the page's notebook shows, in their order."""
    path = ROOT / f"{name}.ipynb"
    if not path.exists():
        return []
    notebook = nbformat.read(path, as_version=4)
    shown = [widget for cell in notebook.cells for view in views(cell) for widget in reachable(notebook, view)]
    classes = [models(notebook)[widget].state.get("_anywidget_id", "") for widget in shown]
    return [each.rpartition(".")[2] for each in classes if each.startswith("d2lps.widgets.")]


PAGES = listed()
WITH_WIDGETS = [name for name in PAGES if widgets(name)]


def drawing(widget: "playwright.Locator") -> str:
    """The widget's picture as text."""
    return widget.locator("svg").first.evaluate("svg => svg.outerHTML")


def wait_for(page: "playwright.Page", widget: "playwright.Locator", what: str, picture: str) -> None:
    """Wait until the widget's picture is ("==") or is not ("!=") the given one."""
    code = f"([widget, picture]) => widget.querySelector('svg').outerHTML {what}= picture"
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
    assert found.count() == len(expected)
    page.wait_for_function("!document.querySelector('.d2lps [aria-busy]')", timeout=30 * SECONDS)
    inner = [widget.locator(".d2lps:not(:has(.d2lps))") for widget in found.all()]
    moving = [within.first if within.count() else widget for widget, within in zip(found.all(), inner, strict=True)]
    for widget in moving:
        widget.locator("svg :is(path, rect), .choice, .bar").first.wait_for(state="attached", timeout=30 * SECONDS)
    # A bet or a choice that holds no widget is looked at in test_bets.py.
    return [widget for widget in moving if not widget.evaluate("node => node.matches('.d2lps-bet, .d2lps-choices')")]


def by_mouse(page: "playwright.Page", widget: "playwright.Locator") -> None:
    """What a reader does first with a mouse: the next step, another size, a cable less."""
    if (button := widget.locator('button[data-action="next"]')).count():
        button.click()
    elif (plot := widget.locator("svg.plot")).count():
        plot.hover(position={"x": 70, "y": 50})
    else:
        page.mouse.click(*middle(widget.locator(".cable .reach").first))


def by_keyboard(page: "playwright.Page", widget: "playwright.Locator") -> None:
    """With keys, what can come after that: the step before, yet another size, the cable put back."""
    if widget.locator('button[data-action="next"]').count():
        widget.focus()
        page.keyboard.press("ArrowLeft")
    elif (plot := widget.locator("svg.plot")).count():
        plot.focus()
        page.keyboard.press("ArrowRight")
    else:
        widget.locator('.cable[tabindex="0"]').focus()
        page.keyboard.press("Enter")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_without_a_fault_and_its_widgets_move(page: "playwright.Page", address: str, name: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    found = open_widgets(page, f"{address}/{name}.html", name)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it does not fit a telephone"
    page.set_viewport_size({"width": 1280, "height": 720})
    page.wait_for_load_state("networkidle")
    assert page.locator("article h1").first.is_visible()
    for widget in found:
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


@pytest.mark.parametrize("name", WITH_WIDGETS)
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
    name = WITH_WIDGETS[0]
    widget = open_widgets(page, (site / f"{name}.html").resolve().as_uri(), name)[0]
    first = drawing(widget)
    by_mouse(page, widget)
    wait_for(page, widget, "!=", first)
