"""Write copies of the chapters for Colab into _build/colab: `make colab`.

They are plain Markdown, know where the library is to be had (from the remote `origin`, without a token), show solutions at a
click, and keep the stored texts and pictures; a player shows its picture until its cell is run. Put into a branch `colab` of
the copy, as the workflow in .github does, they link to each other.
"""

import shutil
import sys

import nbformat
from execute import ROOT, notebooks
from folding import kind
from installing import FIRST_LINE, filled_in
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from normalize import VIEW, name_cells
from plain import labels_of, plain
from repository_links import origin, web_address

COLAB = ROOT / "_build" / "colab"


def without_widget(output: NotebookNode) -> NotebookNode:
    """An output as Colab can show it before any cell is run: a widget's picture in place of the widget."""
    if VIEW in output.get("data", {}):
        del output.data[VIEW]
    return output


def code_for_colab(cell: NotebookNode, solution: bool, address: str) -> None:
    """Fold a solution behind its title, as Colab does; fill in where the library is to be had."""
    cell.outputs = [without_widget(output) for output in cell.outputs]
    if cell.source.startswith(FIRST_LINE):
        cell.source, solution = filled_in(address), False
    if solution or "jupyter" in cell.metadata:
        first = "Solution" if solution else "Install the library" if cell.source.startswith(FIRST_LINE) else "Show the code"
        cell.source = f"#@title {first}\n{cell.source}"
        cell.metadata["cellView"] = "form"


def for_colab(notebook: NotebookNode, address: str) -> NotebookNode:
    """The notebook as Colab shows it well."""
    labels, inside, cells = labels_of(notebook), False, []
    for cell in notebook.cells:
        inside = inside or kind(cell) == "start"
        if cell.cell_type == "code":
            code_for_colab(cell, inside, address)
        inside = inside and kind(cell) != "end"
        if cell.cell_type == "markdown":
            cell.source = plain(cell.source, labels)
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        cells += [cell] * bool(cell.source)
        if "caption" in figure:
            words = f"*{labels.get(figure.get('name', ''), 'Figure')}. {plain(figure['caption'], labels)}*"
            cells.append(new_markdown_cell(words))
    for cell in cells:
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key in ("cellView", "tags")})
    notebook.cells, notebook.metadata = cells, nbformat.from_dict({"kernelspec": notebook.metadata.kernelspec})
    name_cells(notebook)
    return notebook


def linked(source: str, address: str) -> str:
    """Links to other chapters, which in Colab must be whole."""
    if "github.com" not in address:
        return source
    repository = address.removeprefix("https://github.com/")
    return source.replace("](../", f"](https://colab.research.google.com/github/{repository}/blob/colab/")


def main() -> None:
    address = web_address(origin(str(ROOT)))
    shutil.rmtree(COLAB, ignore_errors=True)
    for path in notebooks():
        notebook = for_colab(nbformat.read(path, as_version=4), address)
        for cell in notebook.cells:
            cell.source = linked(cell.source, address) if cell.cell_type == "markdown" else cell.source
        copy = COLAB / path.relative_to(ROOT / "book")
        copy.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, copy)
    print(f"{COLAB}: {len(notebooks())} notebooks", file=sys.stderr)
    if not address:
        print("No remote `origin` says where your copy is: write it into each first cell, or add the remote and make them again.")



if __name__ == "__main__":
    main()
