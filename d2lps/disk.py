"""Files that are on the disk itself, and whole or not there: what whoever keeps a promise on a disk needs."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


class CheckpointMissing(FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointDamaged(RuntimeError):
    """A checkpoint is there, but not what was written; the message names the file."""


@contextmanager
def drafted(final: Path) -> Iterator[Path]:
    """Where to write a file that has its name once all of it is on the disk, as `settle` says; if it is never whole, it goes.

    >>> final = Path(tempfile.mkdtemp()) / "weights"
    >>> with drafted(final) as draft:
    ...     _ = draft.write_text("all of it")
    >>> final.read_text(), os.listdir(final.parent)
    ('all of it', ['weights'])

    It lies in a folder beside it, `.weights.draft-...`, with whatever its writer makes there, that goes with its process; if a
    whole machine stops, with who writes this file anew. Of several who write it at once, the last one's stays. Raises OSError.
    Cost: a process, 1 ms.
    """
    name = f".{final.name}.draft-"
    for left in [entry for entry in final.parent.iterdir() if entry.name.startswith(name)]:
        _sweep(left)
    with passing_folder(name, final.parent) as folder:
        yield folder / final.name
        settle(folder / final.name, final)


@contextmanager
def passing_folder(name: str = "d2lps-", where: Path | None = None) -> Iterator[Path]:
    """A temporary folder that goes with this process, even if that is killed: a shell waits for its end.

    The shell is there before the folder, and so holds no lock on it: whoever is killed in between leaves nothing.
    """
    folder = Path(where or tempfile.gettempdir()) / f"{name}{uuid.uuid4().hex}"
    command = ["sh", "-c", 'read -r _; rm -rf "$0"', str(folder)]
    with ExitStack() as at_the_end:
        shell = at_the_end.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        at_the_end.callback(shell.kill)  # it would wait for all that have its line, as processes forked from this one may
        lock = _make(folder)
        at_the_end.callback(os.close, lock)
        at_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _make(folder: Path) -> int:
    """Make the folder; the descriptor that keeps it locked as long as this process lives."""
    while True:
        folder.mkdir(0o700)
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # somebody swept it away before it was locked
        except OSError:  # no descriptor is free
            folder.rmdir()
            raise
        with suppress(OSError):  # a file system that knows no locks; nobody can lock there, and sweep it away
            fcntl.flock(lock, fcntl.LOCK_SH)
        if folder.exists():
            return lock
        os.close(lock)


def _sweep(folder: Path) -> None:
    """Remove what a process has left that is no more; one that lives has it locked."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


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
