"""The book's own widgets on a page: their traits, their code once for all pages, and a small script that starts them.

A notebook stores all code with each widget, and ipywidgets' script for pages without a kernel weighs 3.6 MB. Where a page has
no widgets but ours, it gets `widgets.js` instead, and the widgets' code from files named after their content. A page with
other widgets keeps ipywidgets' script.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from myst_nb.core.render import sanitize_script_content
from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.application import Sphinx

STATE = "application/vnd.jupyter.widget-state+json"
FOLDER = "d2lps"
OURS = "d2lps.widgets."

Files = dict[str, tuple[str | None, dict[str, str]]]  # by a name: a script's address, or None and its attributes


def is_ours(model: dict[str, Any]) -> bool:
    """Whether the book's own loader can start a widget.

    >>> is_ours({"state": {"_anywidget_id": "d2lps.widgets.player.Player"}}), is_ours({"state": {"value": 3}})
    (True, False)
    """
    return str(model["state"].get("_anywidget_id", "")).startswith(OURS) and not model.get("buffers")


def name_of(code: dict[str, str]) -> str:
    """A name for a widget's code, made from it: equal code is one file."""
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:12]


def write_code(app: Sphinx, code: dict[str, str]) -> str:
    """Put a widget's code among the site's files, and return its name."""
    name = name_of(code)
    path = Path(app.outdir) / "_static" / FOLDER / f"{name}.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"(window.d2lpsCode ??= {{}})[{json.dumps(name)}] = {json.dumps(code)};\n")
    return name


def scripts(app: Sphinx, models: dict[str, dict[str, Any]]) -> Files:
    """What a page must load to show these widgets of ours."""
    held, files = {}, Files()
    for key, model in models.items():
        traits = {name: value for name, value in model["state"].items() if not name.startswith("_") and name != "layout"}
        code = write_code(app, {"esm": model["state"]["_esm"], "css": model["state"].get("_css", "")})
        held[key] = {"code": code, "traits": traits}
        files[code] = (f"{FOLDER}/{code}.js", {})
    files["d2lps_state"] = (None, {"type": STATE, "body": sanitize_script_content(json.dumps(held))})
    return files | {"d2lps_widgets": (f"{FOLDER}/widgets.js", {})}


def lighten(app: Sphinx, doctree: object) -> None:
    """Give the page just read our loader, if all its widgets are ours."""
    files: Files = NbMetadataCollector.get_js_files(app.env, app.env.docname)
    if "ipywidgets_state" not in files:
        return
    models = json.loads(files["ipywidgets_state"][1]["body"])["state"]
    ours = {key: model for key, model in models.items() if is_ours(model)}
    rest = [model for key, model in models.items() if key not in ours and model["model_name"] != "LayoutModel"]
    if ours and not rest:
        for key in [key for key in files if key.startswith("ipywidgets_")]:
            del files[key]
        files.update(scripts(app, ours))
