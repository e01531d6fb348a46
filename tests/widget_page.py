"""A widget alone on a page in headless Chromium, with a model that only holds its state: no notebook and no kernel."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from d2lps.widgets.still import Still

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

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


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that reaches nothing but this machine."""
    playwright = pytest.importorskip("playwright.sync_api")
    options = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@contextmanager
def shown(browser: Any, widget: Still, width: int = 760, **options: Any) -> Iterator[Any]:
    """The page with the widget; at the end the widget leaves it without a trace, and nothing must have gone wrong."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.set_content('<!DOCTYPE html><html data-theme="light"><head></head><body></body></html>')
    state = json.loads(json.dumps(widget._state()))
    page.evaluate(RENDER, {"esm": widget._esm, "css": widget._css, "state": state})
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("destroy()")
    assert page.locator("body > *").count() == 0
    assert faults == []
    page.close()


def picture(page: Any) -> str:
    """What the widget draws, as text."""
    return page.locator(".d2lps svg").first.evaluate("svg => svg.outerHTML")


def until(page: Any, picture: str, same: bool = False) -> None:
    """Wait until the widget's picture has become another, or this one again."""
    code = "([picture, same]) => (document.querySelector('.d2lps svg').outerHTML === picture) === same"
    page.wait_for_function(code, arg=[picture, same], timeout=30_000)


def middle(path: Any) -> tuple[float, float]:
    """Where a mouse meets a line, in pixels of the window, once it has been brought into sight."""
    path.evaluate("path => path.ownerSVGElement.scrollIntoView({ block: 'center' })")
    point = "path.getPointAtLength(path.getTotalLength() / 2).matrixTransform(path.getScreenCTM())"
    x, y = path.evaluate(f"path => {{ const {{ x, y }} = {point}; return [x, y] }}")
    return x, y
