"""What is done to pages when all are written: formulas typeset, a dark twin for each plot, breaks in long names."""

import re
from pathlib import Path

import dark_pictures
import formulas
from sphinx.application import Sphinx

# The theme's icons as 1.5 MB of pictures in a script. Its style sheet has the same icons as a font, which loads a tenth of that.
ICONS = re.compile(r'\s*<!-- So that users can add custom icons -->\s*<script defer src="[^"]*fontawesome\.js[^"]*"></script>')

ENTRY = 'role="doc-biblioentry"'  # of a list's item: no longer a role in ARIA, and a reader of screens does not count it

TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
NAME = re.compile(r'(?<=<span class="pre">)[^<]+')
JOINT = re.compile(r"(?<=[^\W\d])(?:[._](?=[^\W\d])|=)|(?<=[a-z])(?=[A-Z])")


def breakable(page: str) -> str:
    """The page with places in the names of its tables at which a line may end, or a telephone would show half a table.

    >>> breakable('<table><span class="pre">rpc.find_it(aName=1.5)</span></table>')
    '<table><span class="pre">rpc.<wbr>find_<wbr>it(a<wbr>Name=<wbr>1.5)</span></table>'
    """
    return TABLE.sub(lambda table: NAME.sub(lambda name: JOINT.sub(r"\g<0><wbr>", name[0]), table[0]), page)


def finish(app: Sphinx, error: Exception | None) -> None:
    """Rewrite every page."""
    if error or app.builder.format != "html":
        return
    top = Path(app.outdir)
    pages = {path: path.read_text("utf-8") for path in sorted(top.rglob("*.html")) if "_static" not in path.parts}
    asked = list(dict.fromkeys(formula for page in pages.values() for formula in formulas.found(page)))
    markup, css = formulas.typeset(asked)
    (top / "_static" / formulas.SHEET).write_text(css, "utf-8")
    for path, page in pages.items():
        up = "../" * (len(path.relative_to(top).parts) - 1)
        page = ICONS.sub("", page).replace(ENTRY, 'role="listitem"')
        page = dark_pictures.both(formulas.put(breakable(page), markup, up), path)
        path.write_text(page, "utf-8")
    (top / "_static" / "scripts" / "fontawesome.js").unlink()
