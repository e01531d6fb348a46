"""A chapter as an assignment: nbgrader releases it, tells a right submission from a wrong one, and exports the grades."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from execute import notebooks
from handout import handout, write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from normalize import normalize

ALL_REDUCE = """def sum_everywhere(comm, tensor):
    parts = [tensor.clone() for _ in range(comm.size)]
    d2lps.collectives.all_gather(comm, parts, tensor.clone())
    tensor.copy_(sum(parts))
"""
CHAPTER = [
    new_markdown_cell("# A chapter"),
    new_code_cell("import d2lps, d2lps_book.check"),
    new_markdown_cell("````{exercise} Sum\n:label: ex-sum\n\nLeave the sum with every rank.\n````"),
    new_code_cell("def sum_everywhere(comm, tensor):\n    ...", metadata={"tags": ["stub"]}),
    new_code_cell("d2lps_book.check.all_reduce(sum_everywhere)", metadata={"tags": ["check", "points-3"]}),
    new_markdown_cell("````{solution-start} ex-sum\n````"),
    new_code_cell("# secret\n" + ALL_REDUCE),
    new_markdown_cell("````{solution-end}\n````"),
    new_markdown_cell("````{exercise} Why\n:label: ex-why\n\nWhy?\n````\n\n````{solution} ex-why\nA secret reason.\n````"),
]


def nbgrader(course: Path, *command: str) -> str:
    called = [sys.executable, "-m", "nbgrader", *command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where nbgrader looks for alembic
    done = subprocess.run(called, cwd=course, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def submit(course: Path, student: str, answer: str) -> None:
    """What a student hands in: the released notebook with an answer in place of the stub."""
    notebook = nbformat.read(course / "release" / "sums" / "sums.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.source.startswith("def sum_everywhere"):
            cell.source = answer
    folder = course / "submitted" / student / "sums"
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / "sums.ipynb")


def test_nbgrader_tells_a_right_from_a_wrong_submission(tmp_path: Path) -> None:
    pytest.importorskip("nbgrader")
    source = tmp_path / "sums.ipynb"
    nbformat.write(normalize(new_notebook(cells=CHAPTER), "sums"), source)
    course = tmp_path / "course"
    write(source, course)
    nbgrader(course, "generate_assignment", "sums")
    assert "secret" not in (course / "release" / "sums" / "sums.ipynb").read_text()
    stub = "def sum_everywhere(comm, tensor):\n    ..."
    answers = {"ada": ALL_REDUCE, "bob": stub, "eve": "def sum_everywhere(comm, tensor):\n    tensor *= comm.size"}
    for student, answer in answers.items():
        submit(course, student, answer)
    nbgrader(course, "autograde", "sums")
    nbgrader(course, "export", "--to", "grades.csv")
    rows = csv.DictReader((course / "grades.csv").open())
    assert {row["student_id"]: float(row["score"]) for row in rows} == {"ada": 3, "bob": 0, "eve": 0}


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_chapters_handout_holds_no_solution(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    checks = sum("check" in cell.metadata.get("tags", []) for cell in notebook.cells)
    made = handout(notebook)
    text = "\n".join(cell.source for cell in made.cells)
    assert not re.search(r"\{solution|% Solution|<details>", text)
    facts = [cell.metadata["nbgrader"] for cell in made.cells if "nbgrader" in cell.metadata]
    assert len({fact["grade_id"] for fact in facts}) == len(facts)
    assert sum(fact["grade"] and fact["locked"] for fact in facts) == checks
    assert not any(cell.get("outputs") for cell in made.cells)
