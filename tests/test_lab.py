"""The book in JupyterLab, in a real browser: nothing raw is seen, solutions are folded, a check says what is missing."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from execute import listed, notebooks
from folding import BEGINS
from lab import OVERRIDES, PAGE, contents
from launching import until
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from normalize import normalize
from widget_page import needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow]

BOOK = PAGE.parent
ALL_CELLS = {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}  # by default only those in sight are drawn
RAW = re.compile(r"\{(?:exercise|solution|doc|cite|numref|ref|eq|prf|math|note|figure).*|^:(?:label|class):", re.MULTILINE)
TEXTS = """[...document.querySelectorAll(".jp-MarkdownCell")].map(cell => {
    const shown = cell.cloneNode(true);
    shown.querySelectorAll(".jp-InputArea-editor, .jp-Toolbar").forEach(part => part.remove());
    return shown.textContent.trim();
})"""
DRAWN = f"""count => document.querySelectorAll(".jp-MarkdownCell").length === count && {TEXTS}.every(Boolean)
    && document.querySelectorAll(".jp-MarkdownCell:not(.jp-mod-rendered)").length === 0"""
# "Open With, Notebook (no kernel)", in the place of what is open: a kernel for each chapter would be started for nothing.
OPEN = """path => {
    [...jupyterapp.shell.widgets("main")].forEach(widget => widget.dispose());
    return jupyterapp.commands.execute("docmanager:open", { path, kernelPreference: { shouldStart: false, shouldReuse: false } })
        .then(() => null);
}"""
EXERCISE = [
    new_markdown_cell("# A chapter"),
    new_markdown_cell("````{exercise} Twice\n:label: ex-twice\n\nWrite `double(x)`, as in {doc}`/book/back/notation`.\n````"),
    new_code_cell("def double(x):\n    ...", metadata={"tags": ["stub"]}),
    new_code_cell(
        "from d2lps_book.check.exercise import judged\n\n@judged\n"
        "def twice(function):\n    return f'{function(3)}'\n\ntwice(double)",
        metadata={"tags": ["check"]},
    ),
    new_markdown_cell("````{solution-start} ex-twice\n:class: dropdown\n````"),
    new_markdown_cell("The secret is addition."),
    new_code_cell("def double(x):\n    return x + x\n\ntwice(double)"),
    new_markdown_cell("````{solution-end}\n````"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the book, with a chapter of one exercise."""
    folder = tmp_path_factory.mktemp("lab") / "book"
    shutil.copytree(BOOK, folder, ignore=shutil.ignore_patterns("_*", ".*"))
    notebook = normalize(new_notebook(cells=EXERCISE), "exercise")
    (folder / "exercise.ipynb").write_text(nbformat.writes(notebook))
    (folder / PAGE.name).write_text(contents())
    return folder


def settings(folder: Path) -> Path:
    """The settings of `make lab` as a reader's own, with all cells drawn."""
    for plugin, values in {**OVERRIDES, **ALL_CELLS}.items():
        package, name = plugin.split(":")
        path = folder / package / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    return folder


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=5).status == 200
    return False


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """A JupyterLab on that folder, with nothing of this machine's own settings."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = folder.parent / "home"
    own = {"HOME": str(home), "JUPYTER_CONFIG_DIR": str(home), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port_retries=0", f"--port={port}"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--ServerApp.password="]
    command += ["--LabApp.expose_app_in_browser=True"]
    environment = os.environ | own | {"JUPYTERLAB_SETTINGS_DIR": str(settings(home / "settings"))}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: answers(f"http://127.0.0.1:{port}/api"), seconds=60), "JupyterLab did not start"
        yield f"http://127.0.0.1:{port}/lab/tree"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:  # it waits for the kernels of all chapters that were opened; they end with it
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    yield page
    page.close()


@pytest.fixture(scope="module")
def lab(page: Any, address: str) -> Any:
    """JupyterLab with nothing open, in which one notebook after the other is opened."""
    page.goto(f"{address}?reset")
    page.wait_for_function("window.jupyterapp")
    page.evaluate("jupyterapp.restored")
    return page


def drawn(page: Any, path: Path) -> None:
    """Wait until all cells of the notebook are drawn."""
    texts = sum(cell.cell_type == "markdown" for cell in nbformat.read(path, as_version=4).cells)
    page.wait_for_function(DRAWN, arg=texts, timeout=60_000)


def test_a_check_says_what_is_missing_and_the_solution_is_folded(page: Any, address: str, folder: Path) -> None:
    page.goto(f"{address}/exercise.ipynb?reset")
    drawn(page, folder / "exercise.ipynb")
    shown = page.locator(".jp-Notebook")
    assert "Twice" in page.locator(".jp-MarkdownCell").nth(1).inner_text()
    for hidden in ("The secret is addition.", "return x + x"):
        assert shown.get_by_text(hidden).locator("visible=true").count() == 0
    # What is run before there is a kernel is not run at all, and a busy machine takes its time to start one.
    page.locator("#jp-main-statusbar").get_by_text(re.compile(r"Python 3.* \| Idle")).wait_for(timeout=180_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    answer = shown.get_by_text("not yet: double is still empty").locator("visible=true")
    assert until(lambda: page.wait_for_timeout(200) or answer.count(), 180), page.inner_text("body")  # and what is there instead
    for hidden in ("The secret is addition.", "return x + x"):  # to run all opens nothing
        assert shown.get_by_text(hidden).locator("visible=true").count() == 0
    shown.get_by_text("Start of Solution to").click()
    shown.get_by_text("The secret is addition.").locator("visible=true").first.wait_for()


@pytest.mark.parametrize("chapter", notebooks(), ids=lambda path: path.stem)
def test_a_chapter_shows_nothing_raw_and_no_solution(lab: Any, folder: Path, chapter: Path) -> None:
    path, page = folder / chapter.relative_to(BOOK), lab
    page.evaluate(OPEN, str(path.relative_to(folder)))
    drawn(page, path)
    until(lambda: not RAW.search("\n".join(page.evaluate(TEXTS))))  # what MyST draws takes the place of what stood there
    shown = "\n".join(page.evaluate(TEXTS))
    assert len(shown) > 5000 and RAW.findall(shown) == []
    solutions = [cell for cell in nbformat.read(path, as_version=4).cells if cell.source.startswith(BEGINS)]
    dropdowns = sum(":class: dropdown" in cell.source for cell in solutions)
    assert page.locator("details", has_text="Solution to").count() == dropdowns and page.locator("details[open]").count() == 0
    assert page.locator(".jp-MarkdownCell .jp-InputPlaceholder", has_text=BEGINS).count() == len(solutions) - dropdowns


def test_the_first_page_lists_the_chapters_in_order(page: Any, address: str) -> None:
    page.goto(f"{address}/{PAGE.name}?reset")
    page.locator(".jp-MarkdownViewer li a").first.wait_for()
    links = page.locator(".jp-MarkdownViewer li a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    chapters = [Path(name).name for name in listed()[1:]]
    assert len(links) == len(chapters) and all(name in link for name, link in zip(chapters, links, strict=True))
