"""Photographs of stored widgets: of which there are some, what is in them, and what happens where there is no browser."""

import base64
import io
from copy import deepcopy
from typing import Any

import numpy as np
import photographs
import pytest
from nbformat import NotebookNode, from_dict
from normalize import STATE, VIEW
from photographs import digest, photograph, subject
from PIL import Image
from widget_page import needs_chromium

from d2lps.parallel import gpipe
from d2lps.widgets import Bet, Timetable
from d2lps.widgets.still import Still


def stored(*widgets: Still) -> NotebookNode:
    """A notebook with a cell for each widget, as a kernel leaves it."""
    states, cells = {}, []
    for number, widget in enumerate(widgets):
        code = {name: getattr(widget, name) for name in ("_anywidget_id", "_esm", "_css")}
        states[f"w{number}"] = {"state": {**widget._state(), **code, "layout": f"IPY_MODEL_{number}"}}
        bundle, _ = widget._repr_mimebundle_()
        cells.append({"cell_type": "code", "outputs": [{"data": {**bundle, VIEW: {"model_id": f"w{number}"}}}]})
    return from_dict({"cells": cells, "metadata": {"widgets": {STATE: {"state": states}}}})


def pictures(notebook: NotebookNode) -> list[str]:
    return [cell.outputs[0].data.get("image/png", "") for cell in notebook.cells]


def no_browser() -> Any:
    raise AssertionError("a browser was wanted")


def pixels(picture: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"), dtype=int)


@needs_chromium
def test_what_python_does_not_draw_is_photographed_as_on_paper_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    table, text = Timetable(gpipe(2, 3)), Bet("How long?", unit="s", prediction=2)
    notebook = stored(table, Bet("Who waits?", choices=["all", "one"], measurement="all", then=table), text)
    photograph(notebook, stored())
    alone, behind_a_bet, drawn = pictures(notebook)
    assert [subject(picture) for picture in pictures(notebook)] == [
        *(digest(model.state) for model in list(notebook.metadata.widgets[STATE].state.values())[:2]), ""]  # fmt: skip
    assert drawn == pictures(stored(text))[0]  # as Python has drawn it
    high, wide, _ = pixels(alone).shape
    assert wide == 1440 and len(alone) < 60_000  # two pixels for each of 720
    assert pixels(behind_a_bet).shape[0] > high + 100  # the bet with its answers above what it hides
    blue = np.abs(pixels(alone) - [0, 0x72, 0xB2]).sum(axis=2) < 30
    assert 0.02 < blue.mean() < 0.5  # the blocks of forward passes

    monkeypatch.setattr(photographs, "chromium", no_browser)
    again = stored(table, Bet("Who waits?", choices=["all", "one"], measurement="all", then=table), text)
    photograph(again, notebook)
    assert pictures(again) == pictures(notebook)
    other = stored(Timetable(gpipe(2, 4)))
    with pytest.raises(AssertionError, match="a browser was wanted"):
        photograph(other, notebook)


def test_without_a_browser_nothing_is_stored_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "CHROMIUM", None)
    notebook = stored(Timetable(gpipe(2, 3)))
    before = deepcopy(notebook)
    with pytest.raises(RuntimeError, match="no Chromium is installed: this notebook can't be stored"):
        photograph(notebook, before)
    assert notebook == before
    photograph(players := stored(Bet("How long?", unit="s", prediction=2)), before)  # of which Python draws all
    assert pictures(players)[0]
