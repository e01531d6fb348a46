"""The book's Sphinx extension: theme options that depend on where the book is built, and three mechanisms of the site."""

import own_assets
import repository_links
import still_pictures
from sphinx.application import Sphinx
from sphinx.config import Config


def one_search_box(app: Sphinx, config: Config) -> None:
    """Remove the theme's second search box, the one in the bar above the page."""
    config.html_theme_options["navbar_persistent"] = []


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect everything late (800), when Jupyter Book and the theme have set their own defaults."""
    app.connect("config-inited", one_search_box, priority=800)
    app.connect("config-inited", repository_links.configure, priority=800)
    app.connect("config-inited", own_assets.configure, priority=800)
    app.connect("builder-inited", own_assets.copy, priority=800)
    app.add_post_transform(still_pictures.StillPictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
