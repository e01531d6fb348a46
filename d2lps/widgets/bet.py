"""A bet: a reader says what will come out before it is shown, and then sees the bet beside what was predicted and measured."""

from collections.abc import Sequence
from typing import Any

import traitlets

from d2lps.widgets.texts import BET
from d2lps.widgets.within import Holder, Thing, below, held, packed, png

Answer = str | float


class Bet(Holder):
    """A question whose result stays hidden until a reader has bet, or has asked to see it without a bet.

    >>> Bet("Who wins?", choices=["tree", "ring"], prediction="ring", measurement="tree")
    Bet: Who wins? tree or ring? predicted: ring, measured: tree
    >>> Bet("How long does it take?", unit="ms", prediction=15)
    Bet: How long does it take? predicted: 15 ms

    choices: a few short texts; without them the bet is a number of `unit`. then: what is shown afterwards, a widget of d2lps, a
    matplotlib Figure (with alt=, a sentence that says what it shows), a text, or a list of these. prediction, measurement: one
    of the choices or numbers of that unit; the bet is judged by the measurement where there is one. What a reader bets is
    kept nowhere. ValueError without an answer, and for an answer that is not among the choices.
    """

    data = traitlets.Dict().tag(sync=True)

    def __init__(
        self, question: str, choices: Sequence[str] = (), unit: str = "", then: Thing | list[Thing] | tuple[Thing, ...] = (),
        prediction: Answer | None = None, measurement: Answer | None = None, alt: str = "",
    ) -> None:  # fmt: skip
        given = {"prediction": prediction, "measurement": measurement}
        answers = {name: answer for name, answer in given.items() if answer is not None}
        if not answers:
            raise ValueError(f"prediction={prediction!r}, measurement={measurement!r}: a bet needs one of them to be judged by")
        for name, answer in answers.items():
            if choices and answer not in choices:
                raise ValueError(f"{name}={answer!r} is none of the choices {list(choices)}")
            if not choices and not isinstance(answer, int | float):
                raise ValueError(f"{name}={answer!r} is no number, and there are no choices")
        self._things = list(then) if isinstance(then, list | tuple) else [then]
        data: dict[str, Any] = {"question": question, "choices": list(choices), "unit": unit, "answers": answers, "texts": BET}
        super().__init__("bet", self._things, data=data | {"things": packed(held(thing, alt) for thing in self._things)})

    def __repr__(self) -> str:
        """Also what is hidden: it stands in for the picture in a printed page."""
        asked = self.data["question"] + (f" {' or '.join(self.data['choices'])}?" if self.data["choices"] else "")
        said = (f"{BET[name]}: {self._said(answer)}" for name, answer in self.data["answers"].items())
        return f"Bet: {asked} {', '.join(said)}"

    def _said(self, answer: Answer) -> str:
        return str(answer) if isinstance(answer, str) else BET["value"].format(x=f"{answer:g}", unit=self.data["unit"]).strip()

    def _still(self) -> bytes | None:
        """The question with its answers, and the result below."""
        pictures = [picture for thing in (repr(self).removeprefix("Bet: "), *self._things) if (picture := png(thing))]
        return below(*pictures) if len(pictures) > len(self._things) else None
