"""The cell that installs the library where it is missing: the same in every chapter, kept by normalize.py, unseen on the site."""

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

CODE = '''# Installs d2lps where it is missing, as in Colab; where it is there, does nothing.
import importlib.metadata, importlib.util, subprocess, sys

COPY = ""  # of the book's repository: an address that git can clone

if importlib.util.find_spec("d2lps") is None:
    if not COPY:
        raise ModuleNotFoundError(
            "d2lps is not installed here. Write the address of your copy of the "
            "book's repository between the quotes after COPY, and run this cell "
            "again. (`make colab` in the copy makes notebooks that know it.)")
    wanted = [f"d2lps[chapters] @ git+{COPY}"]
    if importlib.util.find_spec("torch"):  # which stays as it is
        wanted.append(f"torch=={importlib.metadata.version('torch')}")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted],
                   check=True)
'''.rstrip("\n")
TAGS = ["nbval-skip", "remove-cell", "skip-execution"]  # where the book is run and built, the library is there
FIRST_LINE = CODE.splitlines()[0]


def filled_in(address: str) -> str:
    """The cell's code, with the address of a copy."""
    return CODE.replace('COPY = ""', f'COPY = "{address}"')


def put_first(notebook: NotebookNode) -> None:
    """Put the cell behind the first, which holds the title, in place of the one that is there."""
    cells = [cell for cell in notebook.cells if not cell.source.startswith(FIRST_LINE)]
    notebook.cells = [*cells[:1], new_code_cell(CODE, metadata={"tags": list(TAGS)}), *cells[1:]]
