"""The process between a caller and its ranks: it forks them, reports those that end, and sees to it that nothing is left.

A process cannot ask to be ended when a grandparent dies, and one that is stopped cannot do anything at all; but its parent can
kill it, and on Linux inherits what it leaves behind.
"""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from d2lps.launch import objects_and_files as messages
from d2lps.launch.rank import main
from d2lps.sharedmemory.linux import state_and_parent


def keep(caller: socket.socket) -> None:
    """The keeper: fork the ranks, report each end as (rank, wait status), and leave nothing behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    with contextlib.suppress(EOFError, OSError):
        setting, _ = messages.receive(caller)
        os.chdir(setting["directory"])
        os.environ.clear()
        os.environ.update(setting["environment"])
        sys.path[:], sys.argv[:] = setting["path"], setting["argv"]
        processes: dict[int, int] = {}
        try:
            for rank in range(setting["ranks"]):
                _, files = messages.receive(caller)
                processes[_fork_rank(rank, files, caller)] = rank
            messages.send(caller, {rank: pid for pid, rank in processes.items()})
            _report_ends(caller, processes)
        finally:
            _end(processes)
            _remove(setting["folder"])


def _fork_rank(rank: int, files: list[int], caller: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        caller.close()
        os.setpgid(0, 0)  # a group of its own: whatever the rank starts can be ended with it. Not a session of its own: Linux
        # shares out the cores among sessions, and a rank that offers its core would not offer it to the other ranks
        die_with_parent()
        live(main, rank, *files)
    for file in files:
        os.close(file)
    return pid


def _report_ends(caller: socket.socket, processes: dict[int, int]) -> None:
    """Tell the caller which rank ended how, until the caller closes its socket."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, or the signal would not wake us
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(caller, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        for pid in list(processes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                kill_session(pid)  # what a dead rank had started itself
                messages.send(caller, (processes.pop(pid), status))
        ready = [key.fileobj for key, _ in selector.select()]
        if woken in ready:
            os.read(woken, 4096)
        if caller in ready:  # the caller never writes here again: this is its end
            return


def _end(processes: dict[int, int]) -> None:
    """Kill the ranks, and what they started and left: orphans are the keeper's own children (see adopt_orphans)."""
    for pid in processes:
        kill_session(pid)
    for pid in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while True:  # until there is no child any more
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended:
                for pid in children():
                    kill_session(pid)
                os.waitpid(-1, 0)


def _remove(folder: str) -> None:
    """The run's own folder, if it has one. Other keepers may be ending processes that still write into it."""
    deadline = time.monotonic() + 1.0
    while folder and os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


def live(work: Callable[..., None], *args: Any) -> None:
    """Run `work` as the whole life of a forked process: nothing of the parent's stack runs after it."""
    code = 1
    try:
        work(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# ---- parents and children ---------------------------------------------------------------------------------------------


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
