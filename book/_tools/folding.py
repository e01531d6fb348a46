"""In JupyterLab, solutions and code that is beside the point are folded: a click on the line that is left opens them.

A solution's text can fold only if it has cells of its own. So cells are cut where a solution begins and ends, and begin with a
comment, which a page does not show and JupyterLab leaves standing as the line to click on. Where the solution is a dropdown,
jupyterlab-myst folds the text itself, and keeps it folded when all cells are run, which unfolds what is folded by us.
"""

import re
from collections.abc import Iterator

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

BLOCK = re.compile(r"^(?P<fence>`{3,}|:{3,})\{solution(?P<kind>|-start|-end)\}.*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
BEGINS, ENDS = "% Solution", "% The solution ends"
FOLDED = {"hide-input": ("source",), "remove-input": ("source",), "remove-cell": ("source",), "hide-output": ("outputs",),
          "hide-cell": ("source", "outputs")}


def kind(cell: NotebookNode) -> str:
    """What of a solution a cell is, once it is cut: "start", "end", "whole", or "" for all else."""
    match = BLOCK.search(cell.source) if cell.cell_type == "markdown" else None
    return "" if match is None else match["kind"].lstrip("-") or "whole"


def cut(source: str) -> Iterator[str]:
    r"""The cells that a cell of text becomes.

    >>> list(cut("Try it.\n\n```{solution-start} ex\n```\n\nSo.\n\n```{solution-end}\n```\n\nNext."))
    ['Try it.', '% Solution\n\n```{solution-start} ex\n```\n\nSo.', '% The solution ends\n\n```{solution-end}\n```', 'Next.']
    """
    source = re.sub(rf"^({BEGINS}|{ENDS})\n", "", source, flags=re.MULTILINE)
    begin, prefix = 0, ""
    for match in BLOCK.finditer(source):
        yield prefix + source[begin:match.start()].strip("\n")
        begin, prefix = match.start(), f"{ENDS if match['kind'] == '-end' else BEGINS}\n\n"
        if match["kind"] != "-start":  # whose text goes on in the same cell
            yield prefix + match[0]
            begin, prefix = match.end(), ""
    yield prefix + source[begin:].strip("\n")


def pieces(cell: NotebookNode) -> list[NotebookNode]:
    """The cells that a cell becomes."""
    if not kind(cell):
        return [cell]
    return [new_markdown_cell(source, metadata=dict(cell.metadata)) for source in cut(cell.source) if source]


def cut_cells(cells: list[NotebookNode]) -> list[NotebookNode]:
    """All cells, with those of text cut; text that follows where a solution starts joins it."""
    done: list[NotebookNode] = []
    for cell in (piece for whole in cells for piece in pieces(whole)):
        if done and kind(done[-1]) == "start" and cell.cell_type == "markdown" and not kind(cell):
            done[-1].source += f"\n\n{cell.source}"
        else:
            done.append(cell)
    return done


def hides(cell: NotebookNode, solution: bool) -> set[str]:
    """Which parts of a cell are folded: all of a solution but a dropdown, elsewhere what its tags hide on the site."""
    if kind(cell) in ("start", "whole") and ":class: dropdown" in cell.source:
        return set()
    parts = {"source", "outputs"} if solution else {part for tag in cell.metadata.get("tags", []) for part in FOLDED.get(tag, ())}
    return parts & ({"source", "outputs"} if cell.cell_type == "code" else {"source"})


def fold(notebook: NotebookNode) -> None:
    """Cut the cells, and say of each what of it JupyterLab hides."""
    notebook.cells, inside = cut_cells(notebook.cells), False
    for cell in notebook.cells:
        inside = inside or kind(cell) == "start"
        if inside and cell.cell_type == "markdown" and not cell.source.startswith("%"):
            cell.source = f"{BEGINS}\n\n{cell.source}"  # what follows the solution's code
        cell.metadata.pop("jupyter", None)
        if hidden := hides(cell, inside or kind(cell) == "whole"):
            cell.metadata["jupyter"] = {f"{part}_hidden": True for part in sorted(hidden)}
        inside = inside and kind(cell) != "end"
