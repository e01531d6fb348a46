"""Slides that are made from a page: what they keep of it, and how they look in a browser."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slides import deck

SITE = Path(os.environ.get("D2LPS_SITE", "no site"))
CHAPTER = "book/one_machine/ring_synchronization"
CODE = '<div class="cell"><div class="cell_input"><pre>{}</pre></div><div class="cell_output"><pre>a sum</pre></div></div>'
PAGE = """<html><head><title>Rings</title><link rel="stylesheet" href="a.css"><script src="../../_static/d2lps/w.js"></script>
<script src="other.js"></script></head><body><nav><section><h2>Not this</h2></section></nav><article><section><h1>Rings</h1>
<p>You need nothing.</p><section><h2>Why</h2><p>Who waits? Nobody. Is p &lt; 2? It is <em>so. Or</em> not.
And who <b>sends</b>?</p>
{short}{long}
<div class="cell"><details><div class="cell_input">hidden</div></details><div class="cell_output"><img src="p.png"></div></div>
</section><section id="exercises"><h2>Exercises</h2><div class="exercise"><p class="admonition-title">Exercise 1 (Turn it)</p>
<p>Long.</p></div><div class="solution">A secret.</div></section></section></article></body></html>"""


def test_a_page_becomes_slides_without_solutions() -> None:
    text = deck(PAGE.format(short=CODE.format("add()"), long=CODE.format("line\n" * 20)))
    slides = text.split('<section class="slide"')[1:]
    assert "<p>Who waits? Is p &lt; 2? And who <b>sends</b>?</p>" in slides[0] and "Nobody." in slides[0].partition("<aside>")[2]
    assert "add()" in slides[0] and "a sum" in slides[0]  # short code stands beside what it prints, long code does not
    assert slides[1].count("line") == 20 and "a sum" not in slides[1] and "a sum" in slides[2]
    assert "p.png" in slides[3] and "hidden" not in text and "Not this" not in text and "You need" not in text
    assert "Exercise 1 (Turn it)" in slides[4] and "secret" not in text and len(slides) == 5
    assert 'href="a.css"' in text and "d2lps/w.js" in text and "other.js" not in text


@pytest.fixture(scope="module")
def shown(browser: Any) -> Iterator[Any]:
    """The slides of one chapter, opened where its page is."""
    if not (page := SITE / f"{CHAPTER}.html").exists():
        pytest.skip("D2LPS_SITE does not name a built site")
    (path := page.with_name(f"tested-{os.getpid()}.slides.html")).write_text(deck(page.read_text("utf-8")), "utf-8")
    tab, faults = browser.new_page(viewport={"width": 1280, "height": 720}), []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("requestfailed", lambda request: faults.append(request.url))
    tab.goto(path.resolve().as_uri())
    yield tab
    tab.close()
    path.unlink()
    assert faults == []


def test_players_play_and_keys_turn_the_slides(shown: Any) -> None:
    shown.locator(".slide .d2lps svg").first.wait_for()
    number = "document.elementFromPoint(20, 300).closest('.slide').id"
    for key, expected in (("ArrowRight", "slide-2"), (" ", "slide-3"), ("ArrowLeft", "slide-2")):
        shown.keyboard.press(key)
        shown.wait_for_function(f"{number} === '{expected}'")
    assert not shown.locator("aside").first.is_visible()
    shown.keyboard.press("n")
    assert shown.locator("aside").first.is_visible()


def test_slides_fit_the_screen(shown: Any) -> None:
    sizes = shown.evaluate("""() => {
        document.body.classList.remove("notes");
        return [...document.querySelectorAll(".slide")].map(slide => [slide.scrollWidth, slide.offsetHeight]);
    }""")
    assert len(sizes) > 20 and max(width for width, _ in sizes) <= 1280
    assert sum(height > 720 for _, height in sizes) <= len(sizes) // 20  # a large player may need scrolling
