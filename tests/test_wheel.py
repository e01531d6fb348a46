"""The wheel: what it says of itself, and that it plays a Player and checks an exercise where nothing but it is installed."""

import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAY = """
import d2lps, d2lps_book.bench.simulator, pathlib, torch
from d2lps_book import check
assert "site-packages" in d2lps.__file__ and "site-packages" in check.__file__, (d2lps.__file__, check.__file__)
assert check.all_reduce(lambda comm, tensor: tensor.zero_()).text.startswith("with 1 rank and 8 elements")
assert (pathlib.Path(d2lps.__file__).parent / "py.typed").exists()
def work(comm):
    d2lps.collectives.all_reduce(comm, torch.ones(4, device=comm.device))
player = d2lps.widgets.Player(d2lps.simulate(work, d2lps.topology.hgx_h100(), ranks=4).trace)
assert "export default" in player._esm and player._css and player._still().startswith(b"\\x89PNG")
print(player)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is committed or about to be, so that nothing is left behind here."""
    copy = tmp_path_factory.mktemp("copy")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "d2lps", "book", "pyproject.toml",
               "README.md", "LICENSE"]  # fmt: skip
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", copy / "dist", copy]
    subprocess.run(command, check=True)
    return next((copy / "dist").glob("d2lps-*.whl"))


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as parts:
        about = parts.read(next(name for name in parts.namelist() if name.endswith("METADATA"))).decode()
        names = parts.namelist()
    assert "Description-Content-Type: text/markdown" in about and "# Dive into Parameter Servers" in about
    assert "Classifier: Typing :: Typed" in about and "d2lps/py.typed" in names
    assert {"torch", "anywidget", "pyzmq"} <= set(re.findall(r"^Requires-Dist: ([\w-]+)", about, re.MULTILINE))
    assert {name.split("/")[0] for name in names} == {"d2lps", "d2lps_book", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert not [name for name in names if name.endswith(".ipynb")] and "d2lps_book/bench/ring.c" in names


def test_the_wheel_plays_a_player(wheel: Path, tmp_path: Path) -> None:
    """What it needs is taken from this environment, by a path that its own packages come before."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "clean"], check=True)
    python = tmp_path / "clean" / "bin" / "python"
    subprocess.run([python, "-E", "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    site = next((tmp_path / "clean" / "lib").glob("python*/site-packages"))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    said = subprocess.run([python, "-E", "-c", PLAY], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0 and "4 ranks" in said.stdout, said.stderr
