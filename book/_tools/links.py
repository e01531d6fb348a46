"""Links to other pages of the book in a form that the site, JupyterLab and GitHub follow alike: by the path of the file.

JupyterLab shows {doc}`/book/part/page` as that path, and finds nothing there. So normalize.py writes [title](../part/page.ipynb).
"""

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

BOOK = Path(__file__).parents[1]
DOC = re.compile(r"\{doc\}`(?:([^`<]*?)\s*<)?/book/([^`>]+)>?`")


def title(path: Path) -> str:
    """A page's title: its first heading."""
    text = nbformat.read(path, as_version=4).cells[0].source if path.suffix == ".ipynb" else path.read_text()
    return re.search(r"^# +(.+)$", text, flags=re.MULTILINE)[1]


def link(match: re.Match[str]) -> str:
    """The link in place of one {doc}; where there is no such page it stays, for the site's build to complain of."""
    found = [path for path in (BOOK / f"{match[2]}.ipynb", BOOK / f"{match[2]}.md") if path.exists()]
    return f"[{match[1] or title(found[0])}](../{found[0].relative_to(BOOK)})" if found else match[0]


def by_path(notebook: NotebookNode) -> None:
    """Turn every {doc} of a chapter, which lies in its part's folder, into a link by path.

    >>> from nbformat.v4 import new_markdown_cell, new_notebook
    >>> notebook = new_notebook(cells=[new_markdown_cell("See {doc}`the store </book/parameter_servers/keys_and_values>`.")])
    >>> by_path(notebook)
    >>> notebook.cells[0].source
    'See [the store](../parameter_servers/keys_and_values.ipynb).'
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = DOC.sub(link, cell.source)
