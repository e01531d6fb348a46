"""The source of a traced function beside its picture, and which of its lines posted each message."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from d2lps.trace import Trace


class Code:
    """{"name", "lines"} as a player shows it; ValueError if the trace has no lines, or none of them is in the function.

    A message that a function of the reader's posts for this one is not lit: the line is that of the innermost.
    """

    def __init__(self, trace: Trace, function: Callable[..., Any]) -> None:
        if not trace.lines:
            raise ValueError("code= needs a trace with lines: run or simulate with trace='lines'")
        function = inspect.unwrap(function)
        source, self.first = inspect.getsourcelines(function)
        self.trace, file, count = trace, function.__code__.co_filename, len(source)
        self.number = [line - self.first if name == file and 0 <= line - self.first < count else -1 for name, line in trace.lines]
        if max(self.number) < 0:
            raise ValueError(f"code={function.__name__}: no message was posted at a line of it")
        self.panel = {"name": function.__name__, "lines": textwrap.dedent("".join(source)).rstrip().split("\n")}

    def lines(self, bundle: list[int]) -> dict[str, list[int]]:
        """Where a bundle of messages was posted, at each end: `{"src_lines": [3], "dst_lines": [5]}`, counted from 0."""
        m = self.trace.messages
        found = {side: {self.number[line] for line in m[f"{side}_line"][bundle].tolist()} - {-1} for side in ("src", "dst")}
        return {f"{side}_lines": sorted(lines) for side, lines in found.items()}
