"""The caller's side of the fork server: start it when first needed, ask it for the processes of a run."""

import atexit
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from d2lps.launch import wire

_lock = threading.Lock()
_zygote: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # this process's ends: of the zygote's socket and the keepers'

# A launcher's variables would make a rank believe that it is part of that launcher's job.
JOB_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
JOB_VARIABLES |= {"GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables of a job that it may be part of."""
    return {k: v for k, v in os.environ.items() if k not in JOB_VARIABLES and not k.startswith("TORCHELASTIC_")}


def processes(ranks: int, files: Sequence[tuple[int, ...]], folder: str = "") -> tuple[socket.socket, dict[int, int]]:
    """Start one process a rank, which inherits `files[rank]`; return their keeper's socket and {rank: pid}.

    Closing the socket ends them all, and then removes the folder, if one is named.
    """
    for last in (False, True):
        try:
            return _start(ranks, files, folder)
        except (EOFError, OSError) as error:  # if the zygote was killed with our request in its hands, once more
            if last:
                raise RuntimeError(f"the processes of this run could not be started: {error}") from None
    raise AssertionError


def preload(names: set[str]) -> None:
    """Let the zygote import some modules, once for all ranks that it will fork; this does not wait for it."""
    with _lock:
        if names and _zygote is not None:
            try:
                wire.send(_zygote[1], sorted(names))
            except BaseException as error:
                _end()  # as in _ask; the next one will be told again
                if not isinstance(error, OSError):
                    raise


def _start(ranks: int, files: Sequence[tuple[int, ...]], folder: str) -> tuple[socket.socket, dict[int, int]]:
    ours, keepers = socket.socketpair()
    _ends.add(ours)
    try:
        with keepers:
            _ask(keepers.fileno())
        setting = {"ranks": ranks, "directory": os.getcwd(), "environment": clean_environment(), "folder": folder}
        wire.send(ours, setting | {"path": sys.path, "argv": sys.argv})
        for rank in range(ranks):
            wire.send(ours, rank, files[rank])
        pids, _ = wire.receive(ours)
    except BaseException:
        ours.close()
        raise
    return ours, pids


def _ask(descriptor: int) -> None:
    """Hand a new run's socket to the zygote; if that has died since the last run, to a new one."""
    with _lock:
        try:
            wire.send(_running(), None, (descriptor,))
        except OSError:
            _end()
            wire.send(_running(), None, (descriptor,))
        except BaseException:
            _end()  # interrupted, perhaps in the middle of a message: of no more use
            raise


def _running() -> socket.socket:
    global _zygote
    if _zygote is not None and _zygote[0].poll() is not None:
        _end()
    if _zygote is None:
        ours, theirs = socket.socketpair()
        _ends.add(ours)
        try:
            with theirs:
                _zygote = (_spawn(theirs.fileno()), ours)
        except BaseException:
            ours.close()
            raise
    return _zygote[1]


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
    """Let go of the zygote; the keepers that it has forked do not need it."""
    global _zygote
    if _zygote is not None:
        child, ours = _zygote
        _zygote = None
        ours.close()
        child.kill()
        child.wait()


def _after_fork() -> None:
    """In a child that the caller forks: a copy of a socket kept open here would hide the caller's end from a keeper."""
    global _lock, _zygote
    for end in list(_ends):
        end.close()
    if _zygote is not None:
        _zygote[0].returncode = 0  # not this process's child
    _lock, _zygote = threading.Lock(), None


atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
