"""The reference of the library's calls: signatures and docstrings as they are, on a page and in the index.

    ```{calls}
    d2lps.run
    d2lps.collectives.*        all public names of a module
    d2lps.Trace.+              a class and its public methods
    ```
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective


def resolve(name: str) -> Any:
    """What a dotted name means.

    >>> resolve("d2lps.collectives.broadcast")      # the function rather than its file  # doctest: +ELLIPSIS
    <function broadcast at ...>
    """
    package, *parts = name.split(".")
    found = importlib.import_module(package)
    for part in parts:
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")  # a part that the package does not import by itself
        found = getattr(found, part)
    return found


def expanded(name: str) -> Iterator[str]:
    """The names that one line of the directive stands for.

    >>> list(expanded("d2lps.aggregate.*"))
    ['d2lps.aggregate.on_device', 'd2lps.aggregate.on_host', 'd2lps.aggregate.blockwise']
    """
    owner, _, last = name.rpartition(".")
    if last == "*":
        module = resolve(owner)
        here = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", [key for key in here if key[0] != "_"])
        yield from (f"{owner}.{each}" for each in names if callable(getattr(module, each)))
    elif last == "+":
        yield owner
        members = inspect.getmembers(resolve(owner), inspect.isfunction)
        yield from (f"{owner}.{key}" for key, value in members if key[0] != "_" and inspect.getdoc(value))
    else:
        yield name


def signature(thing: Any) -> str:
    """The parameters as a caller writes them, without types.

    >>> def send(self, tensor: object, dst: int, tag: int = 0) -> None: ...
    >>> signature(send)
    '(tensor, dst, tag=0)'
    >>> signature(lambda place=lambda at: at: place)
    '(place=...)'
    """
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=each.empty) for name, each in found.parameters.items() if name != "self"]
    shown = str(found.replace(parameters=bare, return_annotation=found.empty))
    shown = re.sub(r"<(?:RedOpType|ReduceOp)\.(\w+)[^>]*>", r"ReduceOp.\1", shown)
    return re.sub(r"<[^<>]*(?:<\w+>[^<>]*)*>", "...", shown)  # the address of a function would be another in each build


def inline(text: str) -> list[nodes.Node]:
    """Words and `code`."""
    parts = re.split(r"`+([^`]+)`+", text)
    return [nodes.literal("", part) if index % 2 else nodes.Text(part) for index, part in enumerate(parts) if part]


def kinds(text: str) -> Iterator[tuple[str, str]]:
    """Each line of a docstring, and whether it is an example, a table's, empty, or prose.

    >>> list(kinds("Add.  Twice.\\n\\n>>> 1\\n1"))
    [('prose', 'Add.  Twice.'), ('', ''), ('example', '>>> 1'), ('example', '1')]
    >>> list(kinds("a    b\\nabc  d"))
    [('table', 'a    b'), ('table', 'abc  d')]
    >>> list(kinds("eager: up to so many bytes.\\n    0 for none."))
    [('prose', 'eager: up to so many bytes.'), ('prose', '    0 for none.')]
    """
    kind = ""
    for line in text.splitlines():
        if not line.strip():
            kind = ""
        elif line.startswith(">>>") or kind == "example":
            kind = "example"
        else:
            wide = 2 if kind == "table" else 3  # its longest name may have two spaces behind it
            goes_on = kind == "table" and line.startswith("  ")
            kind = "table" if goes_on or re.search(rf"\S {{{wide},}}\S", line) else "prose"
        yield kind, line


def rows(lines: list[str]) -> list[tuple[str, str]]:
    """The two columns of a table. A line goes on with the text above it, or is too long a name.

    >>> rows(["ring    round and", "        round", "a tree  up", "all that is left"])
    [('ring', 'round and round'), ('a tree', 'up'), ('all that is left', '')]
    """
    first = re.match(r" *\S+(?: \S+)* {2,}", lines[0])
    column, found = first.end() if first else 0, list[tuple[str, str]]()
    for line in lines:
        at = column if not line[column - 1 : column].strip() else len(line)
        name, text = line[:at].strip(), line[at:].strip()
        if name or not found:
            found.append((name, text))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
    return found


def table(lines: list[str]) -> nodes.Element:
    """As a list of names, each with what it means."""
    items = []
    for name, text in rows(lines):
        meant = nodes.definition("", nodes.paragraph("", "", *inline(text)))
        items.append(nodes.definition_list_item("", nodes.term("", "", *inline(name)), meant))
    return nodes.definition_list("", *items, classes=["d2lps-table"])


def described(text: str) -> list[nodes.Node]:
    """A docstring as paragraphs, examples and tables."""
    found: list[nodes.Node] = []
    for kind, lines in groupby(kinds(text), lambda pair: pair[0]):
        body = "\n".join(line for _, line in lines)
        if kind == "prose":
            found.append(nodes.paragraph("", "", *inline(body)))
        elif kind == "table":
            found.append(table(body.splitlines()))
        elif kind:
            body = re.sub(r" *# doctest: \+\w+", "", body)
            found.append(nodes.literal_block(body, body, language="pycon"))
    return found


class Calls(SphinxDirective):
    """One entry for each name."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        names = [name for line in self.content if line.strip() for name in expanded(line.strip())]
        return [node for name in names for node in self.entry(name)]

    def entry(self, name: str) -> list[nodes.Node]:
        thing, (owner, _, last) = resolve(name), name.rpartition(".")
        if not (doc := inspect.getdoc(thing)):
            raise self.error(f"{name} has no docstring")
        head = addnodes.desc_signature(name, "", ids=[name], classes=["d2lps-call"])
        head += addnodes.desc_addname(f"{owner}.", f"{owner}.")
        head += addnodes.desc_name(last, last)
        head += nodes.inline("", signature(thing), classes=["d2lps-parameters"])
        body = addnodes.desc_content("", *described(doc))
        entry = addnodes.desc("", head, body, domain="py", objtype="function", noindex=False)
        words = f"{last}() ({owner})" if callable(thing) else f"{last} ({owner})"
        return [addnodes.index(entries=[("single", words, name, "", None)]), entry]
