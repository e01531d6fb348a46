"""What is said of each step of a run: an author's sentence, or one that the messages give; and, on demand, every message."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from d2lps.trace import Trace
from d2lps.widgets.texts import PLAYER

_NAMED = 6  # messages that are told one by one
T = TypeVar("T")


def given(what: str, stops: Sequence[str], values: Mapping[Any, T] | Sequence[T]) -> list[T | None]:
    """What an author gives for steps, as one value or None for each of them.

    >>> stops = ["start", "reduce-scatter 1/2", "reduce-scatter 2/2", "all-gather 1/2 · bye"]
    >>> given("sentences", stops, {"reduce-scatter": "Add.", "reduce-scatter 2/2": "Last.", "bye": "Go.", 0: "Look."})
    ['Look.', 'Add.', 'Last.', 'Go.']

    values: a sequence, in the order of the steps, or by number (0 is the start) or label: a whole one, one of the labels that
    a step joins by " · ", or one without the numbers at its end. ValueError for what no step is called, with the names of all.
    """
    keys = [[number, *known(label)] for number, label in enumerate(stops)]
    if not isinstance(values, Mapping):
        if len(values) not in (len(stops), len(stops) - 1):
            raise ValueError(f"{what} has {len(values)} entries, but there are {len(stops) - 1} steps and the start")
        values = dict(enumerate(values, len(stops) - len(values)))
    if strangers := [key for key in values if not any(key in names for names in keys)]:
        raise ValueError(f"{what} has {strangers}, but the steps are called {list(dict.fromkeys(stops))}")
    return [next((values[key] for key in names if key in values), None) for names in keys]


def known(label: str) -> list[str]:
    """By what names an author may call a step: `known("a 1/2 · b") == ["a 1/2 · b", "a 1/2", "b", "a", "b"]`."""
    parts = label.split(" · ")
    return [label, *parts, *(part.rstrip("0123456789/ ") for part in parts)]


def reason(trace: Trace, messages: np.ndarray, names: Sequence[str], kinds: set[str]) -> str:
    """A sentence where the author has none: who sends to whom, and what becomes of it. kinds: of what changes then."""
    m = trace.messages
    sources, targets = (np.unique(m[end][messages]).tolist() for end in ("src", "dst"))
    src, dst = (_name(names[ends[0]]) for ends in (sources, targets))
    form = "one" if len(sources) == len(targets) == 1 else "out" if len(sources) == 1 else "in" if len(targets) == 1 else "many"
    said = PLAYER[f"reason_{form}"].format(src=src, dst=dst, srcs=len(sources), dsts=len(targets), n=len(messages))
    after = PLAYER["reason_combine"] if "combine" in kinds else PLAYER["reason_recv"] if "recv" in kinds else ""
    return f"{said} {after}".strip()


def listed(trace: Trace, messages: np.ndarray, names: Sequence[str], labels: Mapping[int, Sequence[str]]) -> str:
    """Each message with its bytes, the first few by name. labels: of the parts that it carries."""
    m, named = trace.messages, []
    for index in messages[:_NAMED].tolist():
        what = PLAYER["part"].format(label=", ".join(labels[index])) if 0 < len(labels[index]) <= 3 else ""
        src, dst = (names[m[end][index]] for end in ("src", "dst"))
        named.append(PLAYER["sends"].format(bytes=f"{m['nbytes'][index]:,} B", what=what, src=src, dst=dst))
    if len(messages) > _NAMED:
        named.append(PLAYER["more"].format(n=len(messages) - _NAMED))
    return "; ".join(named)


def _name(name: str) -> str:
    return PLAYER["rank"].format(name=name) if name.isdigit() else name
