"""The stored notebooks are in order. (That their outputs are what the code gives now is nbval's part: make test-notebooks.)"""

import base64
import io
from functools import cache
from pathlib import Path

import nbformat
import numpy as np
import PIL.Image
import pytest
from compared import CODE
from execute import notebooks
from nbformat import NotebookNode
from normalize import VIEW, models, normalize
from photographs import digest, kinds, shown, subject
from renew import code_for, ours, pictures

LONGEST = 25  # lines of a cell


@pytest.fixture(params=notebooks(), ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


@cache
def lanes(path: Path) -> list[tuple[NotebookNode, bytes]]:
    """Outputs, and how they are drawn now: which takes a while."""
    return pictures(nbformat.read(path, as_version=4))


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


def test_stored_widgets_have_the_code_of_now(notebook: NotebookNode) -> None:
    for state in ours(notebook):
        now = code_for(state)
        assert all(state.get(key) == now[key] for key in CODE), f"{state['_anywidget_id']} is out of date: book/_tools/renew.py"


def test_stored_lanes_have_the_picture_of_now(path: Path) -> None:
    for output, picture in lanes(path):
        stored, now = (np.asarray(PIL.Image.open(io.BytesIO(data)).convert("L"), float)
                       for data in (base64.b64decode(output.data["image/png"]), picture))  # fmt: skip
        alike = stored.shape == now.shape and np.abs(stored - now).mean() < 1  # another FreeType draws letters a little otherwise
        assert alike, f"the picture of {output.data['text/plain'][:60]!r} is out of date: book/_tools/renew.py"


def test_pictures_of_lanes_are_compared_wherever_they_are_held() -> None:
    """Alone, behind a bet, and chosen first of several."""
    found = [output.data["text/plain"] for path in notebooks() for output, _ in lanes(path)]
    assert {told.split(":")[0] for told in found} == {"Lanes", "Bet", "Choices"}


def test_photographs_are_of_the_widgets_of_now(notebook: NotebookNode) -> None:
    for output in shown(notebook):
        state = models(notebook)[output.data[VIEW]["model_id"]].state
        drawn = kinds(state) <= {"bet", "choices", "lanes", "player"}  # by Python as well
        of = subject(output.data["image/png"])
        assert of == digest(state) or (drawn and not of), "out of date: book/_tools/renew.py"


def test_cells_are_short(notebook: NotebookNode) -> None:
    long = [cell.source for cell in run_cells(notebook) if len(cell.source.splitlines()) > LONGEST]
    assert long == []
