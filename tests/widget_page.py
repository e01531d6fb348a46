"""A widget alone on a page in headless Chromium, with a model that only holds its state: no notebook and no kernel."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from photographs import CHROMIUM, EMPTY, RENDER

from d2lps.widgets.still import Still

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@contextmanager
def shown(browser: Any, widget: Still, width: int = 760, **options: Any) -> Iterator[Any]:
    """The page with the widget; at the end the widget leaves it without a trace, and nothing must have gone wrong."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.set_content(EMPTY)
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


def there_and_back(page: Any, steps: int) -> set[str]:
    """The pictures of so many steps from the first on, which are the same on the way back."""
    page.locator('[data-action="first"]').click()
    ways = []
    for action in ("next", "previous"):
        ways.append([picture(page)])
        for _ in range(steps):
            page.locator(f'[data-action="{action}"]').click()
            ways[-1].append(picture(page))
    assert ways[0] == ways[1][::-1]
    return set(ways[0])


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
