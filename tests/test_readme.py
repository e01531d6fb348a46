"""The examples of README.md do what it says."""

import json
import math
import re
from pathlib import Path

import pytest
from launching import output_of, script

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    shown = [re.sub(r"^(d2lps\..*?)(\s+#.*)?$", r"print(\1)", block, flags=re.MULTILINE) for block in blocks]
    said = output_of(script(tmp_path / "readme.py", "".join(shown)))
    everyone, eight, store, losses, told = said.splitlines()
    assert everyone == f"Run({[[6.0] * 3] * 4})" and eight == f"Run({[[28.0] * 3] * 8})"
    assert store.startswith(f"Run({[[2000.0] * 3] * 4}) ['") and "runs again, with all that was acknowledged" in store
    first, *_, last = json.loads(losses)
    assert first == pytest.approx(math.log(96), abs=0.2) and last < first - 0.3
    seconds, memory = re.search(r"pp=16 .*: ([\d.]+) s, MFU .*%, ([\d.]+) GB>$", told).groups()
    assert f"about {float(seconds):.0f} s a step, and {float(memory):.0f} GB on a device" in README
