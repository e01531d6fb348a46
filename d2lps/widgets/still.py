"""What all widgets have in common: code that they share, and what stands in for them where there is no JavaScript."""

import base64
import io
from pathlib import Path
from typing import Any

import anywidget
from matplotlib.figure import Figure


class Still(anywidget.AnyWidget):
    """A widget that says in words what it shows: `repr(self)`.

    Players and lanes, and what holds only such, figures and texts, are drawn by Python as well, for a printed page or a viewer of
    notebooks: `_still()` is that picture. Each other widget has the sentence alone; the book's tools photograph it in a browser
    when they store a notebook (book/_tools/photographs.py).
    It is opened in the browser once somebody shows it or refers to it: one that is held within another (within.py) never is.
    """

    _ipython_display_ = None  # ipywidgets 7 has one, which would go before _repr_mimebundle_ and knows no picture

    def open(self) -> None:
        """Wait for `model_id`."""

    @property
    def model_id(self) -> str | None:
        if self.comm is None:
            super().open()
        return super().model_id

    def _state(self) -> dict[str, Any]:
        """The traits that its script reads."""
        theirs = anywidget.AnyWidget.class_traits(sync=True)
        return {name: getattr(self, name) for name in self.traits(sync=True) if name not in theirs and not name.startswith("_")}

    def _still(self) -> bytes | None:
        """As PNG."""
        return None

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and what stands in for it where it can't live: a sentence, and the picture if there is one."""
        bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        bundle["text/plain"] = repr(self)
        if (picture := self._still()) is not None:
            bundle["image/png"] = base64.b64encode(picture).decode()
        return bundle, metadata


def source(name: str, *more: str) -> str:
    """The JavaScript or the style sheet of a widget in one text: what all widgets share, then its own files.

    `source("player.js")` is common.js, player.js and what begins with player_, such as player_cards.js; then the files `more`.
    """
    own = Path(__file__).with_name(name)
    parts = [own.with_stem("common"), own, *sorted(own.parent.glob(f"{own.stem}_*{own.suffix}")), *map(own.with_name, more)]
    return "".join(part.read_text("utf-8") for part in parts)


def as_png(drawn: Figure) -> bytes:
    """The same bytes each time."""
    out = io.BytesIO()
    drawn.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()


def figure(width: float, height: float) -> Figure:
    """On white, in inches; not pyplot's, so that nothing is shown and no backend is chosen."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")
