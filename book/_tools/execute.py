"""Run the book's notebooks anew and store their outputs.

    python book/_tools/execute.py                       every notebook of _toc.yml
    python book/_tools/execute.py book/.../ring.ipynb   this one
    python book/_tools/execute.py --fresh               store the new outputs even where none that is compared has changed

A notebook whose compared outputs are what they were is left as it is. A cell that fails ends the run with status 1, and so does a
widget that must be photographed (photographs.py) where there is no Chromium.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import yaml
from compared import compared
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal
from nbformat import NotebookNode
from normalize import normalize
from photographs import photograph

ROOT = Path(__file__).parents[2]


def listed(folder: Path = ROOT) -> list[str]:
    """The pages of _toc.yml in the reader's order, as "book/part/page"."""
    toc = yaml.safe_load((folder / "_toc.yml").read_text())
    chapters = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [toc["root"], *chapters]


def notebooks() -> list[Path]:
    """Those pages that are notebooks."""
    paths = [ROOT / f"{page}.ipynb" for page in listed()]
    return [path for path in paths if path.exists()]


def run(path: Path) -> NotebookNode:
    """A copy of the notebook at this path, run, in normal form."""
    return normalize(execute_in_place(nbformat.read(path, as_version=4), path), path.stem)


def execute_in_place(notebook: NotebookNode, path: Path, timeout: int = 600, **start: Any) -> NotebookNode:
    """Run a notebook from its first cell in a new kernel, as if it lay at this path; what is raised names the failing cell.

    start: how the kernel's process is started, as in subprocess.Popen.
    """
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", coalesce_streams=True,
                            extra_arguments=["--log-level=40"],  # errors of the kernel, no remarks
                            resources={"metadata": {"path": str(path.parent)}})
    current = 0

    def note(cell: NotebookNode, cell_index: int) -> None:
        nonlocal current
        current = cell_index

    client.on_cell_start = note
    try:
        client.execute(**start)
    except CellControlSignal as error:
        raise RuntimeError(f"{path}: cell {current + 1} of {len(notebook.cells)} failed\n{error}") from error
    return notebook


def store(path: Path, new: NotebookNode, fresh: bool) -> bool:
    """Write the notebook unless nothing that is compared has changed; say whether it was written."""
    text = path.read_text()
    old = nbformat.reads(text, as_version=4)
    normal = nbformat.writes(normalize(old, path.stem)) == text.rstrip("\n")
    if normal and not fresh and compared(old) == compared(new):
        return False
    path.write_text(nbformat.writes(new) + "\n")
    return True


def execute(path: Path, fresh: bool) -> bool:
    """Run and store one notebook, print a line about it, and say whether it ran to its end."""
    begin = time.monotonic()
    try:
        new = run(path)
        photograph(new, nbformat.read(path, as_version=4))
        what = "stored" if store(path, new, fresh) else "unchanged"
    except RuntimeError as error:
        print(error, file=sys.stderr)
        what = "FAILED"
    print(f"{time.monotonic() - begin:6.1f} s  {what:9}  {path}", flush=True)
    return what != "FAILED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks to run; by default every one of the book")
    parser.add_argument("--fresh", action="store_true", help="store the new outputs in any case")
    arguments = parser.parse_args()
    done = [execute(path, arguments.fresh) for path in arguments.notebooks or notebooks()]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
