"""What of a notebook is compared between two runs: its sources, and the outputs that do not depend on time."""

import re
from typing import Any

from nbformat import NotebookNode
from normalize import VIEW, models

IGNORE = "nbval-ignore-output"
CODE = ("_esm", "_css")


def reachable(notebook: NotebookNode, start: str) -> list[str]:
    """The ids of a widget and of all that it refers to ("IPY_MODEL_<id>"), in the order of their discovery."""
    found = [start]
    for name in found:
        state = str(models(notebook).get(name, {}))
        found += [other for other in dict.fromkeys(re.findall(r"IPY_MODEL_(\w+)", state)) if other not in found]
    return found


def views(cell: NotebookNode) -> list[str]:
    """The ids of the widgets that a cell shows."""
    bundles = [output.get("data", {}) for output in cell.get("outputs", [])]
    return [bundle[VIEW]["model_id"] for bundle in bundles if VIEW in bundle]


def ignored(cell: NotebookNode) -> bool:
    """Whether a cell's outputs are timings or pictures, which differ in every run."""
    return IGNORE in cell.metadata.get("tags", [])


def compared_outputs(cell: NotebookNode) -> list[Any]:
    """A cell's outputs, or, where they are ignored, only the kinds of them."""
    outputs = cell.get("outputs", [])
    if ignored(cell):
        return [(output.output_type, sorted(output.get("data", {}))) for output in outputs]
    return [dict(output) for output in outputs]


def compared_widgets(notebook: NotebookNode) -> dict[str, Any]:
    """The state of every widget, but only the code of those that an ignored cell shows."""
    shown = [name for cell in notebook.cells if ignored(cell) for name in views(cell)]
    loose = {name for start in shown for name in reachable(notebook, start)}
    kept: dict[str, Any] = {}
    for name, model in models(notebook).items():
        kept[name] = {key: model.state.get(key) for key in CODE} if name in loose else dict(model)
    return kept


def compared(notebook: NotebookNode) -> Any:
    """Equal for two runs that do not differ."""
    cells = [(cell.cell_type, cell.source, cell.metadata, compared_outputs(cell)) for cell in notebook.cells]
    return cells, compared_widgets(notebook)
