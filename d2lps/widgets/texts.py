"""Every word that a widget shows stands in texts.toml, so that another edition of the book can have its own."""

import tomllib
from pathlib import Path

_TABLES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
NAMES, EXPLORER, CHOICES, BET, READY, TIMETABLE, PLANS, PLANNING = (
    _TABLES[name] for name in ("names", "explorer", "choices", "bet", "ready", "timetable", "plans", "planning")
)
PLAYER = _TABLES["controls"] | _TABLES["player"]
STEPS = _TABLES["controls"] | _TABLES["steps"]
LANES = PLAYER | _TABLES["lanes"]
