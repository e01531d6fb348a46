"""What was measured, for programs to read: `python -m d2lps.bench --json FILE`."""

import json
from pathlib import Path
from typing import Any

_recorded: dict[str, list[dict[str, Any]]] = {}


def record(table: str, rows: list[dict[str, Any]]) -> None:
    _recorded[table] = rows


def write(file: str) -> None:
    Path(file).write_text(json.dumps(_recorded, indent=1) + "\n")
