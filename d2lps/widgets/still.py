"""What all widgets have in common: code that they share, and what stands in for them where there is no JavaScript."""

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anywidget
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The lines of the algorithms in order of `texts.NAMES`, colored as in common.css; a reader's own are black. () is unbroken.
LINES: list[tuple[str, tuple[float, ...]]] = [
    ("#0072b2", ()), ("#d55e00", (5, 2)), ("#009e73", (1.2, 1.6)), ("#6b7280", (6, 2, 1.2, 2)),
    ("#b0558a", (3, 1.5, 1, 1.5, 1, 1.5)), ("#b97a00", (3, 2)), ("#3a9bd4", (1, 1.65)), ("#857a00", (9, 3)), ("black", ()),
]  # fmt: skip


class Still(anywidget.AnyWidget):
    """A widget that says what it shows: `repr(self)` in words, `self._figure()` as a picture.

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

    def _figure(self) -> Figure:
        raise NotImplementedError

    def _still(self) -> bytes:
        return as_png(self._figure())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and what stands in for it in a printed page or a viewer of notebooks."""
        bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        bundle["text/plain"] = repr(self)
        bundle["image/png"] = base64.b64encode(self._still()).decode()
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


Curves = Iterable[tuple[dict[str, Any], Any, Any]]  # an algorithm as `described` tells it, its xs, its ys


def chart(title: str, xlabel: str, ylabel: str, curves: Curves, **style: Any) -> tuple[Figure, Axes]:
    """A line for each algorithm."""
    drawn = figure(6.4, 3.6)
    ax = drawn.subplots()
    for algorithm, xs, ys in curves:
        color, dashes = LINES[min(algorithm["style"], len(LINES) - 1)]
        ax.plot(xs, ys, label=algorithm["name"], color=color, dashes=dashes, **style)
    ax.set_title(title, fontsize=10)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return drawn, ax
