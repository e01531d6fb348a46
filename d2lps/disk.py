"""Files that are on the disk itself, and whole or not there: what whoever keeps a promise on a disk needs."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CheckpointMissing(FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointDamaged(RuntimeError):
    """A checkpoint is there, but not what was written; the message names the file."""


@contextmanager
def drafted(final: Path) -> Iterator[Path]:
    """Where to write a file that has its name once all of it is on the disk, as `settle` has it; if that fails, nothing is left.

    >>> import tempfile
    >>> final = Path(tempfile.mkdtemp()) / "weights"
    >>> with drafted(final) as draft:
    ...     _ = draft.write_text("all of it")
    >>> final.read_text(), os.listdir(final.parent)
    ('all of it', ['weights'])

    It lies in a folder beside it, `.weights.draft`, with whatever its writer makes there: of one that was killed all of that is
    left, until somebody writes this file anew. Raises OSError.
    """
    room = final.with_name(f".{final.name}.draft")
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    try:
        yield room / final.name
        settle(room / final.name, final)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def settle(draft: Path, final: Path) -> None:
    """Give a finished file its name: whenever the machine stops, there is all of it or, if there was one, the one before."""
    persist_path(draft)
    draft.rename(final)
    persist_path(final.parent)


def persist_path(path: Path) -> None:
    """`persist` for a file or a folder that is not open."""
    file = os.open(path, os.O_RDONLY)
    try:
        persist(file)
    finally:
        os.close(file)


def persist(file: int) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk itself."""
    if sys.platform == "darwin":
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # fsync there stops at the disk's own cache
    else:
        os.fsync(file)
