"""Which tests are slow, and are left to `make test-all`: those that slow.txt lists, and those that a file marks itself.

`make slow` renews the list, best on a machine that does nothing else: it runs all of them, and keeps the names of those that
take more than two seconds.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 2.0


class Slow:
    """What pytest asks and tells on the way; with xdist, in each worker and in the controller, who hears the workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left = 0  # tests that were not asked for
        self.taken: Counter[str] = Counter()  # seconds by test

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = set(LIST.read_text().splitlines()) if LIST.exists() else set()
        for item in items:
            if item.nodeid in slow:
                item.add_marker("slow")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.taken[report.nodeid] += report.duration

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """A worker tells the controller how many it has left."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left"] = self.left
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Each worker has collected all tests, and left the same ones."""
        self.left = getattr(node, "workeroutput", {}).get("left", self.left)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.option.markexpr == "not slow":
            terminalreporter.write_line(f"{self.left:,} tests that take longer are left to: make test-all")
        if "D2LPS_RENEW_SLOW" in os.environ:
            slow = sorted(name for name, seconds in self.taken.items() if seconds > SECONDS)
            LIST.write_text("".join(f"{name}\n" for name in slow))
            terminalreporter.write_line(f"{len(slow):,} of {len(self.taken):,} tests are in {LIST.name} now")
