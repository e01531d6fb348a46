"""A scene told in the steps of a text: rounds that belong to one step become one, and a step may send nothing."""

from collections.abc import Mapping
from typing import Any

from d2lps.widgets.captions import known


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
