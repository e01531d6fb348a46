"""The stored notebooks are in order. (That their outputs are what the code gives now is nbval's part: make test-notebooks.)"""

import re
from pathlib import Path

import nbformat
import pytest
from compared import CODE
from execute import notebooks
from nbformat import NotebookNode
from normalize import models, normalize

from d2lps.widgets.still import source

WIDGETS = Path(__file__).parents[1] / "d2lps" / "widgets"
LONGEST = 25  # lines of a cell


@pytest.fixture(params=notebooks(), ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def run_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that a run executes."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    return [cell for cell in code if "skip-execution" not in cell.metadata.get("tags", [])]


def test_stored_from_one_run_in_order(notebook: NotebookNode) -> None:
    counts = [cell.execution_count for cell in run_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "store a clean run: make execute"


def test_only_announced_errors(notebook: NotebookNode) -> None:
    failed = {cell.source for cell in run_cells(notebook) for output in cell.outputs if output.output_type == "error"}
    announced = {cell.source for cell in run_cells(notebook) if "raises-exception" in cell.metadata.get("tags", [])}
    assert failed == announced


def test_stored_in_normal_form(path: Path, notebook: NotebookNode) -> None:
    normal = nbformat.writes(normalize(notebook, path.stem)) + "\n"
    assert path.read_text() == normal, "bring it into normal form: make execute"


FILES = [file.name for file in WIDGETS.iterdir() if file.suffix in (".js", ".css")]
# How a widget that holds others wraps their scripts (d2lps/widgets/within.py).
WRAPPED = re.compile(r"KINDS\.\w+ = \(\(\) => \{|return shown;|\}\)\(\);|\s")


def outdated(code: str) -> str:
    """What of a widget's code is in none of the files of now; it may be made of several, and of what it holds."""
    pieces = [piece for name in FILES for piece in (source(name), (WIDGETS / name).read_text("utf-8"))]
    pieces += [piece.replace("\nexport default ", "\nconst shown = ") for piece in pieces]
    for piece in sorted({piece.strip() for piece in pieces}, key=len, reverse=True):
        code = code.replace(piece, "")
    return WRAPPED.sub("", code)


def test_stored_widgets_have_the_code_of_now(notebook: NotebookNode) -> None:
    ours = [model.state for model in models(notebook).values() if model.state.get("_anywidget_id", "").startswith("d2lps.")]
    for state in ours:
        for key in CODE:
            assert not outdated(state.get(key) or ""), f"{state['_anywidget_id']} is out of date: make execute"


def test_code_of_before_is_seen() -> None:
    player = source("player.js")
    assert not outdated(player + (WIDGETS / "bet.js").read_text("utf-8"))
    assert outdated(player.replace("class Player", "class Before"))
    assert outdated(player + "\nmore();")


def test_cells_are_short(notebook: NotebookNode) -> None:
    long = [cell.source for cell in run_cells(notebook) if len(cell.source.splitlines()) > LONGEST]
    assert long == []
