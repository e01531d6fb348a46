"""What the site knows of a chapter: its number, title, minutes, needs, teaser, and a picture from its stored outputs.

A chapter says so itself, in its notebook's metadata:

    "d2lps": {"minutes": 75, "needs": "two cores", "teaser": "One sentence.", "picture": "fig-ring-used"}

The picture is named as the figure is (`mystnb`, `figure`, `name`); without a name it is the first that the chapter shows,
which may be a player's still picture.
"""

import base64
import functools
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageOps

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
WIDTH = 480  # of a picture on a card, in pixels: twice what it takes on the page
WIDEST = 3  # times as wide as high
HIGHEST = 0.7  # as high as wide, of several panels; one may be a square
PICTURE, CARD = "_images/landing.png", (1200, 630)  # where links to the book are shown with a picture, and its size in pixels
GAP = 0.015  # of the width, between panels


@dataclass(frozen=True)
class Chapter:
    """One chapter; `minutes` is 0, `needs` and `teaser` are empty and `picture` is None where the notebook does not say."""

    page: str
    part: str
    number: int
    title: str
    minutes: int
    needs: str
    teaser: str
    picture: bytes | None

    def facts(self) -> str:
        """Minutes and needs on one line.

        >>> Chapter("book/a", "A", 1, "B", 75, "two cores", "", None).facts()
        '75 minutes · two cores'
        """
        return " · ".join(filter(None, [f"{self.minutes} minutes" if self.minutes else "", self.needs]))


def notebook(root: Path, page: str) -> dict[str, Any]:
    """The notebook of a page."""
    return json.loads((root / f"{page}.ipynb").read_text("utf-8"))


def outputs(book: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each cell with one output of its, in order: the cell, and the output's forms by their kind."""
    return [(cell, output["data"]) for cell in book["cells"] for output in cell.get("outputs", []) if "data" in output]


def text(value: str | list[str]) -> str:
    """A notebook's text, which may be stored in lines."""
    return value if isinstance(value, str) else "".join(value)


def picture(book: dict[str, Any], name: str = "") -> bytes | None:
    """The stored picture of that name, or, without one, the first."""
    for cell, forms in outputs(book):
        called = cell["metadata"].get("mystnb", {}).get("figure", {}).get("name", "")
        if "image/png" in forms and name in ("", called):
            return base64.b64decode(text(forms["image/png"]))
    if name:
        raise ValueError(f"no cell with a picture is named {name!r}")
    return None


def panels(image: Image.Image) -> list[tuple[int, int]]:
    """Where a figure's panels begin and end, from the top: between them is nothing but white."""
    inked = np.flatnonzero(np.asarray(image.convert("L")).min(axis=1) < 250)
    parts = np.split(inked, np.flatnonzero(np.diff(inked) > GAP * image.width) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if part.size] or [(0, image.height)]


def small(png: bytes, width: int = WIDTH) -> bytes:
    """A picture made smaller for a card, in few colors, without margins: its first panel, and those that fit in below it."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.width > WIDEST * image.height:  # the middle
        margin = image.width // 2 - image.height
        image = image.crop((margin, 0, image.width - margin, image.height))
    highest = max(end - start for start, end in panels(image))
    found = [panel for panel in panels(image) if panel[1] - panel[0] > highest / 2]  # the others are titles
    (top, bottom), most = found[0], int(HIGHEST * image.width)
    bottom = max([end for _, end in found if end <= top + most], default=min(bottom, top + image.width))
    image = image.crop((0, top, image.width, bottom))
    image = image.crop(ImageOps.invert(image).getbbox())
    image.thumbnail((width, width), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.quantize(64).save(out, format="png", optimize=True)
    return out.getvalue()


def on_a_card(png: bytes) -> bytes:
    """A picture on white, of the size in which others show a link to the book."""
    image, card = Image.open(io.BytesIO(png)).convert("RGB"), Image.new("RGB", CARD, "white")
    image = ImageOps.contain(image, (CARD[0] - 80, CARD[1] - 60), Image.Resampling.LANCZOS)
    card.paste(image, ((CARD[0] - image.width) // 2, (CARD[1] - image.height) // 2))
    out = io.BytesIO()
    card.save(out, format="png", optimize=True)
    return out.getvalue()


def title(book: dict[str, Any]) -> str:
    """The first heading."""
    return re.findall(r"^# (.*)$", "\n".join(text(cell["source"]) for cell in book["cells"]), flags=re.MULTILINE)[0].strip()


@functools.cache
def chapters(root: Path) -> tuple[Chapter, ...]:
    """The chapters of the numbered parts, in order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text("utf-8"))
    pages = [(part["caption"], chapter["file"]) for part in toc["parts"] if part.get("numbered") for chapter in part["chapters"]]
    return tuple(chapter(root, page, part, number) for number, (part, page) in enumerate(pages, 1))


def chapter(root: Path, page: str, part: str, number: int) -> Chapter:
    """What one notebook says of itself."""
    book = notebook(root, page)
    said = book["metadata"].get("d2lps", {})
    words = {name: said.get(name, default) for name, default in (("minutes", 0), ("needs", ""), ("teaser", ""))}
    try:
        found = picture(book, said.get("picture", ""))
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from error
    return Chapter(page, part, number, title(book), picture=small(found) if found else None, **words)
