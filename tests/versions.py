"""The library's tests under other versions of PyTorch and of Python: `make versions` prints a table of what came of each.

Every pair has an environment of its own under _build/versions, with the rest of requirements.txt as it stands. The oldest
and a middle torch run on the Python that started this, the book's own torch on that one and on every newer one that is found.

    python tests/versions.py                     every pair
    python tests/versions.py 2.6.0               one torch, on the Python that runs this
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
BUILT = ROOT / "_build" / "versions"
REQUIREMENTS = (ROOT / "requirements.txt").read_text()
OLDER = ["2.6.0", "2.9.0"]  # the oldest torch that pyproject.toml allows, and one between that and the book's
NEWEST = 20  # of Python 3.x, looked for under its name


class Pair(NamedTuple):
    """A torch, and the Python that it runs on."""

    torch: str
    python: str  # a command

    @property
    def name(self) -> str:
        return f"torch {self.torch}, Python {version_of(self.python)}"

    @property
    def folder(self) -> Path:
        return BUILT / f"{self.torch}-{version_of(self.python)}"


class Outcome(NamedTuple):
    """How many tests passed, failed and were skipped, and the names of those that failed."""

    passed: int
    failed: int
    skipped: int
    failures: list[str]


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
    return [Pair(torch, sys.executable) for torch in [*OLDER, own]] + [Pair(own, python) for python in newer_pythons()]


def prepare(pair: Pair) -> None:
    """Make the pair's environment, unless it is there and requirements.txt is still what it was made from."""
    wanted, stamp = re.sub(r"^torch==.*", f"torch=={pair.torch}", REQUIREMENTS, flags=re.MULTILINE), pair.folder / "made_from.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([pair.python, "-m", "venv", "--clear", pair.folder], check=True)
    listed = pair.folder / "requirements.txt"
    listed.write_text(wanted)
    subprocess.run([pair.folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", listed], check=True)
    listed.rename(stamp)


def test(pair: Pair) -> Outcome:
    """Run what `make test-library` runs, in the pair's environment."""
    report = pair.folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [pair.folder / "bin" / "python", "-m", "pytest", "-q", "--tb=short", "-n", "2", "--dist", "loadfile"]
    command += [f"--junitxml={report}", "--ignore", "tests/test_site.py", "--ignore", "tests/test_shaped_hosts.py"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"})
    return outcome(report)


def outcome(report: Path) -> Outcome:
    """What a report of pytest's says, in JUnit's format."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case for case in suite.iter("testcase") if {"failure", "error"} & {part.tag for part in case}]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    return Outcome(passed, count["failures"] + count["errors"], count["skipped"], names)


def main() -> int:
    chosen = [Pair(torch, sys.executable) for torch in sys.argv[1:]] or pairs()
    outcomes = {}
    for pair in chosen:
        print(f"\n==== {pair.name}", flush=True)
        prepare(pair)
        outcomes[pair.name] = test(pair)
    print(f"\n{platform.platform()}\n{'':30}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for name, found in outcomes.items():
        print(f"{name:30}{found.passed:>8}{found.failed:>8}{found.skipped:>8}")
        print(*(f"    {failure}" for failure in found.failures), sep="\n", end="\n" if found.failures else "")
    return 1 if any(found.failed for found in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
