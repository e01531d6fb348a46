"""Tests and chapters under other versions of PyTorch, ipywidgets and Python: `make versions` prints a table of what came of each.

Every combination has an environment of its own under _build/versions, with the rest of requirements.txt as it stands. The oldest
and a middle torch run on the Python that started this, the book's own torch on that one and on every newer one that is found,
and once with the ipywidgets of Colab. The oldest torch and the oldest ipywidgets also run every chapter, which must give its
compared outputs.

    python tests/versions.py                     all of them
    python tests/versions.py 2.6.0               one torch, on the Python that runs this
    python tests/versions.py ipywidgets          the oldest ipywidgets
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
QUIET = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'book'}", "OMP_WAIT_POLICY": "PASSIVE"}
BUILT = ROOT / "_build" / "versions"
REQUIREMENTS = (ROOT / "requirements.txt").read_text()
OLDER = ["2.6.0", "2.9.0"]  # the oldest torch that pyproject.toml allows, and one between that and the book's
WIDGETS = "7.7.1"  # the oldest ipywidgets that pyproject.toml allows, which Colab has
NEWEST = 20  # of Python 3.x, looked for under its name


class Pair(NamedTuple):
    """A torch, the Python that it runs on, and an ipywidgets other than the book's own."""

    torch: str
    python: str  # a command
    widgets: str = ""

    @property
    def name(self) -> str:
        return f"torch {self.torch}, Python {version_of(self.python)}" + (f", ipywidgets {self.widgets}" if self.widgets else "")

    @property
    def folder(self) -> Path:
        return BUILT / "-".join(filter(None, (self.torch, version_of(self.python), self.widgets)))

    @property
    def chapters(self) -> bool:
        """Whether the chapters are run too."""
        return self.torch == OLDER[0] or bool(self.widgets)

    @property
    def requirements(self) -> str:
        """The book's, with these versions; ipywidgets 7 goes with a jupyter that does not ask for 8."""
        wanted = re.sub(r"^torch==.*", f"torch=={self.torch}", REQUIREMENTS, flags=re.MULTILINE)
        if self.widgets:
            wanted = re.sub(r"^ipywidgets==.*", f"ipywidgets=={self.widgets}", wanted, flags=re.MULTILINE)
        return wanted


class Outcome(NamedTuple):
    """How many tests passed, failed and were skipped, and the names of those that failed."""

    passed: int
    failed: int
    skipped: int
    failures: list[str]
    alike: str = ""  # how many chapters give their compared outputs, where they were run


def version_of(python: str) -> str:
    """ "3.11.7", or "" where the command runs no Python: a shim, for instance, of a version that is not chosen."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def newer_pythons() -> list[str]:
    """One command for each newer Python 3.x of this machine; those that pyenv keeps are looked at first."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    path = os.pathsep.join([*map(str, sorted(kept.glob("*/bin"))), os.environ["PATH"]])
    found = [shutil.which(f"python3.{minor}", path=path) for minor in range(sys.version_info.minor + 1, NEWEST)]
    return [python for python in found if python and version_of(python)]


def pairs() -> list[Pair]:
    own = re.search(r"^torch==(\S+)", REQUIREMENTS, re.MULTILINE)[1]
    older = [Pair(torch, sys.executable) for torch in [*OLDER, own]]
    return [*older, Pair(own, sys.executable, WIDGETS)] + [Pair(own, python) for python in newer_pythons()]


def chosen(name: str) -> Pair:
    """The pair that a word of the command line names."""
    return next(pair for pair in pairs() if pair.widgets) if name == "ipywidgets" else Pair(name, sys.executable)


def prepare(pair: Pair) -> None:
    """Make the pair's environment, unless it is there and requirements.txt is still what it was made from."""
    wanted, stamp = pair.requirements, pair.folder / "made_from.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([pair.python, "-m", "venv", "--clear", pair.folder], check=True)
    listed = pair.folder / "requirements.txt"
    listed.write_text(wanted)
    subprocess.run([pair.folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", listed], check=True)
    listed.rename(stamp)


def test(pair: Pair) -> Outcome:
    """Run what `make test-library` runs, in the pair's environment, and the chapters where that is wanted."""
    report = pair.folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [pair.folder / "bin" / "python", "-m", "pytest", "-q", "--tb=short", "-n", "4", "--dist", "loadfile"]
    command += [f"--junitxml={report}", *(f"--ignore=tests/test_{part}.py" for part in ("site", "slides", "lab", "shaped_hosts"))]
    subprocess.run(command, cwd=ROOT, env=os.environ | QUIET)
    return outcome(report)._replace(alike=rerun(pair) if pair.chapters else "")


def rerun(pair: Pair) -> str:
    """Run every chapter in the pair's environment: the last line says how many give their compared outputs."""
    command = [pair.folder / "bin" / "python", "book/_tools/rerun.py"]
    told = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True).stdout
    print(told, flush=True)
    return told.splitlines()[-1]


def outcome(report: Path) -> Outcome:
    """What a report of pytest's says, in JUnit's format."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case for case in suite.iter("testcase") if {"failure", "error"} & {part.tag for part in case}]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    return Outcome(passed, count["failures"] + count["errors"], count["skipped"], names)


def main() -> int:
    outcomes = {}
    for pair in [chosen(name) for name in sys.argv[1:]] or pairs():
        print(f"\n==== {pair.name}", flush=True)
        prepare(pair)
        outcomes[pair.name] = test(pair)
    print(f"\n{platform.platform()}\n{'':48}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for name, found in outcomes.items():
        print(f"{name:48}{found.passed:>8}{found.failed:>8}{found.skipped:>8}  {found.alike}")
        print(*(f"    {failure}" for failure in found.failures), sep="\n", end="\n" if found.failures else "")
    bad = [found for found in outcomes.values() if found.failed or (found.alike and not whole(found.alike))]
    return 1 if bad else 0


def whole(alike: str) -> bool:
    """Whether "11 of 11 chapters ..." is all of them.

    >>> whole("11 of 11 chapters"), whole("10 of 11 chapters")
    (True, False)
    """
    some, _, every = alike.split()[:3]
    return some == every


if __name__ == "__main__":
    sys.exit(main())
