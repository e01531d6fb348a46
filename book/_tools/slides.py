"""Make slides of the chapters, beside their pages in the built site: `make slides`, for some NOTEBOOKS=...

A section becomes slides: of each paragraph its first sentence and its questions, and the formulas, figures, players and outputs
as they are. The whole paragraphs are the speaker's notes (key n). The slides load the page's own styles and widgets, and nothing
from elsewhere.
"""

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString, Tag
from execute import ROOT, notebooks

HERE, SITE = Path(__file__).parent, ROOT / "_build" / "html"
POINTS, LINES = 4, 20  # sentences on a slide; lines of code and of what they print that stand on one slide
PAGE = """<!DOCTYPE html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{head}
</head>
<body class="bd-article">
{body}
</body>
</html>
"""
SHOWN = "script[type$='widget-view+json'], img"


class Slide:
    """One slide: its heading, at most POINTS sentences, at most one thing to look at, and what the speaker may say."""

    def __init__(self, heading: str) -> None:
        self.heading, self.points, self.shown, self.notes = heading, [], "", []

    def html(self, number: int) -> str:
        notes = f"<aside>{''.join(self.notes)}</aside>" if self.notes else ""
        inner = f"<h2>{self.heading}</h2>{''.join(self.points)}{self.shown}{notes}"
        return f'<section class="slide" id="slide-{number}">{inner}<footer>{number}</footer></section>'


def point(paragraph: Tag) -> str:
    """A paragraph's first sentence, and what it asks.

    >>> point(BeautifulSoup("<p>Add <code>a. b</code> up. Then rest. How long? Long.</p>", "html.parser").p)
    '<p>Add <code>a. b</code> up. How long?</p>'
    """
    sentences = [""]
    for child in paragraph.children:
        first, *others = re.split(r"(?<=[.?!])\s+", escape(child)) if isinstance(child, NavigableString) else [str(child)]
        sentences[-1] += first
        sentences += others
    return f"<p>{' '.join([sentences[0], *(each for each in sentences[1:] if each.endswith('?'))])}</p>"


def looks(cell: Tag) -> Iterator[str]:
    """What of a cell is worth a slide: its picture; or its code and what it prints, apart where they are long."""
    code = cell.select_one(":scope > .cell_input")  # hidden code lies deeper
    output = cell.select_one(":scope > .cell_output")
    if output and output.select_one(SHOWN):
        yield str(output)
    elif code and output and lines(code) + lines(output) <= LINES:
        yield f"{code}{output}"
    else:
        yield from map(str, filter(None, (code, output)))


def lines(block: Tag) -> int:
    """How many lines of text a block has."""
    return len(block.get_text().strip().splitlines())


def slides_of(section: Tag) -> list[Slide]:
    """The slides of one section, without those of the sections in it."""
    heading = section.find(["h1", "h2", "h3", "h4"], recursive=False)
    for mark in heading.select(".headerlink"):
        mark.extract()
    title = heading.decode_contents()
    found = [Slide(title)]
    for block in section.find_all(True, recursive=False):
        classes = block.get("class", [])
        if block is heading or block.name == "section" or block.text.startswith("You need"):
            continue
        if block.name == "p" or block.name in ("ul", "ol") or "math" in classes:
            if found[-1].shown or len(found[-1].points) >= POINTS:
                found.append(Slide(title))
            found[-1].points.append(point(block) if block.name == "p" else str(block))
            found[-1].notes += [str(block)] * (block.name == "p")
            continue
        for look in looks(block) if "cell" in classes else [str(block)]:
            tall = "<pre" in look and "<img" not in look and look.count("\n") > LINES
            if found[-1].shown or len(found[-1].points) > (not tall):
                found.append(Slide(title))
            found[-1].shown = look
    return [slide for slide in found if slide.points or slide.shown]


def exercises(section: Tag) -> Slide:
    """All exercises by their titles."""
    slide = Slide("Exercises")
    titles = [each.decode_contents() for each in section.select(".exercise > .admonition-title")]
    slide.points = ["<ol>", *(f"<li>{title}</li>" for title in titles), "</ol>"]
    return slide


def deck(page: str) -> str:
    """The slides of one page of the site."""
    soup = BeautifulSoup(page, "html.parser")
    found: list[Slide] = []
    for section in soup.select("article section:has(> h1, > h2, > h3, > h4)"):
        if section.get("id") == "exercises":
            found.append(exercises(section))
            break
        found += slides_of(section)
    styles = [str(link) for link in soup.select("head link[rel=stylesheet]")]
    scripts = [str(each) for each in soup.select("head script")
               if "_static/d2lps/" in each.get("src", "") or "widget-state" in each.get("type", "")]
    body = "\n".join(slide.html(number) for number, slide in enumerate(found, 1))
    own = f"<style>{(HERE / 'slides.css').read_text()}</style><script>{(HERE / 'slides.js').read_text()}</script>"
    return PAGE.format(title=soup.title.string, head="\n".join([*styles, *scripts, own]), body=body)


def main() -> None:
    for path in [Path(name).resolve() for name in sys.argv[1:]] or notebooks():
        page = (SITE / path.relative_to(ROOT)).with_suffix(".html")
        if not page.exists():
            sys.exit(f"{page} is not there yet. Build the site first: make book")
        slides = page.with_suffix(".slides.html")
        slides.write_text(text := deck(page.read_text("utf-8")), "utf-8")
        print(f"{text.count('<section class='):3} slides  {slides}")


if __name__ == "__main__":
    main()
