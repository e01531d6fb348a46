"""The shape of the library and of what stands beside the chapters: imports only point down, and files and functions stay small
enough to read at one sitting."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "d2lps").rglob("*.py"), *(ROOT / "book" / "d2lps_book").rglob("*.py")])

# From the bottom to the top, as in CONTRIBUTING.md; what is still to come has its place already. A part may import its own
# layer's others and those below.
LAYERS = [
    {"comm", "trace", "topology", "result", "figures", "disk", "arguments"},
    {"signatures", "processgroup", "launch", "sharedmemory", "simulator"},
    {"collectives", "aggregate", "compress", "gossip", "cost"},
    {"backend", "parallel", "kvstore", "adaptive", "feeding"},
    {"architectures", "watch", "planning"},
    {"widgets"},
    {"check", "bench", "sharded_product"},  # d2lps_book: nothing in d2lps knows them
]
# What a part may import where that is less than its layer allows: an algorithm knows of no world.
ONLY = {part: LAYERS[2] | {"comm", "arguments"} for part in LAYERS[2]} | {
    "trace": set(),  # the bottom of the bottom: comm writes into it
    "result": {"trace"},
    "figures": set(),
    "disk": set(),
    "arguments": set(),
    "topology": {"figures"},
}


def name_of(file: Path) -> str:
    """`d2lps/comm/ops.py` is the module d2lps.comm.ops, `book/d2lps_book/check/__init__.py` the module d2lps_book.check."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("book.").removesuffix(".__init__")


def part_of(module: str) -> str:
    """The part that a module belongs to: "comm" for d2lps.comm.ops, "check" for d2lps_book.check.tools, "" for d2lps itself."""
    return [*module.split("."), ""][1]


MODULES = {name_of(file): file for file in FILES}


@cache
def imports(module: str) -> set[str]:
    """The modules of ours that a module knows: an import inside a function or for types alone is one too.

    It would only hide that two files can't be understood one after the other.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively: write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    # `from d2lps.comm import flat` names d2lps.comm, `from d2lps.comm import ops` names d2lps.comm.ops
    inside = {name if name in MODULES else name.rpartition(".")[0] for name in found}
    return inside & MODULES.keys() - {module}


def floor(part: str) -> int:
    return next(height for height, layer in enumerate(LAYERS) if part in layer)


def test_every_part_has_a_layer() -> None:
    assert {part_of(module) for module in MODULES} - {""} <= set().union(*LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_point_down(module: str) -> None:
    part = part_of(module)
    if not part:
        pytest.skip("the package itself gathers its parts")
    theirs = {other: part_of(other) for other in imports(module)}
    for other, below in theirs.items():
        assert below, f"{module} imports the whole package {other}: name the part"
        assert below == part or floor(below) <= floor(part), f"{module} imports {other}, which is above it"
        assert below == part or below in ONLY.get(part, {below}), f"{module} imports {other}; {part} may import {ONLY[part]}"


# The parameter server's folders: what each may import of the others.
STORE = {
    "core": set(),
    "storage": {"core"},
    "network": {"core", "storage"},
    "launch": {"core", "storage", "network"},
    "simulation": {"core"},
}


@pytest.mark.parametrize("module", [module for module in MODULES if module.count(".") == 3 and part_of(module) == "kvstore"])
def test_the_stores_folders_are_layers(module: str) -> None:
    folder = module.split(".")[2]
    others = {other.split(".")[2] for other in imports(module) if part_of(other) == "kvstore"} - {folder}
    assert others <= STORE[folder], f"{module} imports of {others - STORE[folder]}, which its layer may not know"


def circles(edges: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The largest sets in which each knows each, if only through others; the smallest such set is two that know each other."""
    return [part for part in nx.strongly_connected_components(nx.DiGraph(edges)) if len(part) > 1]


def test_a_circle_is_found_and_who_only_leads_to_it_is_not_in_it() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a")]) == [{"a", "b", "c"}]
    assert not circles([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])


def test_no_algorithm_asks_whether_it_is_recorded() -> None:
    algorithms = [module for module in MODULES if part_of(module) in LAYERS[2]]
    assert not [module for module in algorithms if "recorder" in MODULES[module].read_text()]


def test_no_two_parts_know_each_other() -> None:
    edges = {(part_of(module), part_of(other)) for module in MODULES for other in imports(module)}
    assert not circles((part, other) for part, other in edges if part and part != other)


def test_no_files_know_each_other_round_a_circle() -> None:
    found = circles((module, other) for module in MODULES for other in imports(module))
    assert not found, f"these know one another, if only through one another: {found}"


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short(module: str) -> None:
    text = MODULES[module].read_text()
    assert len(text.splitlines()) <= 300, "lines in the file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno - first + 1 <= 45, f"lines in {node.name}"


def test_nine_functions_in_ten_have_less_than_25_lines() -> None:
    functions = [n for file in FILES for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)]
    long = [node.name for node in functions if node.end_lineno - node.lineno + 1 >= 25]
    assert len(long) <= len(functions) / 10, long
