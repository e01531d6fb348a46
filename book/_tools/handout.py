"""Write the chapters as a course for nbgrader into _build/handout: `make handout`, for some NOTEBOOKS=...

Solutions are left out. A stub becomes an answer that is graded by itself; the check below it becomes a locked test with as many
points as its tag says ("points-3"; 1 without one) and gives the verdict's share of them. An exercise without a stub gets a cell
for words, graded by hand. `nbgrader generate_assignment CHAPTER` in that folder makes the students' version.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

import nbformat
from execute import ROOT, notebooks
from folding import kind
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from normalize import name_cells
from plain import FENCED, labels_of, options, plain

COURSE = ROOT / "_build" / "handout"
CONFIG = """c = get_config()
c.CourseDirectory.course_id = "d2lps"
c.ClearSolutions.enabled = False  # the answers hold no solution: `make handout` has left them out
c.ExecutePreprocessor.timeout = 600  # seconds for a cell
"""


def marked(cell: NotebookNode, name: str, points: int = 0, solution: bool = False) -> NotebookNode:
    """The cell with nbgrader's metadata: an answer if `solution`, graded if it has points, locked if it is no answer."""
    facts = {"grade": points > 0, "solution": solution, "locked": not solution, "grade_id": name}
    facts |= {"task": False, "schema_version": 3}
    cell.metadata = nbformat.from_dict({"nbgrader": facts | ({"points": points} if points else {})})
    return cell


def points_of(cell: NotebookNode) -> int:
    found = [int(tag.removeprefix("points-")) for tag in cell.metadata.get("tags", []) if tag.startswith("points-")]
    return found[0] if found else 1


def graded(source: str, points: int) -> str:
    """A check's code, whose last expression is a verdict, so that the cell shows it and ends in its points.

    >>> print(graded("from d2lps_book import check\\ncheck.all_reduce(mine)", 2))
    from d2lps_book import check
    verdict = check.all_reduce(mine)
    print(verdict)
    2 * verdict.score
    """
    last = ast.parse(source).body[-1]
    if not isinstance(last, ast.Expr):
        raise ValueError(f"a check must end in an expression that gives a verdict, not in {ast.unparse(last)!r}")
    before = source.splitlines()[: last.lineno - 1]
    return "\n".join([*before, f"verdict = {ast.unparse(last)}", "print(verdict)", f"{points} * verdict.score"])


def label(source: str) -> str:
    """The label of the last exercise in a cell, or ""."""
    found = [options(match["body"])[0].get("label", "") for match in FENCED.finditer(source) if match["name"] == "exercise"]
    return found[-1] if found else ""


def without_solutions(cells: list[NotebookNode]) -> list[NotebookNode]:
    kept, inside = [], False
    for cell in cells:
        inside = inside or kind(cell) == "start"
        if not inside and kind(cell) != "whole":
            kept.append(cell)
        inside = inside and kind(cell) != "end"
    return kept


def handout(notebook: NotebookNode) -> NotebookNode:
    """The notebook as an assignment."""
    labels, done, exercise = labels_of(notebook), [], ""
    cells = without_solutions(notebook.cells)
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        tags = cell.metadata.get("tags", [])
        exercise = label(cell.source) or exercise if cell.cell_type == "markdown" else exercise
        if "stub" in tags:
            done.append(marked(cell, f"{exercise}-{len(done)}", solution=True))
        elif "check" in tags:
            points = points_of(cell)
            cell.source = graded(cell.source, points)
            done.append(marked(cell, f"{exercise}-{len(done)}", points))
        else:
            asked = cell.cell_type == "markdown" and label(cell.source)
            done.append(cell)
            if cell.cell_type == "markdown":
                cell.source = plain(cell.source, labels)
            if asked and (following is None or "stub" not in following.metadata.get("tags", [])):
                done.append(marked(new_markdown_cell("*Your answer*"), f"{exercise}-words", 1, solution=True))
    notebook.cells = done
    for cell in done:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if "nbgrader" not in cell.metadata:
            cell.metadata = nbformat.from_dict({"tags": cell.metadata.get("tags", [])})
    notebook.metadata = nbformat.from_dict({"kernelspec": notebook.metadata.kernelspec})
    name_cells(notebook)
    return notebook


def write(path: Path, course: Path) -> Path:
    """Write one chapter's assignment into a course, and say where."""
    to = course / "source" / path.stem / path.name
    to.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(handout(nbformat.read(path, as_version=4)), to)
    (course / "nbgrader_config.py").write_text(CONFIG)
    return to


def main() -> None:
    shutil.rmtree(COURSE, ignore_errors=True)
    for path in [Path(name) for name in sys.argv[1:]] or notebooks():
        text = write(path, COURSE).read_text()
        graded_cells = len(re.findall(r'"grade": true', text))
        print(f"{graded_cells:3} graded cells  {path}")


if __name__ == "__main__":
    main()
