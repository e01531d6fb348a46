"""What the ranks print: kept apart while they run, shown by rank and in rank order, so that two runs look alike."""

import os
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, TextIO

_MOST = 1_000_000  # bytes of one rank's output that are shown; the beginning of a longer one is left out


class Output:
    """Two files without a name for each rank: what it writes to its standard output, and to its standard error."""

    def __init__(self, labels: Sequence[str], live: bool) -> None:
        self.live, self.labels, ranks = live, labels, len(labels)
        self.out = [tempfile.TemporaryFile() for _ in range(ranks)]
        self.err = [tempfile.TemporaryFile() for _ in range(ranks)]
        self._shown = {file.fileno(): 0 for file in self.out + self.err}

    def pump(self) -> None:
        """With `live`, show the whole lines that have come since the last call."""
        if self.live:
            self._show(whole_lines=True)

    def finish(self) -> None:
        """Show the rest and let go of the files."""
        self._show(whole_lines=False)
        for file in self.out + self.err:
            file.close()

    def errors_of(self, rank: int, most: int = 2000) -> str:
        """The end of what a rank wrote to its standard error."""
        descriptor = self.err[rank].fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, most, max(0, size - most)).decode(errors="replace").strip()

    def _show(self, whole_lines: bool) -> None:
        for files, stream in ((self.out, sys.stdout), (self.err, sys.stderr)):
            for rank, file in enumerate(files if stream is not None else ()):  # a program without a console has none
                self._show_one(rank, file, stream, whole_lines)
            if stream is not None:
                stream.flush()

    def _show_one(self, rank: int, file: IO[bytes], stream: TextIO, whole_lines: bool) -> None:
        descriptor, begin = file.fileno(), self._shown[file.fileno()]
        size = os.fstat(descriptor).st_size
        left_out = max(0, size - begin - _MOST)
        # The ranks share the file's position, so read beside it.
        text = os.pread(descriptor, _MOST, begin + left_out)
        if whole_lines:
            text = text[: text.rfind(b"\n") + 1]
        self._shown[descriptor] = begin + left_out + len(text)
        if left_out:
            print(f"{self.labels[rank]} | ... {left_out:,} bytes left out ...", file=stream)
        for line in text.decode(errors="replace").splitlines():
            print(f"{self.labels[rank]} | {line}", file=stream)
