"""Run chapters where this Python is, with its versions, and say whose compared outputs are not those that are stored.

    python book/_tools/rerun.py [book/.../ring.ipynb ...]

Nothing is stored. Pictures are left out, as nbval leaves them out, and of widgets all but their class and text: fonts and the
versions of their protocol differ between installations, and so does what only timings decide.
"""

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from compared import IGNORE
from execute import ROOT, notebooks, run
from nbformat import NotebookNode
from normalize import VIEW, normalize

Text = tuple[str, str]  # the kind of an output, and what it says


def said(cell: NotebookNode) -> list[Text]:
    """What a cell's outputs say, as far as it is compared."""
    if IGNORE in cell.metadata.get("tags", []):
        return []
    return [words(output) for output in cell.get("outputs", [])]


def words(output: NotebookNode) -> Text:
    if output.output_type == "stream":
        return output.name, output.text
    if output.output_type == "error":
        return "error", f"{output.ename}: {output.evalue}"
    kinds = ", ".join(sorted(set(output.data) - {"image/png", "image/svg+xml"}))
    return kinds, "a widget" if VIEW in output.data and "Player" not in str(output.data) else output.data.get("text/plain", "")


def differing(old: NotebookNode, new: NotebookNode) -> list[Any]:
    """(the cell's first line, what it said, what it says now) of all that differ."""
    both = [(was.source.split("\n")[0], said(was), said(now)) for was, now in zip(old.cells, new.cells, strict=True)]
    return [each for each in both if each[1] != each[2]]


def rerun(path: Path) -> bool:
    """Run one chapter, print what differs, and say whether nothing does."""
    begin = time.monotonic()
    try:
        found = differing(normalize(nbformat.read(path, as_version=4), path.stem), run(path))
    except RuntimeError as error:
        found = [("it failed", "", str(error))]
    print(f"{time.monotonic() - begin:6.1f} s  {'differs' if found else 'alike':8} {path.relative_to(ROOT)}", flush=True)
    for line, was, now in found:
        print(f"    {line}\n      stored: {was}\n      now:    {now}", flush=True)
    return not found


def main() -> int:
    done = [rerun(path) for path in [Path(name).resolve() for name in sys.argv[1:]] or notebooks()]
    print(f"{sum(done)} of {len(done)} chapters give their compared outputs")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
