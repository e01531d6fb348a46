"""What all widgets have in common: code that they share, and what stands in for them where there is no JavaScript."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of the algorithms in order of `texts.NAMES`, as in the widgets' style sheets; a reader's own are black.
LINES = ["#0072b2", "#d55e00", "#009e73", "#6b7280", "#b0558a", "#b97a00", "#3a9bd4", "#857a00"]
DASHES: list[Any] = [
    "-",
    (0, (5, 2)),
    (0, (1.2, 1.6)),
    (0, (6, 2, 1.2, 2)),
    (0, (3, 1.5, 1, 1.5, 1, 1.5)),
    (0, (3, 2)),
    ":",
    (0, (9, 3)),
]


class Still(anywidget.AnyWidget):
    """A widget that says what it shows: `repr(self)` in words, `self._still()` as a PNG."""

    def _still(self) -> bytes:
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and what stands in for it in a printed page or a viewer of notebooks."""
        bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        bundle["text/plain"] = repr(self)
        bundle["image/png"] = base64.b64encode(self._still()).decode()
        return bundle, metadata


def source(name: str) -> str:
    """The JavaScript or the style sheet of a widget in one text: what all widgets share (common.js, common.css), then its own."""
    own = Path(__file__).with_name(name)
    return own.with_stem("common").read_text("utf-8") + own.read_text("utf-8")


def figure(width: float, height: float) -> Figure:
    """On white, in inches."""
    from matplotlib.figure import Figure  # not pyplot: nothing is shown, and no backend is chosen

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def png(picture: Figure, dpi: int = 110) -> bytes:
    """The figure as PNG, the same bytes each time."""
    out = io.BytesIO()
    picture.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def line(style: int) -> dict[str, Any]:
    """matplotlib's words for the line of an algorithm."""
    return {"color": "black", "linestyle": "-"} if style >= len(LINES) else {"color": LINES[style], "linestyle": DASHES[style]}
