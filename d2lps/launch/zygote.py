"""The caller's side of the fork server: start it when first needed, ask it for the processes of a run."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from d2lps.launch import wire

_lock = threading.Lock()
_zygote: tuple[subprocess.Popen[bytes], socket.socket, int] | None = None

# A launcher's variables would make a rank believe that it is part of that launcher's job.
JOB_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
JOB_VARIABLES |= {"GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables of a job that it may be part of."""
    return {k: v for k, v in os.environ.items() if k not in JOB_VARIABLES and not k.startswith("TORCHELASTIC_")}


def processes(ranks: int, files: Sequence[tuple[int, ...]]) -> tuple[socket.socket, dict[int, int]]:
    """Start one process a rank, which inherits `files[rank]`; return their keeper's socket and {rank: pid}.

    Closing the socket ends them all.
    """
    ours, keepers = socket.socketpair()
    try:
        with keepers:
            _ask(keepers.fileno())
        setting = {"ranks": ranks, "directory": os.getcwd(), "environment": clean_environment(), "path": sys.path}
        wire.send(ours, setting)
        for rank in range(ranks):
            wire.send(ours, rank, files[rank])
        pids, _ = wire.receive(ours)
    except (EOFError, OSError) as error:
        ours.close()
        raise RuntimeError(f"the processes of this run could not be started: {error}") from None
    except BaseException:
        ours.close()
        raise
    return ours, pids


def _ask(descriptor: int) -> None:
    """Hand a new run's socket to the zygote; if it has died since the last run, to a new one."""
    with _lock:
        try:
            wire.send(_running(), None, (descriptor,))
        except OSError:
            _forget()
            wire.send(_running(), None, (descriptor,))


def _running() -> socket.socket:
    global _zygote
    if _zygote is not None and (_zygote[2] != os.getpid() or _zygote[0].poll() is not None):
        _forget()
    if _zygote is None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "d2lps.launch.forkserver", str(theirs.fileno())]
            environment = clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            child = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is not meant for it
            )
        _zygote = (child, ours, os.getpid())
    return _zygote[1]


def _forget() -> None:
    global _zygote
    if _zygote is not None:
        _zygote[1].close()
        if _zygote[2] == os.getpid():
            with contextlib.suppress(Exception):
                _zygote[0].wait(timeout=5)
    _zygote = None
