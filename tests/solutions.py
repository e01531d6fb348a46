"""The solutions that the chapters print, to be handed to the checks: `solution("ex-aggregating-weights")["weighted_mean"]`.

A solution's code is taken from its notebook, so that the book and the tests can't drift apart. Of its cells, those from
`solution-start` to `solution-end` with the exercise's label, a name gives what its last definition there gives. To define it,
only what it needs is executed: its own statement (a function, a class, an import, an assignment), those of the names that it
mentions, and so on, as they last stood before the solution ends. Cells that print, plot or run the chapter cost nothing, and
neither does a name that nobody asks for. What is built otherwise (a list filled in a loop) is not seen: a solution is best
self-contained, with d2lps, torch and functions of the chapter.

Wrong answers are mutants of them, as `tried` tells: a printed solution, with one thing changed that readers get wrong.

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
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

BOOK = Path(__file__).parents[1] / "book"


def solution(label: str) -> "Solution":
    """The names that the solution of an exercise defines, each made when it is asked for."""
    _, before, own = _solutions()[label]
    return Solution(label, before, ast.parse(own).body)


@cache
def printed() -> dict[str, tuple[str, str]]:
    """Of all chapters, by "chapter exercise check": the label of a solution, and how it calls its check.

    Of several calls of one check the last counts: a solution may first show what is refused.
    """
    calls = {}
    for label, (chapter, _, own) in _solutions().items():
        for step in ast.parse(own).body:
            match step:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="check"), attr=name))):
                    calls[f"{chapter} {label} {name}"] = (label, ast.unparse(step))
    return calls


def refusing(wrong: dict[str, list[tuple[Any, ...]]]) -> Callable[..., None]:
    """A test that wrong answers are refused: of each exercise, pairs of an answer and words of the verdict; see `tried`.

        test_refused = refusing({"ex-tensor-row row": [("y + bias -> y", "the bias is missing")]})
    """
    cases = [(exercise, answer, words) for exercise, answers in wrong.items() for answer, *words in answers]
    names = [f"{exercise} {getattr(answer, '__name__', answer)}" for exercise, answer, _ in cases]

    @pytest.mark.parametrize(("exercise", "answer", "words"), cases, ids=names)
    def test_a_wrong_answer_is_refused(exercise: str, answer: Any, words: list[str]) -> None:
        refused(tried(exercise, answer), *words)

    return test_a_wrong_answer_is_refused


def tried(exercise: str, answer: Any) -> Any:
    """The verdict of a check on another answer; `exercise` is a solution's label and the name of the check that it calls.

    answer: "y + bias -> y", a change of what the solution prints, where it must be found once, or a tuple of several;
    "3, [1, 2]", other arguments of the check, in the names of the solution; or a function that is checked in place of its.
    """
    label, name = exercise.split()
    chapter, before, own = _solutions()[label]
    if callable(answer):
        return getattr(import_module(f"d2lps_book.check.{chapter}"), name)(answer)
    changes = (answer,) if isinstance(answer, str) else answer
    if " -> " not in changes[0]:
        return solution(label).value(f"check.{name}({answer})")
    for old, new in (change.split(" -> ") for change in changes):
        assert own.count(old) == 1, f"the solution of {label} has {old!r} {own.count(old)} times, not once:\n{own}"
        own = own.replace(old, new)
    return Solution(label, before, ast.parse(own).body).value(printed()[f"{chapter} {label} {name}"][1])


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
    """The names that a statement looks up outside of itself: a function's own and its arguments aren't the chapter's."""
    names = [node for node in ast.walk(step) if isinstance(node, ast.Name)]
    loads = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    own = {node.arg for node in ast.walk(step) if isinstance(node, ast.arg)}
    if isinstance(step, ast.FunctionDef | ast.ClassDef):
        own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return loads - own - set(dir(builtins))


@cache
def _solutions() -> dict[str, tuple[str, list[ast.stmt], str]]:
    """By label: the chapter, what the code cells before a solution's start hold, and the text of those up to its end."""
    found = {}
    for path in sorted(BOOK.rglob("*.ipynb")):
        cells, start = json.loads(path.read_text())["cells"], 0
        code = [_code(cell) for cell in cells]
        parsed = [ast.parse(text).body for text in code]
        for here, cell in enumerate(cells):
            source = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            if opening := re.search(r"```{solution-start} (\S+)\n", source):
                label, start = opening[1], here
            elif "{solution-end}" in source:
                found[label] = path.stem, list(chain(*parsed[:start])), "\n".join(filter(None, code[start:here]))
    return found


def _code(cell: dict[str, Any]) -> str:
    """The text of a cell of code; empty for one of words, or of the shell's."""
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "code" and not source.startswith("%") else ""
