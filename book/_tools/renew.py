"""Give stored widgets the code of now, and stored lanes and photographs the picture of now, without running a cell.

    python book/_tools/renew.py book/.../ring.ipynb ...    after a change of a widget's script, its style, or lanes' picture

What a widget shows stays as it is stored: what was measured is not measured again.
"""

import base64
import json
import re
import sys
import zlib
from copy import deepcopy
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import nbformat
from compared import CODE
from nbformat import NotebookNode
from normalize import VIEW, models
from photographs import photograph, shown, subject

import d2lps
from d2lps import widgets
from d2lps.widgets.lanes import draw
from d2lps.widgets.still import as_png
from d2lps.widgets.within import Holder, below, code, png

KINDS = {cls.__module__.rpartition(".")[2]: cls for cls in vars(widgets).values() if isinstance(cls, type)}

Held = dict[str, Any]  # by kind: what a widget's script holds of others', and what theirs hold


def ours(notebook: NotebookNode) -> list[NotebookNode]:
    """The states of this library's widgets."""
    states = (model.state for model in models(notebook).values())
    return [state for state in states if state.get("_anywidget_id", "").startswith("d2lps.")]


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


def code_for(state: NotebookNode) -> dict[str, str]:
    """The script and the style of now of a stored widget."""
    now = code_of_now(_kind(state), held_by(state["_esm"]))
    return {key: str(getattr(now, key)) for key in CODE}


def pictures(notebook: NotebookNode) -> list[tuple[NotebookNode, bytes]]:
    """The outputs whose picture is one of lanes and texts alone, each with what is drawn today from the state that is stored."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    stored = [output for output in outputs if {VIEW, "image/png"} <= output.get("data", {}).keys()]
    states = (models(notebook)[output.data[VIEW]["model_id"]].state for output in stored)
    with matplotlib.rc_context():
        d2lps.style()  # as every chapter does
        drawn = [_picture(state, output.data["text/plain"]) for state, output in zip(states, stored, strict=True)]
    return [(output, picture) for output, picture in zip(stored, drawn, strict=True) if picture is not None]


def _kind(state: dict[str, Any]) -> str:
    return str(state["_anywidget_id"]).split(".")[-2]


def _picture(state: dict[str, Any], told: str) -> bytes | None:
    """As `Still._still` draws it; None for what is not drawn from what is stored."""
    kind = _kind(state)
    if kind == "lanes":
        return _drawn({"kind": kind, "state": state})
    if kind not in ("bet", "choices"):
        return None
    things = json.loads(zlib.decompress(base64.b64decode(state["data"]["things"])))
    if kind == "choices":
        things = [things[_first(state)]]
    if not {"lanes"} <= {thing["kind"] for thing in things} <= {"lanes", "text"}:
        return None
    return below(png(told.removeprefix("Bet: ")), *map(_drawn, things)) if kind == "bet" else _drawn(things[0])


def _first(state: dict[str, Any]) -> int:
    """Which of the things in choices was chosen when they were stored."""
    counts = [len(option["values"]) for option in state["data"]["options"]]
    combination = sum(chosen * prod(counts[k + 1 :]) for k, chosen in enumerate(state["chosen"]))
    return int(state["data"]["which"].split()[combination])


def _drawn(thing: dict[str, Any]) -> bytes:
    return png(thing["text"]) if thing["kind"] == "text" else as_png(draw(thing["state"]["data"]))


def renew(notebook: NotebookNode) -> None:
    """All of it, in place."""
    before = deepcopy(notebook)
    for state in ours(notebook):
        state.update(code_for(state))
    for output in shown(notebook):
        if subject(output.data["image/png"]):
            del output.data["image/png"]
    photograph(notebook, before)
    for output, picture in pictures(notebook):
        output.data["image/png"] = base64.b64encode(picture).decode()


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        notebook = nbformat.read(path, as_version=4)
        renew(notebook)
        path.write_text(nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    main()
