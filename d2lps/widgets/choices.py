"""Choices made beforehand: everything that a reader can choose has been run by then, so no kernel is needed."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import traitlets
from matplotlib.figure import Figure

from d2lps.widgets.texts import CHOICES, NAMES
from d2lps.widgets.within import Holder, Thing, held, packed, png

_MOST = 200  # combinations that a page is asked to hold

Options = Sequence[Any] | Mapping[str, Any]  # values, or {what a reader sees: value}


class Choices(Holder):
    """A player, or whatever `make` makes, and above it the choices by which it is made.

    >>> Choices({"ranks": [2, 4], "late": [False, True]}, lambda ranks, late: f"{ranks} ranks", first={"ranks": 4})
    Choices: ranks 4 (of 2, 4), late no (of no, yes): '4 ranks'

    options: for each argument of `make` the values to choose from, or {what a reader sees: value}. Numbers become a slider, no
    and yes a switch, all else a list. make(**values) gives a widget of d2lps, a matplotlib Figure or a text; it is called once
    for each combination, here. What comes out equal is stored once.
    title: shown above. names: {argument: what a reader sees}. alt: of figures, a sentence with {argument} for what is chosen.
    first: {argument: value} chosen at first; else the first of each. `chosen` are the choices made, as indices.
    ValueError for more than 200 combinations, and for a first value that is no option.
    """

    data = traitlets.Dict().tag(sync=True)
    chosen = traitlets.List(traitlets.Int()).tag(sync=True)

    def __init__(
        self, options: Mapping[str, Options], make: Callable[..., Thing], title: str = "",
        names: Mapping[str, str] | None = None, alt: str = "", first: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        said = {name: _said(values) for name, values in options.items()}
        if not 0 < (count := prod(map(len, said.values()))) <= _MOST:
            raise ValueError(f"{list(said)} have {count} combinations, and a page has room for 1 to {_MOST}")
        first = {name: next(iter(values.values())) for name, values in said.items()} | dict(first or {})
        chosen = {name: _index(name, said, value) for name, value in first.items()}
        things, which, kinds = dict[str, int](), list[int](), dict[type, Thing]()
        for indices in product(*(range(len(values)) for values in said.values())):
            words = {name: list(values)[i] for (name, values), i in zip(said.items(), indices, strict=True)}
            thing = make(**{name: said[name][word] for name, word in words.items()})
            which.append(things.setdefault(json.dumps(held(thing, alt.format(**words))), len(things)))
            kinds.setdefault(type(thing), thing)
            if indices == tuple(chosen.values()):
                self._first, self._told = thing, alt.format(**words) if isinstance(thing, Figure) else repr(thing)
        drawn = [{"key": name, "name": (names or {}).get(name, name), **_drawn(said[name])} for name in said]
        data = {"title": title, "options": drawn, "things": packed(map(json.loads, things)), "which": " ".join(map(str, which))}
        super().__init__("choices", kinds.values(), data=data, chosen=list(chosen.values()))

    def __repr__(self) -> str:
        options = zip(self.data["options"], self.chosen, strict=True)
        said = (f"{o['name']} {o['values'][i]} (of {', '.join(o['values'])})" for o, i in options)
        return f"Choices: {', '.join(said)}: {self._told}"

    def _still(self) -> bytes | None:
        """What was chosen at first."""
        return png(self._first)


def _said(values: Options) -> dict[str, Any]:
    """{what a reader sees: value}: `_said(["ring", 0.5, True]) == {"ring": "ring", "0.5": 0.5, "yes": True}`."""
    if isinstance(values, Mapping):
        return {str(word): value for word, value in values.items()}
    return {CHOICES["yes" if v else "no"] if isinstance(v, bool) else NAMES.get(v, str(v)): v for v in values}


def _index(name: str, said: Mapping[str, Mapping[str, Any]], value: Any) -> int:
    values = list(said.get(name, {}).values())
    if value not in values:
        raise ValueError(f"first={{{name!r}: {value!r}}} is no option: choose one of {values}")
    return values.index(value)


def _drawn(said: Mapping[str, Any]) -> dict[str, Any]:
    """The words of one option, and by what it is chosen."""
    values = list(said.values())
    number = all(isinstance(value, int | float) for value in values)
    kind = "switch" if values == [False, True] else "slider" if number and len(values) > 2 else "list"
    return {"values": list(said), "kind": kind}
