"""Scripts and fonts served by the site itself: no page asks another server for anything.

They come from the node modules that `make` installs (package.json names them) and from anywidget's wheel, and are copied to
`_static/d2lps/` of the site. Pages whose widgets are all ours load widgets.js; the others load four scripts in this order:

    require.js  widget_settings.js  embed-amd.js  anywidget.js  @jupyter-widgets/...
"""

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError

HERE = Path(__file__).parent
NODE_MODULES = HERE.parents[1] / "_build" / "node" / "node_modules"
ANYWIDGET = Path(sys.prefix) / "share" / "jupyter" / "nbextensions" / "anywidget" / "index.js"
FOLDER = "d2lps"


def sources() -> dict[str, Path]:
    """What is copied, by its name under `_static/d2lps/`."""
    manager = NODE_MODULES / "@jupyter-widgets" / "html-manager" / "dist"
    fonts = sorted(manager.glob("*.woff2"))
    letters = "mathjax/output/chtml/fonts/woff-v2"
    return {
        "widgets.js": HERE / "widgets.js",
        "require.js": NODE_MODULES / "requirejs" / "require.js",
        "widget_settings.js": HERE / "widget_settings.js",
        "anywidget.js": ANYWIDGET,
        "embed-amd.js": manager / "embed-amd.js",
        # embed-amd.js holds two bundles, which look for their fonts in two places.
        **{f"@jupyter-widgets/{font.name}": font for font in fonts},
        **{f"@jupyter-widgets/html-manager/dist/{font.name}": font for font in fonts},
        letters: NODE_MODULES / letters.replace("mathjax", "mathjax/es5", 1),
    }


def configure(app: Sphinx, config: Config) -> None:
    """Point ipywidgets at our copies; the order of the three scripts matters."""
    names = ("require.js", "widget_settings.js", "embed-amd.js")
    config.nb_ipywidgets_js = {f"{FOLDER}/{name}": {} for name in names}


def copy(app: Sphinx) -> None:
    """Copy the files into the site, before any page is written."""
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static" / FOLDER
    for name, source in sources().items():
        if not source.exists():
            raise ExtensionError(f"{source} is missing: run `make book`, which installs it")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
