"""Open the book in JupyterLab, at a page of contents: `make lab`. What follows is passed on to `jupyter lab`.

The page is made anew from _toc.yml and from what the notebooks say of themselves; JupyterLab's settings for it lie where the
environment's own defaults lie, beneath a reader's own.
"""

import json
import os
import sys
from pathlib import Path

import nbformat
import yaml
from execute import ROOT
from links import title

BOOK = ROOT / "book"
PAGE = BOOK / "contents.md"
SETTINGS = Path(sys.prefix) / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
PAGE_CONFIG = Path(sys.prefix) / "etc" / "jupyter" / "labconfig" / "page_config.json"
DISABLED = {"disabledExtensions": {"@jupyter/nbgrader": True}}  # a teacher's menus and buttons, which the tests install
OVERRIDES = {
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},  # a newcomer's first question is about the book
}
NOTE = """A chapter opens with a click. **Run › Run All Cells** runs it from its first cell. Below each exercise are a cell for
your answer, with `...` where it goes, and one that checks it. Its solution is folded: click on its title for the words, and on
the three dots for the code. (To run all cells runs the solutions too.) A name such as *zhang2023* is a work that the site's
references list.
"""


def entry(page: str) -> str:
    """One line of the contents: a page's title, minutes, what it needs and why to read it, as far as it says."""
    path = next(path for path in (ROOT / f"{page}.ipynb", ROOT / f"{page}.md") if path.exists())
    about = nbformat.read(path, as_version=4).metadata.get("d2lps", {}) if path.suffix == ".ipynb" else {}
    facts = ", ".join([f"{about[key]}{unit}" for key, unit in (("minutes", " minutes"), ("needs", "")) if key in about])
    link = f"[{title(path)}]({path.relative_to(BOOK)})"
    return link + (f" ({facts})" if facts else "") + (f"  \n{about['teaser']}" if "teaser" in about else "")


def contents() -> str:
    """The page: a heading for each part, and its chapters, numbered through the book."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    lines, number = [f"# {title((ROOT / toc['root']).with_suffix('.md'))}", NOTE], 0
    for part in toc["parts"]:
        lines.append(f"## {part['caption']}")
        for chapter in part["chapters"]:
            number += bool(part.get("numbered"))
            lines.append(f"{number}. {entry(chapter['file'])}" if part.get("numbered") else f"- {entry(chapter['file'])}")
    return "\n\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(contents())  # not committed: it is what the notebooks say now
    for path, values in ((SETTINGS, OVERRIDES), (PAGE_CONFIG, DISABLED)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1))
    command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={BOOK}"]
    command += ["--LabApp.default_url=/lab/tree/contents.md"]
    command += ["--allow-root"] if os.geteuid() == 0 else []  # as in a container
    os.execv(sys.executable, [*command, *sys.argv[1:]])


if __name__ == "__main__":
    main()
