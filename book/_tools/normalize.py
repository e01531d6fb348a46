"""The normal form of a stored notebook: a run that changes nothing gives the same file.

What differs from run to run is replaced: widget ids, cell ids, addresses, paths and process ids in text. What tells nothing
about the cell is dropped: times, Python's version, metadata of the editor. Every notebook gets the cell that installs the library
where it is missing, and has its solutions folded.

    python book/_tools/normalize.py book/.../ring.ipynb ...    bring notebooks into this form without running them
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import nbformat
from folding import fold
from installing import put_first
from links import by_path
from nbformat import NotebookNode

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
RULES = Path(__file__).parents[2] / "tests" / "nbval_sanitize.cfg"
CELL_METADATA = {"tags", "mystnb", "jupyter"}
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"},
}


def normalize(notebook: NotebookNode, name: str) -> NotebookNode:
    """A normalized copy; `name` makes the widget ids differ between notebooks."""
    notebook = rename_widgets(notebook, name)
    kept = {key: notebook.metadata[key] for key in ("d2lps", "widgets") if notebook.metadata.get(key)}
    notebook.metadata = nbformat.from_dict(KERNEL | kept)  # d2lps: what the chapter's card says of it
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    put_first(notebook)
    by_path(notebook)
    fold(notebook)
    name_cells(notebook)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key in CELL_METADATA})
        for output in cell.get("outputs", []):
            scrub_output(output)
    return notebook


def models(notebook: NotebookNode) -> dict[str, NotebookNode]:
    """The state of every widget that the notebook stores, by id, in the order in which they were made."""
    return notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})


def rename_widgets(notebook: NotebookNode, name: str) -> NotebookNode:
    """Give the widgets ids that depend on the notebook's name and their order alone.

    The ids sort in that order, for a stored file has its keys sorted: naming them again changes nothing.
    """
    prefix = hashlib.sha256(name.encode()).hexdigest()[:28]
    names = {old: f"{prefix}{index:04x}" for index, old in enumerate(models(notebook))}
    text = json.dumps(notebook)
    text = re.sub(r"[0-9a-f]{32}", lambda match: names.get(match[0], match[0]), text)
    return nbformat.from_dict(json.loads(text))


def name_cells(notebook: NotebookNode) -> None:
    """Name each cell after its content, so that a new cell does not rename those that follow it."""
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type} {cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def scrub(text: str) -> str:
    """Replace what differs between two runs, by the rules that nbval also compares by.

    >>> scrub("<Player at 0x7f3a12bc>")
    '<Player at 0x0>'
    """
    for pattern, replacement in re.findall(r"^regex: (.*)$\n^replace: (.*)$", RULES.read_text(), flags=re.MULTILINE):
        text = re.sub(pattern, replacement, text)
    return text


def scrub_output(output: NotebookNode) -> None:
    """Scrub the text of one output in place."""
    if output.output_type == "stream":
        output.text = scrub(output.text)
    elif output.output_type == "error":
        output.evalue = scrub(output.evalue)
        output.traceback = [scrub(line) for line in output.traceback]
    else:
        texts = {kind: scrub(text) for kind, text in output.data.items() if kind.startswith("text/")}
        output.data.update(texts)


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        path.write_text(nbformat.writes(normalize(nbformat.read(path, as_version=4), path.stem)) + "\n")


if __name__ == "__main__":
    main()
