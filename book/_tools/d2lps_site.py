"""The book's Sphinx extension: theme options that depend on where the book is built, and the mechanisms of the site."""

import calls
import formulas
import landing
import lean_widgets
import own_assets
import repository_links
import sharing
import still_pictures
import written_pages
from sphinx.application import Sphinx
from sphinx.config import Config


def theme(app: Sphinx, config: Config) -> None:
    """Show the mark beside the name; remove the theme's second search box, the one in the bar above the page."""
    config.html_theme_options["navbar_persistent"] = []
    config.html_theme_options["logo"] = {"text": config.html_title, "alt_text": ""}
    config.html_logo = "book/_static/mark.svg"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect everything late (800), when Jupyter Book and the theme have set their own defaults."""
    app.connect("config-inited", theme, priority=800)
    app.connect("config-inited", repository_links.configure, priority=800)
    app.connect("config-inited", own_assets.configure, priority=800)
    app.connect("config-inited", sharing.configure, priority=800)
    app.connect("config-inited", formulas.configure, priority=800)
    app.connect("builder-inited", own_assets.copy, priority=800)
    app.connect("doctree-read", lean_widgets.lighten)
    app.connect("doctree-read", landing.head)
    app.connect("html-page-context", sharing.tags, priority=800)
    app.connect("build-finished", sharing.finish)
    app.connect("build-finished", written_pages.finish, priority=900)
    formulas.setup(app)
    app.add_directive("calls", calls.Calls)
    app.add_directive("chapters", landing.Chapters)
    app.add_directive("playing", landing.Playing)
    app.add_post_transform(still_pictures.StillPictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
