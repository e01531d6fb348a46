"""The caller's side of the fork server: start it when first needed, ask it for the processes of a run."""

import atexit
import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from d2lps.launch import objects_and_files as messages

_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # this process's ends: of the fork server's socket and the keepers'

# A launcher's variables would make a rank believe that it is part of that launcher's job.
JOB_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
JOB_VARIABLES |= {"GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables of a job that it may be part of."""
    return {k: v for k, v in os.environ.items() if k not in JOB_VARIABLES and not k.startswith("TORCHELASTIC_")}


def start_ranks(ranks: int, files: Sequence[tuple[int, ...]], folder: str = "") -> tuple[socket.socket, dict[int, int]]:
    """Start one process a rank, which inherits `files[rank]`; return their keeper's socket and {rank: pid}.

    Closing the socket ends them all, and then removes the folder, if one is named.
    """
    setting = {"ranks": ranks, "directory": _directory(), "environment": clean_environment(), "folder": folder}
    setting |= {"path": sys.path, "argv": sys.argv}
    for attempt in range(2):
        try:
            return _start(setting, files)
        except (EOFError, OSError) as error:  # if the fork server was killed with our request in its hands, once more
            if getattr(error, "errno", None) == errno.EMFILE:
                raise
            if attempt:
                raise RuntimeError(f"the processes of this run could not be started: {error}") from error
    raise AssertionError


def preload(names: set[str]) -> None:
    """Let the fork server import some modules, once for all ranks that it will fork; this does not wait for it."""
    if names and _server is not None:
        with contextlib.suppress(OSError):  # the next one will be told again
            _tell(sorted(names))


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        told = "the working directory, in which the ranks would start, has been deleted: os.chdir to one that is there"
        raise FileNotFoundError(errno.ENOENT, told) from None


def _start(setting: dict[str, Any], files: Sequence[tuple[int, ...]]) -> tuple[socket.socket, dict[int, int]]:
    ours, keepers = socket.socketpair()
    _ends.add(ours)
    try:
        with keepers:
            _tell(None, (keepers.fileno(),))
        messages.send(ours, setting)
        for rank, inherited in enumerate(files):
            messages.send(ours, rank, inherited)
        pids, _ = messages.receive(ours)
    except BaseException:
        ours.close()
        raise
    return ours, pids


def _tell(message: Any, files: tuple[int, ...] = ()) -> None:
    """Something for the fork server; if it died, or this is interrupted in the middle, that one is of no more use."""
    with _lock:
        try:
            messages.send(_running(), message, files)
        except BaseException:
            _end()
            raise


def _running() -> socket.socket:
    global _server
    if _server is not None and _server[0].poll() is not None:
        _end()
    if _server is None:
        ours, theirs = socket.socketpair()
        _ends.add(ours)
        try:
            with theirs:
                _server = (_spawn(theirs.fileno()), ours)
        except BaseException:
            ours.close()
            raise
    return _server[1]


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    settings["THP_MEM_ALLOC_ENABLE"] = "1"  # PyTorch's: big tensors on huge pages, which are faster to get and to read
    environment = clean_environment() | settings
    return subprocess.Popen(
        [sys.executable, "-m", "d2lps.launch.forkserver", str(descriptor)],
        pass_fds=[descriptor],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt from the keyboard is not meant for it
    )


def _end() -> None:
    """Let go of the fork server; the keepers that it has forked do not need it."""
    global _server
    if _server is not None:
        child, ours = _server
        _server = None
        ours.close()
        child.kill()
        child.wait()


def _after_fork() -> None:
    """In a child that the caller forks: a copy of a socket kept open here would hide the caller's end from a keeper."""
    global _lock, _server
    for end in list(_ends):
        end.close()
    if _server is not None:
        _server[0].returncode = 0  # not this process's child
    _lock, _server = threading.Lock(), None


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
