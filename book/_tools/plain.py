"""The book's Markdown as plain Markdown, for Colab and whatever else knows no MyST.

Exercises become headings, solutions open with a click, citations and references become words and links.
"""

import re
from collections.abc import Callable
from pathlib import Path

from folding import BEGINS, ENDS
from nbformat import NotebookNode
from pybtex.database import Entry, parse_file

BOOK = Path(__file__).parents[1]
OPENING = r"^(?P<fence>`{3,}|:{3,})\{(?P<name>[\w:-]+)\} *(?P<title>[^\n]*)\n"
FENCED = re.compile(OPENING + r"(?P<body>.*?)^(?P=fence)[ \t]*$", re.M | re.S)
ROLE = re.compile(r"\{(?P<role>[a-z:]+)\}`(?:(?P<text>[^`<]*?)\s*<(?P<target>[^`>]+)>|(?P<only>[^`]+))`")
OPTION = re.compile(r"^:([\w-]+):[ \t]*(.*)\n?", re.M)
CLICK = "<details><summary><b>Solution</b></summary>\n\n{}\n\n</details>"
TITLES = {"seealso": "See also"}
BIBLIOGRAPHY = parse_file(BOOK / "references.bib")


def options(body: str) -> tuple[dict[str, str], str]:
    """A directive's options, which stand at its top, and the rest."""
    found = {}
    while match := OPTION.match(body):
        found[match[1]] = match[2]
        body = body[match.end():]
    return found, body.strip("\n")


def exercise(title: str, body: str) -> str:
    label, text = options(body)
    return f'<a id="{label.get("label", "")}"></a>\n#### Exercise: {title}\n\n{text}'


def quoted(name: str) -> Callable[[str, str], str]:
    """A box becomes a quotation with its title in bold."""

    def quote(title: str, body: str) -> str:
        lines = f"**{title or TITLES.get(name, name.capitalize())}**\n\n{options(body)[1]}".splitlines()
        return "\n".join(f"> {line}".rstrip() for line in lines)

    return quote


DIRECTIVES: dict[str, Callable[[str, str], str]] = {
    "exercise": exercise,
    "solution": lambda title, body: CLICK.format(options(body)[1]),
    "solution-start": lambda title, body: "",  # the cell's text follows: see `cell_text`
    "solution-end": lambda title, body: "",
    "math": lambda title, body: f"$$\n{options(body)[1]}\n$$",
}


def cited(key: str, textual: bool) -> str:
    """Authors and year, linked to the work where it has an address.

    >>> cited("patarasuk2009", False), cited("patarasuk2009", True)
    ('Patarasuk and Yuan, 2009', 'Patarasuk and Yuan (2009)')
    """
    entry = BIBLIOGRAPHY.entries[key]
    people = [" ".join(person.last_names) for person in entry.persons.get("author", entry.persons.get("editor", []))]
    who = " and ".join(people) if len(people) < 3 else f"{people[0]} et al."
    who, year = re.sub(r"[{}]", "", who or entry.fields.get("title", key)), entry.fields.get("year", "n.d.")
    words = f"{who} ({year})" if textual else f"{who}, {year}"
    return f"[{words}]({url})" if (url := address(entry)) else words


def address(entry: Entry) -> str:
    """Where a work is to be found, or ""."""
    fields = entry.fields
    if "url" in fields:
        return fields["url"]
    if "doi" in fields:
        return f"https://doi.org/{fields['doi']}"
    return f"https://arxiv.org/abs/{fields['eprint']}" if "eprint" in fields else ""


def citation(keys: str, role: str) -> str:
    textual = role == "cite:t"
    words = [cited(key.strip(), textual) for key in keys.split(",")]
    return " and ".join(words) if textual else f"({'; '.join(words)})"


def role_text(match: re.Match[str], labels: dict[str, str]) -> str:
    """The words in place of one role."""
    role, target = match["role"], match["target"] or match["only"]
    if role.startswith("cite"):
        return citation(target, role)
    if role in ("ref", "numref", "eq", "prf:ref"):
        words = match["text"] or labels.get(target, target)
        return f"[{words}](#{target})" if target.startswith("ex-") else words
    return f"*{match['text'] or target}*"


def labels_of(notebook: NotebookNode) -> dict[str, str]:
    """What references are called: exercises by title, figures by number."""
    found, figures = {}, 0
    for cell in notebook.cells:
        for match in FENCED.finditer(cell.source) if cell.cell_type == "markdown" else ():
            if match["name"] == "exercise":
                found[options(match["body"])[0].get("label", "")] = match["title"]
        if name := cell.metadata.get("mystnb", {}).get("figure", {}).get("name"):
            figures += 1
            found[name] = f"Figure {figures}"
    return found


def plain(source: str, labels: dict[str, str]) -> str:
    """One cell's text.

    >>> plain("As {ref}`ex-a` says {cite}`hockney1994`.", {"ex-a": "Halves"})
    'As [Halves](#ex-a) says (Hockney, 1994).'
    """
    inside = "{solution-start}" in source or (source.startswith(BEGINS) and "{solution}" not in source)
    source = re.sub(rf"^({BEGINS}|{ENDS})\n", "", source, flags=re.M)
    source = FENCED.sub(lambda match: DIRECTIVES.get(match["name"], quoted(match["name"]))(match["title"], match["body"]), source)
    source = re.sub(r"^\(([\w-]+)\)=$", r'<a id="\1"></a>', source, flags=re.M)
    source = ROLE.sub(lambda match: role_text(match, labels), source).strip("\n")
    return CLICK.format(source) if inside and source else source
