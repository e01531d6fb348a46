"""Widgets that hold things: other widgets, figures, texts. One script draws them all, however many there are."""

import base64
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import PIL.Image
from matplotlib.figure import Figure

from d2lps.widgets.still import Still, figure, source

Thing = Still | Figure | str
_SHORTER = [  # what of a matplotlib SVG is not wanted in a page; its style would be the whole page's
    (r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", ""), (r'<g id="[^"]*"', "<g"),
    (r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>"),  # HTML knows the namespaces
    (r"#ffffff", "var(--page)"), (r"#000000", "currentColor"), (r"#0072b2", "light-dark(#0072b2, #4aa8e0)"),
    (r"#cfe3f3", "light-dark(#cfe3f3, #1d4562)"), (r"#fbe3b5", "light-dark(#fbe3b5, #5a4210)"),  # nodes of a topology
    (r"#dddddd", "light-dark(#dddddd, #3f464f)"),
    (r"\s*\n\s*", " "), (r"> <", "><"),
]  # fmt: skip
_COMMON, _WITHIN = ({kind: Path(__file__).with_name(f"{stem}.{kind}").read_text("utf-8") for kind in ("js", "css")}
                    for stem in ("common", "within"))  # fmt: skip


class Holder(Still):
    """A widget whose script, `own`.js, shows the things that it holds."""

    def __init__(self, own: str, things: Iterable[Thing], **state: Any) -> None:
        written = code(own, {_kind(thing): thing for thing in things if isinstance(thing, Still)})
        self._esm, self._css = written["_esm"], written["_css"]
        super().__init__(**state)


def code(own: str, held: Mapping[str, Still | type[Still]]) -> dict[str, str]:
    """The script and the style of a holder, whose own files are called so, of widgets of these kinds."""
    files = {kind: source(f"{own}.{kind}").removeprefix(_COMMON[kind]) for kind in ("js", "css")}
    scripts = (_inner(kind, str(thing._esm)) for kind, thing in held.items())
    styles = (str(thing._css).removeprefix(_COMMON["css"]) for thing in held.values())
    return {"_esm": "".join([_COMMON["js"], _WITHIN["js"], *scripts, files["js"]]),
            "_css": "".join([_COMMON["css"], *styles, _WITHIN["css"], files["css"]])}  # fmt: skip


def _kind(widget: Still) -> str:
    """`_kind(player) == "player"`: its module."""
    return str(widget._anywidget_id).split(".")[-2]


def _inner(kind: str, script: str) -> str:
    """A widget's script as one expression among others: names in it are its own."""
    body = script.removeprefix(_COMMON["js"]).replace("\nexport default ", "\nconst shown = ")
    return f"KINDS.{kind} = (() => {{\n{body}\nreturn shown;\n}})();\n"


def held(thing: Thing, alt: str = "") -> dict[str, Any]:
    """A thing as within.js takes it; alt: what a figure shows, in words. TypeError for what is no thing."""
    if isinstance(thing, Still):
        return {"kind": _kind(thing), "state": thing._state()}
    if isinstance(thing, str):
        return {"kind": "text", "text": thing}
    if not isinstance(thing, Figure):
        raise TypeError(f"{thing!r} is no widget of d2lps, no matplotlib Figure and no text")
    if not alt:
        raise ValueError("a figure needs alt=: a sentence that says what it shows to those who can't see it")
    return {"kind": "picture", "svg": svg(thing), "alt": alt}


def packed(things: Iterable[dict[str, Any]]) -> str:
    """Things as one text: scenes of one algorithm are much alike, and become a tenth as large."""
    return base64.b64encode(zlib.compress(json.dumps(list(things), separators=(",", ":")).encode(), 9)).decode()


def svg(drawn: Figure) -> str:
    """A figure as SVG within a page: its black and white are the page's, also in the dark; to a tenth of a point."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "d2lps"}):  # the same names each time
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    _forget(drawn)
    text = out.getvalue()[out.getvalue().index("<svg") :]
    for pattern, instead in _SHORTER:
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"-?\d+\.\d+", _rounded, path[0]), text)


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _forget(drawn: Figure) -> None:
    """Or a notebook would show it once more."""
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(drawn)


def png(thing: Thing) -> bytes | None:
    """A thing as it stands in a printed page, the same bytes each time; None of a widget that Python does not draw."""
    if isinstance(thing, Still):
        return thing._still()
    drawn = _written(thing) if isinstance(thing, str) else thing
    out = io.BytesIO()
    drawn.savefig(out, format="png", dpi=drawn.dpi, metadata={"Software": None})
    _forget(drawn)
    return out.getvalue()


def _written(text: str) -> Figure:
    drawn = figure(6.4, 0.3 + 0.2 * (1 + len(text) // 90))
    drawn.text(0.01, 0.5, text, wrap=True, va="center", fontsize=10)
    return drawn


def below(*pngs: bytes) -> bytes:
    """Pictures below each other, on white."""
    images = [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in pngs]
    whole = PIL.Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    whole.save(out := io.BytesIO(), format="png")
    return out.getvalue()
