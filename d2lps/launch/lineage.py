"""Parents and children among processes: who ends whom, and who inherits whose orphans."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from d2lps.sharedmemory.processes import state_and_parent


def children() -> list[int]:
    """The processes whose parent this is, on Linux."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        state, parent = state_and_parent(int(directory.name))
        if parent == os.getpid() and state != "Z":
            found.append(int(directory.name))
    return found


def kill_session(pid: int) -> None:
    """SIGKILL to a rank and all it started: it works on stopped processes too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Linux: what a rank started in a session of its own becomes the keeper's child, not init's, when the rank is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def die_with_parent() -> None:
    """Linux: should the keeper itself be killed, its ranks are too. Asked for in the one thread that forks."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent or parent == 1:
            os._exit(1)
