"""Photographs of a stored notebook's widgets: what stands in for them on GitHub, on paper and on a page without scripts.

Only players and lanes are drawn by Python, too. Each other widget is drawn once, by its own script, in Chromium, at the moment in
which its notebook is stored: as it opens, on white, as on paper, where a bet shows what it hides. A widget that is stored as it
was before keeps its picture, and then no browser is needed.
"""

import base64
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbformat import NotebookNode
from normalize import VIEW, models
from PIL import Image
from PIL.PngImagePlugin import PngInfo

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH, SHARP = 760, 2  # of the page, in its pixels, and a photograph's for each of them
COLORS = 128  # of a photograph

# Shows a widget alone on a page, with a model that only holds its state: no notebook and no kernel.
RENDER = """async ({ esm, css, state }) => {
  const style = document.createElement("style"), hooks = {};
  style.textContent = css;
  document.head.append(style);
  const model = {
    get: (name) => state[name],
    set: (name, value) => {
      if (state[name] === value) return;
      state[name] = value;
      hooks["change:" + name]?.forEach((hook) => hook());
    },
    on: (name, hook) => (hooks[name] ??= new Set()).add(hook),
    off: (name, hook) => hooks[name].delete(hook),
    save_changes() {},
  };
  const module = await import(URL.createObjectURL(new Blob([esm], { type: "text/javascript" })));
  Object.assign(window, { model, destroy: module.default.render({ model, el: document.body }) });
}"""
EMPTY = '<!DOCTYPE html><html data-theme="light"><head></head><body></body></html>'


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that reaches nothing but this machine. RuntimeError where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if CHROMIUM is None or sync_playwright is None:
        missing = "no Chromium" if CHROMIUM is None else "no playwright"
        raise RuntimeError(f"{missing} is installed: this notebook can't be stored, for a widget in it must be photographed")
    options = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


def photograph(notebook: NotebookNode, before: NotebookNode) -> None:
    """Give each output of a widget that has no picture its photograph, in place. before: the notebook as it was stored.

    RuntimeError where one is wanted that `before` has not, and no browser is there.
    """
    stored = [output.data["image/png"] for output in shown(before) if "image/png" in output.data]
    known = {subject(picture): picture for picture in stored}
    new = []
    for output in shown(notebook):
        state = models(notebook)[output.data[VIEW]["model_id"]].state
        if "image/png" not in output.data and digest(state) in known:
            output.data["image/png"] = known[digest(state)]
        elif "image/png" not in output.data:
            new.append((output, state))
    if new:
        with chromium() as browser:
            for output, state in new:
                output.data["image/png"] = taken(browser, state)


def shown(notebook: NotebookNode) -> list[NotebookNode]:
    """The outputs that show a widget of ours."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if VIEW in output.get("data", {})]
    return [output for output in outputs if kinds(models(notebook)[output.data[VIEW]["model_id"]].state)]


def kinds(state: dict[str, Any]) -> set[str]:
    """What a widget of ours is, and what it holds: `{"bet", "player"}`; of another's widget nothing."""
    own = str(state.get("_anywidget_id", "")).rpartition("d2lps.widgets.")[2]
    return {own.split(".")[0], *re.findall(r"^KINDS\.(\w+) = ", state["_esm"], re.MULTILINE)} if own else set()


def digest(state: dict[str, Any]) -> str:
    """Equal for widgets that look alike."""
    text = json.dumps({name: value for name, value in state.items() if name != "layout"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def subject(picture: str) -> str:
    """The digest of the state that a stored picture is a photograph of; "" if it is none."""
    return str(Image.open(io.BytesIO(base64.b64decode(picture))).info.get("of", ""))


def taken(browser: Any, state: dict[str, Any]) -> str:
    """A widget of this state as PNG in few colors, which says in itself what it is of."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SHARP)
    page.emulate_media(media="print", reduced_motion="reduce")
    page.set_content(EMPTY)
    page.evaluate(RENDER, {"esm": state["_esm"], "css": state["_css"], "state": state})
    page.wait_for_function("!document.querySelector('[aria-busy]')")
    data = page.locator(".d2lps").first.screenshot()
    page.close()
    image, out, said = Image.open(io.BytesIO(data)).convert("RGB").quantize(COLORS), io.BytesIO(), PngInfo()
    said.add_text("of", digest(state))
    image.save(out, format="png", optimize=True, pnginfo=said)
    return base64.b64encode(out.getvalue()).decode()
