"""The caller's side of the fork server: start it when first needed, ask it for the processes of a run."""

import atexit
import errno
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], Connection] | None = None
_lines: weakref.WeakSet[Connection] = weakref.WeakSet()  # this process's ends: of those to the fork server and the keepers

# A launcher's variables would make a rank believe that it is part of that launcher's job.
_JOB_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
_JOB_VARIABLES |= {"GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


def start_ranks(files: Sequence[Sequence[int]], folder: str = "") -> tuple[Connection, list[int]]:
    """Start one process a rank, which inherits `files[rank]`; return the line to their keeper, and their pids.

    Closing the line ends them all, and then removes the folder, if one is named.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        told = "the working directory, in which the ranks would start, has been deleted: os.chdir to one that is there"
        raise FileNotFoundError(errno.ENOENT, told) from None
    setting = {"directory": directory, "environment": _environment(), "path": sys.path, "argv": sys.argv, "folder": folder}
    for _ in range(2):
        line, keepers = Pipe()
        _lines.add(line)
        try:
            with keepers:
                _tell([], keepers.fileno())
            line.send(setting | {"ranks": len(files), "files": len(files[0])})
            for file in chain(*files):
                send_handle(line, file, 0)
            return line, line.recv()
        except BaseException as error:
            line.close()
            if not isinstance(error, EOFError | ConnectionError):
                raise
            with _lock:  # the fork server may have been killed, even with our request in its hands: once more, with another
                _end()
    raise RuntimeError("the processes of this run could not be started: their fork server, or their keeper, ended at once")


def preload(names: set[str]) -> None:
    """Let the fork server import some modules, once for all ranks that it will fork; this does not wait for it."""
    if names and _server is not None:
        with suppress(OSError):  # the next one will be told again
            _tell(sorted(names))


def kill_session(pid: int) -> None:
    """SIGKILL to a rank and all it started: it works on stopped processes too."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """This process's, without the variables of a job that it may be part of."""
    return {k: v for k, v in os.environ.items() if k not in _JOB_VARIABLES and not k.startswith("TORCHELASTIC_")}


def _tell(names: list[str], *files: int) -> None:
    """Something for the fork server; if it died, or this is interrupted in the middle, that one is of no more use."""
    global _server
    with _lock:
        try:
            _server = _server or _started()
            _server[1].send(names)
            for file in files:
                send_handle(_server[1], file, 0)
        except BaseException:
            _end()
            raise


def _started() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    _lines.add(ours)
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    settings["THP_MEM_ALLOC_ENABLE"] = "1"  # PyTorch's: big tensors on huge pages, which are faster to get and to read
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "d2lps.launch.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_environment() | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is not meant for it
        )
    return server, ours


def _end() -> None:
    """Let go of the fork server; the keepers that it has forked do not need it."""
    global _server
    if _server is not None:
        (child, ours), _server = _server, None
        ours.close()
        child.kill()
        child.wait()


def _after_fork() -> None:
    """In a child that the caller forks: a copy of a line kept open here would hide the caller's end from a keeper."""
    global _lock, _server
    for line in list(_lines):
        line.close()
    if _server is not None:
        _server[0].returncode = 0  # not this process's child
    _lock, _server = threading.Lock(), None


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
