"""The solutions that the chapters print, to be handed to the checks: `solution("ex-aggregating-weights")["weighted_mean"]`.

A solution's code is taken from its notebook, so that the book and the tests can't drift apart. Of its cells, those from
`solution-start` to `solution-end` with the exercise's label, a name gives what its last definition there gives. To define it,
only what it needs is executed: its own statement (a function, a class, an import, an assignment), those of the names that it
mentions, and so on, as they last stood before the solution ends. Cells that print, plot or run the chapter cost nothing, and
neither does a name that nobody asks for. What is built otherwise (a list filled in a loop) is not seen: a solution is best
self-contained, with d2lps, torch and functions of the chapter.

>>> mine = solution("ex-aggregating-weights")
>>> mine["weighted_mean"].__name__
'weighted_mean'
>>> sorted(solution("ex-beyond-doubling"))
['recursive_doubling']
"""

import ast
import builtins
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

BOOK = Path(__file__).parents[1] / "book"


def solution(label: str) -> "Solution":
    """The names that the solution of an exercise defines, each made when it is asked for."""
    return Solution(label, *_solutions()[label][1:])


def printed() -> dict[str, tuple[str, str]]:
    """Of all chapters, by "chapter exercise check": the label of a solution, and how it calls its check.

    Of several calls of one check the last counts: a solution may first show what is refused.
    """
    calls = {}
    for label, (chapter, _, own) in _solutions().items():
        for step in own:
            match step:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="check"), attr=name))):
                    calls[f"{chapter} {label} {name}"] = (label, ast.unparse(step))
    return calls


def refused(verdict: Any, *words: str) -> None:
    """A check has refused what it was handed, and has said these words."""
    assert not verdict and all(word in verdict.text for word in words), verdict


def refused_as(verdict: Any, *patterns: str) -> None:
    """The same, where the words are patterns of `re`."""
    assert not verdict and all(re.search(pattern, verdict.text) for pattern in patterns), verdict


class Solution(Mapping[str, Any]):
    def __init__(self, label: str, before: list[ast.stmt], own: list[ast.stmt]) -> None:
        self._label, self._order, self._names = label, before + own, {name for step in own for name in _bound(step)}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"the solution of {self._label} defines {sorted(self._names)}, not {name}")
        return self.value(name)

    def value(self, expression: str) -> Any:
        """What it gives at the solution's end."""
        namespace: dict[str, Any] = {"__name__": f"solution of {self._label}"}
        needed = self._needed(_mentioned(ast.parse(expression)))
        body = [step for index, step in enumerate(self._order) if index in needed]
        exec(compile(ast.Module(body, []), f"<{self._label}>", "exec"), namespace)
        return eval(expression, namespace)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _needed(self, names: set[str]) -> set[int]:
        """The statements that define names and all that those mention, directly or not."""
        needed: set[int] = set()
        todo = [(name, len(self._order)) for name in names]
        while todo:
            name, end = todo.pop()
            index = next((i for i in reversed(range(end)) if name in _bound(self._order[i])), None)
            if index is None or index in needed:
                continue  # a builtin, a local name, or known
            needed.add(index)
            step = self._order[index]
            late = isinstance(step, ast.FunctionDef | ast.ClassDef)  # looks its names up when it is called
            todo += [(mentioned, len(self._order) if late else index) for mentioned in _mentioned(step)]
        return needed


def _bound(step: ast.stmt) -> set[str]:
    match step:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).split(".")[0] for alias in names}
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return set()


def _mentioned(step: ast.AST) -> set[str]:
    loads = (node for node in ast.walk(step) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return {node.id for node in loads} - set(dir(builtins))


@cache
def _solutions() -> dict[str, tuple[str, list[ast.stmt], list[ast.stmt]]]:
    """By label: the chapter, what the code cells before a solution's start hold, and what those up to its end hold."""
    found = {}
    for path in sorted(BOOK.rglob("*.ipynb")):
        cells, start = json.loads(path.read_text())["cells"], 0
        parsed = [_parsed(cell) for cell in cells]
        for here, cell in enumerate(cells):
            source = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            if opening := re.search(r"```{solution-start} (\S+)\n", source):
                label, start = opening[1], here
            elif "{solution-end}" in source:
                found[label] = path.stem, list(chain(*parsed[:start])), list(chain(*parsed[start:here]))
    return found


def _parsed(cell: dict[str, Any]) -> list[ast.stmt]:
    """Its statements, if it has any, and is not the shell's."""
    source = "".join(cell["source"])
    return ast.parse(source).body if cell["cell_type"] == "code" and not source.startswith("%") else []
