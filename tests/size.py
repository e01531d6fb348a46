"""Lines that hold code, without comments, docstrings and blanks: `make size` prints them.

They are the spine, the rest of the library, what stands beside the chapters, JavaScript, and tests.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text: str) -> int:
    """`lines_of_code("x = 1  # one\\n\\ny = 2") == 2`"""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            code.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(code)


def lines_of_script(text: str) -> int:
    """JavaScript's, near enough: neither blank nor a comment from its first character on."""
    return sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith(("//", "/*", "*")))


# What a student is sent to read: every line of what this book is about, without what only predicts, saves, starts or shows it.
SPINE = ["comm", "collectives", "aggregate", "gossip", "compress", "cost", "parallel", "kvstore/core", "kvstore/naive"]
BESIDE = ["parallel/prediction", "parallel/saving"]


def in_spine(place: str) -> bool:
    """Whether a file is of the spine, by its place in the library.

    >>> in_spine("comm/ops.py"), in_spine("parallel/saving/pieces.py"), in_spine("kvstore/naive.py")
    (True, False, True)
    """

    def lies(part: str) -> bool:
        return place == f"{part}.py" or place.startswith(f"{part}/")

    return any(map(lies, SPINE)) and not any(map(lies, BESIDE))


def count(folder: Path) -> Counter[str]:
    """Lines of each file that has any, by its place in the folder."""
    count = {".py": lines_of_code, ".js": lines_of_script}
    files = (path for path in folder.rglob("*") if path.suffix in count)
    return Counter({path.relative_to(folder).as_posix(): count[path.suffix](path.read_text()) for path in files})


def folders(lines: Counter[str]) -> Counter[str]:
    """Lines by folder; "top" for the files beside the folders."""
    total: Counter[str] = Counter()
    for place, number in lines.items():
        total[place.partition("/")[0] if "/" in place else "top"] += number
    return total


def main() -> None:
    library, book, tests = (count(ROOT / folder) for folder in ("d2lps", "book/d2lps_book", "tests"))
    python = Counter({place: lines for place, lines in library.items() if place.endswith(".py")})
    spine = Counter({place: lines for place, lines in python.items() if in_spine(place)})
    for title, lines in {"spine": spine, "rest of the library": python - spine, "beside the chapters": book}.items():
        print(f"{title:24}{lines.total():>8,}")
        for folder, number in folders(lines).most_common():
            print(f"    {folder:20}{number:>8,}")
    print(f"{'library':24}{python.total():>8,} in {len(python)} files")
    print(f"{'JavaScript':24}{library.total() - python.total():>8,}")
    print(f"{'tests':24}{tests.total():>8,}")


if __name__ == "__main__":
    main()
