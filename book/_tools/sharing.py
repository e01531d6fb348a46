"""What a page says of itself to those who link to it: a description, a picture, and, where its address is known, a sitemap.

The address is `html_baseurl` of _config.yml. Where that is empty, a book on GitHub has its pages at
https://<owner>.github.io/<repository>/. Without an address there is no sitemap, and no link to a picture: both need one.
"""

import html
import re
from pathlib import Path
from typing import Any

from chapters import PICTURE, chapters
from docutils import nodes
from repository_links import origin, web_address
from sphinx.application import Sphinx
from sphinx.config import Config

MOST = 180  # letters of a description

NOT_FOUND = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<link rel="icon" href="data:,">
<title>No such page · {title}</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ max-width: 32rem; margin: 18vh auto 0; padding: 0 1.5rem; font: 1.1rem/1.5 Charter, Cambria, Georgia, serif; }}
  svg {{ width: 4.5rem; height: 4.5rem; }}
  h1 {{ font: 650 1.8rem/1.2 system-ui, sans-serif; }}
</style>
</head>
<body>
<main>
{mark}
<h1>No such page</h1>
<p>A message to an address that nobody has: it was sent, and nothing received it. <a href="{home}">Begin again at the book's
first page</a>, from which every chapter is one step away.</p>
</main>
</body>
</html>
"""


def pages_address(repository: str) -> str:
    """Where GitHub serves the site of a repository, or "" where it is not GitHub's.

    >>> pages_address("https://github.com/Ada/d2lps")
    'https://ada.github.io/d2lps/'
    >>> pages_address("https://gitlab.com/ada/d2lps")
    ''
    """
    match = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)", repository)
    return f"https://{match[1].lower()}.github.io/{match[2]}/" if match else ""


def configure(app: Sphinx, config: Config) -> None:
    """Find out the site's address, which a fork need not write down."""
    config.html_baseurl = config.html_baseurl or pages_address(web_address(origin(str(app.confdir or app.srcdir))))


def first_words(doctree: nodes.document | None) -> str:
    """The first sentences of a page, as many as fit into a description."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree else ()
    text = " ".join(" ".join(paragraph.astext() for paragraph in paragraphs).split())
    if len(text) <= MOST:
        return text
    cut = text[:MOST]
    whole = cut.rpartition(". ")[0]
    return f"{whole}." if whole else f"{cut.rpartition(' ')[0]} …"


def tags(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Put description and OpenGraph's tags into the head of a page."""
    known = {chapter.page: chapter for chapter in chapters(Path(app.srcdir))}
    title = re.sub("<[^>]+>", "", context.get("title", "")) or app.config.html_title
    teaser = known[page].teaser if page in known else ""
    picture = f"_images/chapter-{known[page].number}.png" if page in known and known[page].picture else PICTURE
    said = {"og:title": html.unescape(title), "og:site_name": app.config.html_title}
    said["og:type"] = "article" if doctree else "website"
    said["og:description"] = teaser or first_words(doctree) or app.config.html_title
    if address := app.config.html_baseurl:
        said |= {"og:url": f"{address}{page}.html", "og:image": f"{address}{picture}"}
    lines = [f'<meta property="{name}" content="{html.escape(value)}">' for name, value in said.items()]
    lines.append(f'<meta name="description" content="{html.escape(said["og:description"])}">')
    lines.append('<meta name="twitter:card" content="summary_large_image">')
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def sitemap(address: str, pages: list[str]) -> str:
    """A sitemap in XML.

    >>> print(sitemap("https://ada.github.io/d2lps/", ["index"]).splitlines()[2])
    <url><loc>https://ada.github.io/d2lps/index.html</loc></url>
    """
    lines = [f"<url><loc>{html.escape(address)}{page}.html</loc></url>" for page in pages]
    head = '<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
    return "\n".join([head, *lines, "</urlset>", ""])


def finish(app: Sphinx, error: Exception | None) -> None:
    """Write the page for addresses that lead nowhere, which stands alone since it is served anywhere, and the sitemap."""
    if error or app.builder.format != "html":
        return
    top, address = Path(app.outdir), app.config.html_baseurl
    mark = (Path(app.srcdir) / app.config.html_logo).read_text("utf-8")
    home = re.sub("^https?://[^/]+", "", address) or "/"
    mark = mark.replace("<svg", '<svg aria-hidden="true"', 1)
    page = NOT_FOUND.format(title=html.escape(app.config.html_title), mark=mark, home=home)
    (top / "404.html").write_text(page, "utf-8")
    if address:
        (top / "sitemap.xml").write_text(sitemap(address, sorted(app.env.found_docs)), "utf-8")
        (top / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {address}sitemap.xml\n", "utf-8")
