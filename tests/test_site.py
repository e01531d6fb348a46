"""The built site in a real browser, with the network off: what a reader sees who has no Python.

D2LPS_SITE names a built site; without it the site is built first.
"""

import functools
import os
import shutil
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

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The theme complains of a reader's first visit, when no mode is stored yet.
ALLOWED = ("Got invalid theme mode",)
SECONDS = 1000  # playwright counts in milliseconds

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


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
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "playwright.Browser", address: str) -> Iterator["playwright.Page"]:
    """A page that reaches nothing but the site; at the end it must have found no fault."""
    context = browser.new_context()
    page = context.new_page()
    faults = watch(page, address)
    yield page
    context.close()
    assert faults == []


def watch(page: "playwright.Page", address: str) -> list[str]:
    """Block every request to elsewhere, and collect those, failed ones, errors of the console and exceptions."""
    faults: list[str] = []

    def answer(route: "playwright.Route") -> None:
        if route.request.url.startswith((address, "file:", "data:", "blob:")):
            route.continue_()
        else:
            route.abort()

    page.route("**/*", answer)
    page.on("requestfailed", lambda request: faults.append(f"not loaded: {request.url}"))
    page.on("response", lambda response: response.status < 400 or faults.append(f"{response.status}: {response.url}"))
    page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    page.on("console", lambda message: message.type == "error" and not message.text.startswith(ALLOWED)
            and faults.append(f"console: {message.text}"))
    return faults


def players(name: str) -> int:
    """How many players the page's notebook shows."""
    path = ROOT / f"{name}.ipynb"
    if not path.exists():
        return 0
    notebook = nbformat.read(path, as_version=4)
    shown = [widget for cell in notebook.cells for view in views(cell) for widget in reachable(notebook, view)]
    return sum("d2lps-player" in models(notebook)[widget].state.get("_esm", "") for widget in shown)


PAGES = listed()
WITH_PLAYERS = [name for name in PAGES if players(name)]


# Every shape of a picture. Not in their order: messages that stay in flight while others come back are drawn before them.
SHAPES = "[...svg.querySelectorAll('*')].map(node => node.cloneNode().outerHTML + node.textContent).sort().join()"


def drawing(player: "playwright.Locator") -> str:
    """The player's picture as text."""
    return player.locator("svg").first.evaluate(f"svg => {SHAPES}")


def wait_for(page: "playwright.Page", player: "playwright.Locator", what: str, picture: str) -> None:
    """Wait until the player's picture is ("==") or is not ("!=") the given one."""
    code = f"([player, picture]) => {{ const svg = player.querySelector('svg'); return {SHAPES} {what}= picture }}"
    page.wait_for_function(code, arg=[player.element_handle(), picture], timeout=5 * SECONDS)


def settle(player: "playwright.Locator") -> str:
    """Wait for the end of the gliding from one step to the next, and return the picture."""
    before = ""
    while (picture := drawing(player)) != before:
        before = picture
        player.page.wait_for_timeout(0.2 * SECONDS)
    return picture


def open_players(page: "playwright.Page", url: str, count: int) -> list["playwright.Locator"]:
    """Load a page, unfold its solutions as a reader would, and wait until all its players have drawn."""
    page.goto(url)
    page.wait_for_function("!document.querySelector('.solution.dropdown:not(.toggle)')", timeout=15 * SECONDS)
    page.evaluate("document.querySelectorAll('.toggle-hidden button.toggle-button').forEach(button => button.click())")
    found = page.locator(".d2lps-player")
    for index in range(count):
        found.nth(index).locator("svg").first.wait_for(timeout=15 * SECONDS)
    assert found.count() == count
    return [found.nth(index) for index in range(count)]


@pytest.mark.parametrize("name", PAGES)
def test_page_loads_without_a_fault(page: "playwright.Page", address: str, name: str) -> None:
    open_players(page, f"{address}/{name}.html", players(name))
    page.wait_for_load_state("networkidle")
    assert page.locator("article h1").first.is_visible()


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_narrow_screen(page: "playwright.Page", address: str, name: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    open_players(page, f"{address}/{name}.html", players(name))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("name", WITH_PLAYERS)
def test_players_step_forth_and_back(page: "playwright.Page", address: str, name: str) -> None:
    for player in open_players(page, f"{address}/{name}.html", players(name)):
        first = settle(player)
        player.locator('button[data-action="next"]').click()
        wait_for(page, player, "!=", first)
        there = settle(player)
        assert there != first
        player.locator('button[data-action="previous"]').click()
        # In rounds the very same picture comes back; one in seconds begins with messages in flight, and moves away from here.
        in_seconds = "·" in player.locator(".d2lps-counter").inner_text()
        wait_for(page, player, "!=" if in_seconds else "==", there if in_seconds else first)


@pytest.mark.parametrize("name", WITH_PLAYERS)
def test_players_play_by_themselves(page: "playwright.Page", address: str, name: str) -> None:
    for player in open_players(page, f"{address}/{name}.html", players(name)):
        first = drawing(player)
        player.locator('button[data-action="play"]').click()
        wait_for(page, player, "!=", first)
        wait_for(page, player, "!=", drawing(player))


@pytest.mark.parametrize("name", WITH_PLAYERS)
def test_players_follow_the_keyboard(page: "playwright.Page", address: str, name: str) -> None:
    for player in open_players(page, f"{address}/{name}.html", players(name)):
        first = drawing(player)
        player.focus()
        page.keyboard.press("ArrowRight")
        wait_for(page, player, "!=", first)


@pytest.mark.parametrize("name", WITH_PLAYERS)
def test_without_javascript_a_picture_stands_in(browser: "playwright.Browser", address: str, name: str) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{address}/{name}.html")
        pictures = page.locator("noscript img").all()
        assert len(pictures) >= players(name)
        for picture in pictures:
            assert picture.is_visible()
            assert picture.get_attribute("alt")
            assert picture.evaluate("image => image.complete && image.naturalWidth") > 0


@pytest.mark.skipif(not WITH_PLAYERS, reason="no page has a player yet")
def test_site_works_from_a_folder(page: "playwright.Page", site: Path) -> None:
    url = (site / f"{WITH_PLAYERS[0]}.html").resolve().as_uri()
    player = open_players(page, url, players(WITH_PLAYERS[0]))[0]
    first = drawing(player)
    player.locator('button[data-action="next"]').click()
    wait_for(page, player, "!=", first)
