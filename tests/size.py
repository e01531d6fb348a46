"""Lines that hold code, by folder: no comments, docstrings or blanks; JavaScript beside. `make size` prints it.

First of the library, then of what stands beside the chapters.
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


def sizes(package: Path) -> tuple[Counter[str], Counter[str]]:
    """Python's and JavaScript's lines of a package, by folder; "top" for the files beside the folders."""
    python: Counter[str] = Counter()
    script: Counter[str] = Counter()
    for path in package.rglob("*"):
        inside = path.relative_to(package).parts
        folder = inside[0] if len(inside) > 1 else "top"
        if path.suffix == ".py":
            python[folder] += lines_of_code(path.read_text())
        elif path.suffix == ".js":
            script[folder] += lines_of_script(path.read_text())
    return python, script


def main() -> None:
    for package in ("d2lps", "book/d2lps_book"):
        python, script = sizes(ROOT / package)
        print(f"{package:18}{'Python':>8}{'JavaScript':>12}")
        for folder, lines in python.most_common():
            print(f"  {folder:16}{lines:>8,}{script[folder] or '':>12}")
        print(f"  {'all':16}{python.total():>8,}{script.total():>12,}")


if __name__ == "__main__":
    main()
