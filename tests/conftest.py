"""Fixtures that several test files share, how often a test runs, and which files come first."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from photographs import CHROMIUM, chromium
from slow import Slow

collect_ignore = ["conftest.py"]  # by who looks for examples in docstrings: the book's has the same name

settings.register_profile("busy", deadline=None)  # no test fails because the machine is busy
settings.load_profile("busy")

# Files that take longest, by the clock, the longest first. Whoever begins one of them last keeps the others waiting at the end.
LONGEST = [
    "bench", "watch_engines", "sharedmemory", "resume", "run", "compress", "failures", "wheel", "kvstore_elastic", "backend",
    "simulated_times", "kvstore_joined", "kvstore_failures", "collectives", "kvstore_run", "train", "simulator", "overlap",
    "readme", "handout", "kvstore_server", "kvstore_trace", "backend_programs", "torchrun", "hosts",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Slow(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, with `--no-loadscope-reorder`: xdist itself begins with the file of the most tests."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """A million objects are tests by now, and stay: whoever looks for garbage need not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch: threads that wait for one another on a busy machine take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Gone at the end of a file: Playwright drives no second one in a process, and other tests look for what is left."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    pytest.importorskip("playwright.sync_api")
    with chromium() as browser:
        yield browser


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.soak(50)`: under D2LPS_SOAK=1 the test runs so many times over."""
    often = metafunc.definition.get_closest_marker("soak")
    if often and os.environ.get("D2LPS_SOAK"):
        metafunc.fixturenames.append("again")
        metafunc.parametrize("again", range(*often.args))
