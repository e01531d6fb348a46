"""The stored notebooks are in order. (That their outputs are what the code gives now is nbval's part: make test-notebooks.)"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from compared import CODE
from execute import notebooks
from nbformat import NotebookNode
from normalize import models, normalize

from d2lps import widgets
from d2lps.widgets.within import Holder, code

KINDS = {cls.__module__.rpartition(".")[2]: cls for cls in vars(widgets).values() if isinstance(cls, type)}
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


Held = dict[str, Any]  # by kind: what a widget's script holds of others', and what theirs hold


def held_by(script: str) -> Held:
    """{"choices": {"player": {}}} of a bet on choices of players (see d2lps/widgets/within.py)."""
    levels: list[Held] = [{}]
    for begin in re.findall(r"^(?:KINDS\.(\w+) = \(\(\) => \{|return shown;\n\}\)\(\);)$", script, re.MULTILINE):
        if begin:
            levels.append(levels[-1].setdefault(begin, {}))
        else:
            levels.pop()
    return levels[0]


def code_of_now(own: str, held: Held) -> Any:
    """A kind of widget, its script and its style as they are today; what holds others has theirs in its own."""
    if not issubclass(KINDS[own], Holder):
        return KINDS[own]
    return SimpleNamespace(**code(own, {kind: code_of_now(kind, inner) for kind, inner in held.items()}))


def test_stored_widgets_have_the_code_of_now(notebook: NotebookNode) -> None:
    ours = [model.state for model in models(notebook).values() if model.state.get("_anywidget_id", "").startswith("d2lps.")]
    for state in ours:
        now = code_of_now(state["_anywidget_id"].split(".")[-2], held_by(state["_esm"]))
        assert all(state.get(key) == getattr(now, key) for key in CODE), f"{state['_anywidget_id']} is out of date: make execute"


def test_cells_are_short(notebook: NotebookNode) -> None:
    long = [cell.source for cell in run_cells(notebook) if len(cell.source.splitlines()) > LONGEST]
    assert long == []
