"""What is said of each step of a run: an author's sentence, or one that the messages give; on demand, every message. And a run
told in the steps of a text: rounds that belong to one step become one, and a step may send nothing."""

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


# ---- the steps of a text ------------------------------------------------------------------------------------------------


def retold(scene: dict[str, Any], steps: Mapping[str, str | None]) -> dict[str, Any]:
    """`steps`: {a step's name: the label of the round that it begins with, or None where nothing is sent}, in their order. A step
    goes on until the next begins. What was before the first has happened when the scene starts. ValueError for a label that no
    later round has, and for a scene in seconds, in which a step that sends nothing would have no length.

    >>> stop = {"say": "", "text": ""}
    >>> scene = {"unit": "round", "end": 3, "stops": [{"t": t, "label": label} | stop for t, label in enumerate("0abc")],
    ...          "initial": [None], "changes": [{"t": 3, "cell": 0}], "messages": [{"start": 1, "end": 2}]}
    >>> told = retold(scene, {"think": None, "send": "b"})
    >>> [(stop["t"], stop["label"]) for stop in told["stops"]], told["messages"], told["changes"]
    ([(0, '0'), (1, 'think'), (2, 'send')], [{'start': 1.0, 'end': 1.5}], [{'t': 2.0, 'cell': 0}])
    """
    if scene["unit"] != "round":
        raise ValueError("steps= needs clock='rounds'")
    begins, spans, last = _begins(scene["stops"], steps), [], scene["end"]
    for number in range(len(begins), 0, -1):  # (begin, end) in rounds of what becomes the step of this number
        if (begin := begins[number - 1]) is not None:
            spans.append((begin, last, number))
            last = begin
    spans.reverse()

    def at(t: float, leaves: bool = False) -> float:
        """What leaves at the end of a step leaves when the next one begins."""
        begin, end, number = next(span for span in spans if t < span[1] or (t == span[1] and (not leaves or span is spans[-1])))
        return number - 1 + (t - begin) / (end - begin)

    messages = [message for message in scene["messages"] if message["end"] > last]
    moved = [{**m, "start": at(m["start"], True), **{key: at(m[key]) for key in ("end", "first") if key in m}} for m in messages]
    initial = list(scene["initial"])
    for change in scene["changes"]:
        if change["t"] <= last:
            initial[change["cell"]] = {key: change[key] for key in ("label", "from") if key in change}
    changes = [{**change, "t": at(change["t"])} for change in scene["changes"] if change["t"] > last]
    stops = [scene["stops"][0]]
    for number, name in enumerate(steps, 1):
        inside = [stop for begin, end, k in spans if k == number for stop in scene["stops"] if begin < stop["t"] <= end]
        text = "; ".join(stop["text"] for stop in inside)
        stops.append({"t": number, "label": name, "say": inside[0]["say"] if inside else "", "text": text})
    return scene | {"end": len(steps), "stops": stops, "messages": moved, "changes": changes, "initial": initial}


def _begins(stops: list[dict[str, Any]], steps: Mapping[str, str | None]) -> list[float | None]:
    """When each step begins, in rounds."""
    found: list[float | None] = []
    after = 0
    for name, label in steps.items():
        place = next((k for k in range(after + 1, len(stops)) if label in known(stops[k]["label"])), None) if label else after
        if place is None:
            left = [stop["label"] for stop in stops[after + 1 :]]
            raise ValueError(f"steps={{{name!r}: {label!r}}}: the rounds from there on are called {left}")
        found.append(stops[place - 1]["t"] if label else None)
        after = place
    return found
