"""The landing page's player and cards, and the head of each chapter: all of it from what the notebooks store."""

import base64
import html
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import lean_widgets
from chapters import PICTURE, STATE, VIEW, Chapter, chapters, notebook, on_a_card, outputs, text
from docutils import nodes
from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = "_images"


def up(page: str) -> str:
    """The way from a page to the top of the site.

    >>> up("book/back/notation")
    '../../'
    """
    return "../" * page.count("/")


def raw(markup: str) -> nodes.raw:
    return nodes.raw(text=markup, format="html")


def image(app: Sphinx, chapter: Chapter, page: str) -> str:
    """The markup of a chapter's picture; the picture goes among the site's files."""
    if chapter.picture is None:
        return ""
    name = f"{FOLDER}/chapter-{chapter.number}.png"
    path = Path(app.outdir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(chapter.picture)
    return f'<img src="{up(page)}{name}" alt="A picture from the chapter {html.escape(chapter.title)}.">'


class Chapters(SphinxDirective):
    """A card for each chapter, under the name of its part."""

    def run(self) -> list[nodes.Node]:
        app, markup = self.env.app, ""
        for part, members in groupby(chapters(Path(app.srcdir)), lambda chapter: chapter.part):
            cards = "".join(self.card(app, chapter) for chapter in members)
            markup += f'<p class="d2lps-part">{html.escape(part)}</p>\n<ul class="d2lps-chapters">\n{cards}</ul>\n'
        return [raw(markup)]

    def card(self, app: Sphinx, chapter: Chapter) -> str:
        self.env.note_dependency(str(Path(app.srcdir) / f"{chapter.page}.ipynb"))
        address = f"{up(self.env.docname)}{chapter.page}.html"
        return (
            f'<li><div class="picture">{image(app, chapter, self.env.docname)}</div><div class="words">'
            f'<div class="name"><a href="{address}">{chapter.number}. {html.escape(chapter.title)}</a></div>'
            f'<p class="teaser">{html.escape(chapter.teaser)}</p>'
            f'<div class="d2lps-needs">{html.escape(chapter.facts())}</div></div></li>\n'
        )


class Playing(SphinxDirective):
    """The first player of a chapter, playing by itself; below it what the directive says, and where it is from."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        app, page = self.env.app, self.arguments[0]
        book = notebook(Path(app.srcdir), page)
        self.env.note_dependency(str(Path(app.srcdir) / f"{page}.ipynb"))
        model, forms = first_player(book)
        state = book["metadata"]["widgets"][STATE]["state"][model]
        for name, (address, attributes) in lean_widgets.scripts(app, {model: state}).items():
            NbMetadataCollector.add_js_file(self.env, self.env.docname, name, address, attributes)
        words = nodes.paragraph()
        self.state.nested_parse(self.content, self.content_offset, words)
        view = f'<script type="{VIEW}">{json.dumps({"model_id": model})}</script>'
        picture = base64.b64decode(text(forms["image/png"]))
        path = Path(app.outdir) / PICTURE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(on_a_card(picture))
        still = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        alt = html.escape(f"Still picture. {text(forms['text/plain']).strip()}.")
        before = f'<div class="d2lps-playing" data-d2lps-plays>{view}<noscript><img src="{still}" alt="{alt}"></noscript>'
        return [raw(before), *words.children, raw("</div>")]


def first_player(book: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The id of the first player that a notebook shows, and the forms in which it is stored."""
    models = book["metadata"]["widgets"][STATE]["state"]
    for _, forms in outputs(book):
        model = forms.get(VIEW, {}).get("model_id", "")
        if str(models.get(model, {}).get("state", {}).get("_anywidget_id", "")).endswith(".Player"):
            return model, forms
    raise ValueError("the notebook shows no player")


def head(app: Sphinx, doctree: nodes.document) -> None:
    """Put a chapter's picture, teaser, minutes and needs below its title."""
    page = app.env.docname
    for chapter in chapters(Path(app.srcdir)):
        if chapter.page == page and (chapter.facts() or chapter.teaser):
            teaser = f'<p class="teaser">{html.escape(chapter.teaser)}</p>' if chapter.teaser else ""
            facts = f'<p class="d2lps-needs">{html.escape(chapter.facts())}</p>'
            markup = f'<div class="d2lps-head">{image(app, chapter, page)}<div>{teaser}{facts}</div></div>'
            section = next(doctree.findall(nodes.section))
            section.insert(1, raw(markup))
