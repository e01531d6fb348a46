"""Do the sentences of the chapters hold under other random numbers?

    python book/_tools/seeds.py                         every chapter that has claims (claims.py)
    python book/_tools/seeds.py book/.../ring.ipynb     this one

A chapter is run five times, with all its seeds shifted (shifting.py), as far as its last claim. Each claim is asked behind the
cell in which it stands, of what the cells so far have defined. One line tells of each: at which draws it holds, where draw 0 is
the chapter as it is printed. Status 1 if a claim turns and its text doesn't say that it speaks of one draw, or if it does not
even hold at draw 0.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from claims import CLAIMS, Claim
from execute import execute_in_place, notebooks
from nbformat import NotebookNode, v4
from shifting import shifted

DRAWS, APART = 5, 1000  # how far the seeds of two draws are apart: further than a chapter's own, 0, 1, 2 and so on


def stands(cell: NotebookNode) -> str:
    """All text of a cell: its source, and what its picture's caption and description say."""
    return cell.source + json.dumps(cell.metadata.get("mystnb", {}), ensure_ascii=False)


def place(claim: Claim, notebook: NotebookNode) -> int:
    """The one cell in which the words of the claim stand."""
    found = [index for index, cell in enumerate(notebook.cells) if claim.words in stands(cell)]
    if len(found) != 1:
        raise ValueError(f"{claim.words!r} stands in {len(found)} cells, not in one")
    return found[0]


def asking(notebook: NotebookNode, claims: list[Claim]) -> NotebookNode:
    """The notebook as far as the last claim, with a cell behind each claim that asks whether it holds."""
    places = [place(claim, notebook) for claim in claims]
    cells = []
    for index, cell in enumerate(notebook.cells[: max(places) + 1]):
        cells.append(cell)
        for number, claim in enumerate(claims):
            if places[number] == index:
                cells.append(v4.new_code_cell(f"bool({claim.holds})", metadata={"claim": number}))
    return nbformat.from_dict(notebook | {"cells": cells})


def answers(notebook: NotebookNode) -> dict[int, bool]:
    """What a run has answered, by the claim's number."""
    asked = [cell for cell in notebook.cells if "claim" in cell.metadata]
    return {cell.metadata["claim"]: cell.outputs[-1].data["text/plain"] == "True" for cell in asked}


def draw(path: Path, claims: list[Claim], number: int) -> dict[int, bool]:
    """Which claims hold in one run of the chapter's cells."""
    notebook = asking(nbformat.read(path, as_version=4), claims)
    with TemporaryDirectory() as folder:
        environment = shifted(APART * number, Path(folder))
        return answers(execute_in_place(notebook, path, env=environment))


def judged(claim: Claim, holds: list[bool]) -> tuple[bool, str]:
    """Whether the sentence is in order, and what is to be said of it.

    >>> judged(Claim("one is best", "True"), [True, True, False])
    (False, 'TURNS at draws 2')
    >>> judged(Claim("one is best", "True", said="in this draw"), [True, True, False])
    (True, 'turns at draws 2, and says so')
    """
    turned = ", ".join(str(number) for number, held in enumerate(holds) if not held)
    if not turned:
        return True, f"holds at all {len(holds)} draws"
    if claim.said and holds[0]:
        return True, f"turns at draws {turned}, and says so"
    return False, f"TURNS at draws {turned}"


def check(path: Path) -> bool:
    """Print a line for each claim of a chapter, and say whether all are in order."""
    claims = CLAIMS[path.stem]
    draws = [draw(path, claims, number) for number in range(DRAWS)]
    verdicts = [judged(claim, [each[number] for each in draws]) for number, claim in enumerate(claims)]
    print(path.stem)
    for claim, (_, text) in zip(claims, verdicts, strict=True):
        print(f"  {text:34}  {claim.words}", flush=True)
    return all(good for good, _ in verdicts)


def main() -> int:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or [path for path in notebooks() if CLAIMS.get(path.stem)]
    return 0 if all([check(path) for path in paths]) else 1


if __name__ == "__main__":
    sys.exit(main())
