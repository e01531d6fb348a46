"""Formulas typeset when the site is built: a page carries them as they look, and no script of 1.2 MB that would typeset them.

Sphinx writes a formula as TeX between \\( and \\), or \\[ and \\]. When all pages are written, MathJax does its work on all
formulas of the book at once, in node (formulas.js).
"""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError
from sphinx.ext.mathjax import html_visit_displaymath, html_visit_math

HERE = Path(__file__).parent
NODE = Path(sys.prefix) / "bin" / "node"
MATHJAX = HERE.parents[1] / "_build" / "node" / "node_modules" / "mathjax"
SHEET = "d2lps/formulas.css"
NUMBER = r'(?:<span class="eqno">.*?</span>)?'
PLACE = re.compile(rf'(<(?:span|div) class="math [^>]*>[^\\<]*{NUMBER}\s*)\\([(\[])(.*?)\\[)\]]', re.DOTALL)


def configure(app: Sphinx, config: Config) -> None:
    """Take the place of Sphinx's renderer, which loads MathJax; its markup is ours."""
    config.html_math_renderer = "typeset"


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("typeset", (html_visit_math, None), (html_visit_displaymath, None))


def found(page: str) -> list[tuple[str, bool]]:
    r"""The formulas of a page: TeX, and whether it stands on a line of its own.

    >>> found('<span class="math notranslate nohighlight">\\(p &lt; 3\\)</span>')
    [('p < 3', False)]
    """
    return [(html.unescape(tex), kind == "[") for _, kind, tex in PLACE.findall(page)]


def typeset(formulas: list[tuple[str, bool]]) -> tuple[dict[tuple[str, bool], str], str]:
    """Each formula's markup, and the style sheet that all of them need."""
    asked = json.dumps([{"tex": tex, "display": display} for tex, display in formulas])
    done = subprocess.run([NODE, HERE / "formulas.js", MATHJAX], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtensionError(f"a formula can't be typeset: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    return dict(zip(formulas, answer["formulas"], strict=True)), answer["css"]


def put(page: str, markup: dict[tuple[str, bool], str], up: str) -> str:
    """The page with its formulas as they look, and a link to their style sheet, if it has any."""
    page, count = PLACE.subn(lambda place: place[1] + markup[html.unescape(place[3]), place[2] == "["], page)
    link = f'<link rel="stylesheet" href="{up}_static/{SHEET}">\n'
    return page.replace("</head>", f"{link}</head>", 1) if count else page
