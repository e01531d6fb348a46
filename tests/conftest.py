"""Fixtures that several test files share, and how often a test runs."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from widget_page import chromium

settings.register_profile("busy", deadline=None)  # no test fails because the machine is busy
settings.load_profile("busy")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Gone at the end of a file: Playwright drives no second one in a process, and other tests look for what is left."""
    with chromium() as browser:
        yield browser


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.soak(50)`: under D2LPS_SOAK=1 the test runs so many times over."""
    often = metafunc.definition.get_closest_marker("soak")
    if often and os.environ.get("D2LPS_SOAK"):
        metafunc.fixturenames.append("again")
        metafunc.parametrize("again", range(*often.args))
