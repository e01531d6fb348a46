"""What a chapter needs to run in Colab: a cell that installs the library, and text without MyST."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from colab import COLAB, for_colab, linked
from execute import notebooks
from installing import CODE, filled_in
from plain import plain

ADDRESS = "https://github.com/ada/d2lps"
PIP = "import sys\nprint(*sys.argv[1:], sep='\\n')\n"
RAW = re.compile(r"\{(?:exercise|solution|doc|cite|numref|ref|eq|prf|seealso)[^}`]*\}|^:(?:label|class):|^% ", re.MULTILINE)


def install(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run the cell where no package is installed but a `pip` that prints what it is asked for."""
    (tmp_path / "pip.py").write_text(PIP)
    (tmp_path / "cell.py").write_text(code)
    return subprocess.run([sys.executable, "-S", "-E", tmp_path / "cell.py"], cwd=tmp_path, capture_output=True, text=True)


def test_the_cell_installs_the_library_from_the_copy(tmp_path: Path) -> None:
    found = install(tmp_path, filled_in(ADDRESS).replace('"-m", "pip"', f'"{tmp_path}/pip.py"'))
    assert found.stdout.splitlines() == ["install", "-q", f"d2lps[chapters] @ git+{ADDRESS}"], found.stderr


def test_the_cell_leaves_torch_as_it_is(tmp_path: Path) -> None:
    about = tmp_path / "torch-2.8.0+cu126.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0+cu126\n")
    (tmp_path / "torch.py").touch()
    found = install(tmp_path, filled_in(ADDRESS).replace('"-m", "pip"', f'"{tmp_path}/pip.py"'))
    assert found.stdout.splitlines()[-1] == "torch==2.8.0+cu126", found.stderr


def test_the_cell_does_nothing_where_the_library_is(tmp_path: Path) -> None:
    (tmp_path / "d2lps.py").touch()
    found = install(tmp_path, CODE.replace('"-m", "pip"', f'"{tmp_path}/pip.py"'))
    assert found.returncode == 0 and found.stdout == found.stderr == ""


def test_without_an_address_the_cell_says_what_to_fill_in(tmp_path: Path) -> None:
    found = install(tmp_path, CODE)
    assert found.returncode == 1 and "between the quotes after COPY" in found.stderr


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_copy_is_plain_and_knows_its_address(path: Path) -> None:
    copy = for_colab(nbformat.read(path, as_version=4), ADDRESS)
    text = "\n".join(cell.source for cell in copy.cells if cell.cell_type == "markdown")
    assert RAW.findall(text) == [] and copy.cells[1].source.splitlines()[0] == "#@title Install the library"
    assert f'COPY = "{ADDRESS}"' in copy.cells[1].source
    assert text.count("<details>") == text.count("</details>")
    nbformat.validate(copy)


def test_links_and_references_become_words() -> None:
    text = "In {ref}`ex-a`, {numref}`fig-b` and {cite:t}`hockney1994`:\n\n```{seealso}\n[Here](../a/b.ipynb).\n```"
    said = plain(text, {"ex-a": "Halves", "fig-b": "Figure 2"})
    assert said == "In [Halves](#ex-a), Figure 2 and Hockney (1994):\n\n> **See also**\n>\n> [Here](../a/b.ipynb)."
    assert "(https://colab.research.google.com/github/ada/d2lps/blob/colab/a/b.ipynb)" in linked(said, ADDRESS)
    assert linked(said, "") == said and COLAB.parts[-2:] == ("_build", "colab")
