"""The claims of `make seeds`: each stands in its chapter, no chapter that draws numbers is forgotten, and draws do differ."""

import ast
import random
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from claims import CLAIMS, NONE, Claim
from execute import notebooks
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from seeds import draw, place, stands

CHAPTERS = {path.stem: path for path in notebooks()}
DICE = re.compile(r"manual_seed|default_rng|\bRandom\(|torch\.rand|\.generator\b")
ALL = [(chapter, claim) for chapter, claims in CLAIMS.items() for claim in claims]


@pytest.mark.parametrize(("chapter", "claim"), ALL, ids=[f"{chapter}: {claim.words}" for chapter, claim in ALL])
def test_a_claim_stands_in_its_chapter(chapter: str, claim: Claim) -> None:
    notebook = nbformat.read(CHAPTERS[chapter], as_version=4)
    assert claim.said in stands(notebook.cells[place(claim, notebook)])
    ast.parse(claim.holds, mode="eval")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_that_draws_numbers_has_claims_or_a_reason(chapter: str) -> None:
    cells = nbformat.read(CHAPTERS[chapter], as_version=4).cells
    end = next((index for index, cell in enumerate(cells) if re.search("^## Exercises", cell.source, re.MULTILINE)), None)
    if any(cell.cell_type == "code" and DICE.search(cell.source) for cell in cells[:end]):
        assert CLAIMS.get(chapter) or NONE.get(chapter)


DRAWN = """import random, numpy as np, torch
def drawn(comm=None):
    torch.manual_seed(3)
    return [torch.rand(()).item(), torch.rand((), generator=torch.Generator().manual_seed(3)).item(),
            np.random.default_rng([3, 1]).random(), np.random.RandomState(3).rand(), random.Random(3).random()]
"""


def test_a_draw_has_other_numbers_in_the_kernel_in_ranks_and_in_simulated_ones(tmp_path: Path) -> None:
    """Draw 0 has those that are printed."""
    run = "import d2lps\nhere, there = drawn(), d2lps.run(drawn, 1)[0]\n"
    run += "virtual = d2lps.simulate(drawn, d2lps.topology.star(1, 1e9))[0]"
    path = tmp_path / "chapter.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(DRAWN), new_code_cell(run), new_markdown_cell("All draw alike.")]), path)
    names: dict = {}
    exec(DRAWN, names)
    printed = names["drawn"]()
    assert printed[2:] == [np.random.default_rng([3, 1]).random(), np.random.RandomState(3).rand(), random.Random(3).random()]
    claims = [Claim("All draw alike", "here == there == virtual")]
    claims += [Claim("All draw alike", f"here[{k}] == {number!r}") for k, number in enumerate(printed)]
    assert draw(path, claims, 0) == dict.fromkeys(range(6), True)
    assert draw(path, claims, 1) == {0: True} | dict.fromkeys(range(1, 6), False)
