"""Arranged schedules, and the timetable that a reader chooses: against the published ones, and in a browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from widget_page import picture, shown, until

from d2lps.parallel.pipeline.arrange import arranged, assignment
from d2lps.parallel.pipeline.schedules import gpipe, one_f_one_b, replay, zero_bubble
from d2lps.widgets import Timetable, schedule_explorer


@given(st.integers(1, 6), st.integers(1, 8))
def test_in_a_line_what_is_most_urgent_is_the_published_schedule(p: int, m: int) -> None:
    line = assignment(p, "linear")
    assert arranged(line, m, "gpipe") == gpipe(p, m)
    assert arranged(line, m) == one_f_one_b(p, m)


def test_the_bubbles_of_torchs_own_tables() -> None:
    """LoopedBFS, InterleavedZeroBubble and ZBV with 4 ranks and 8 micro-batches, as their tables replay."""
    for way, order, bubble in (("looped", "gpipe", 0.1875), ("looped", "zero_bubble", 0.0625), ("V", "zero_bubble", 0.0625)):
        assert replay(arranged(assignment(4, way), 8, order), 0.5, 1).bubble == pytest.approx(bubble)
    assert replay(arranged(assignment(4, "V"), 8, "zero_bubble"), 0.5, 1).peak == (8,) * 4  # halves: as much as 1F1B's first


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(["linear", "looped", "V"]),
    st.sampled_from(["one_f_one_b", "zero_bubble"]),
)
def test_whatever_is_arranged_ends_and_no_rank_holds_more_than_it_may(p: int, m: int, way: str, order: str) -> None:
    done, v = replay(arranged(assignment(p, way), m, order)), 1 if way == "linear" else 2
    assert max(done.peak) <= (2 * (p - 1) + p + 1 if way == "looped" else v * p)


@pytest.mark.parametrize(("arguments", "told"), [((2, "Z"), "way='Z' is unknown"), ((0, "V"), "ranks=0")])
def test_unknown_ways(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        assignment(*arguments)


def test_it_says_and_draws_what_the_replay_found() -> None:
    table = Timetable(zero_bubble(2, 2), title="Two ranks")
    assert repr(table) == "Timetable: Two ranks: 7 long, a bubble of 16.7 %; held: 2, 2"
    assert table.data["rows"][1]["bars"] == "F 0 0 1 2;B 0 0 2 3;F 0 1 3 4;B 0 1 4 5;W 0 0 5 6;W 0 1 6 7"
    assert len(json.dumps(table.data)) < 1500
    half = Timetable(arranged(assignment(2, "looped"), 2), forward=0.5, backward=1)
    assert [row["held"] for row in half.data["rows"]] == ["2", "1.5"]


def test_an_explorer_opens_with_the_order_that_is_asked_for() -> None:
    explorer = schedule_explorer(micro_batches=(8,), messages=(0,), order="zero_bubble")
    assert repr(explorer).endswith("27 long, a bubble of 12.5 %; held: 4, 4, 4, 4")


def test_a_reader_chooses_and_follows_a_micro_batch(browser: Any) -> None:
    explorer = schedule_explorer(ranks=3, micro_batches=(3, 6), messages=(0, 1))
    with shown(browser, explorer, width=390) as page:
        page.wait_for_selector(".block")
        said = page.locator(".said")
        assert said.inner_text() == "24 long, a bubble of 33.3 %; held: 3, 2, 1"
        first = picture(page)
        page.locator('[data-action="way"]').select_option("2")
        until(page, first)
        page.locator('[data-action="order"]').select_option("2")
        assert said.inner_text().endswith("held: 3, 3, 3")
        assert page.locator(".block:not(.other)").count() == 3 * 2 * 3 * 6
        page.locator('[data-number="3"]').first.click()
        assert page.locator(".block:not(.other)").count() == 3 * 2 * 3  # of one micro-batch
