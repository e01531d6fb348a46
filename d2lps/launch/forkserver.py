"""Two processes stand between the caller and its ranks, so that starting is fast and ending is certain.

    caller ── fork server       imports torch once, then only forks; one for each caller, it goes when the caller goes
                └── keeper      one for each run: forks the ranks, reports those that end, and kills the rest when its
                      ├── rank  line to the caller closes, for whatever reason: a finished run, an error, kill -9
                      └── rank

Importing torch takes seconds, forking a process that has imported it takes milliseconds. The standard library's forkserver
has this half of it; its children outlive the caller. The other half is the keeper: a process cannot ask to be ended when a
grandparent dies, and one that is stopped cannot do anything at all; but its parent can kill it, and on Linux inherits what it
leaves behind.
"""

import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import torch

from d2lps.launch.forkserver_client import kill_session
from d2lps.launch.rank import main
from d2lps.sharedmemory.linux import state_and_parent


def serve(caller: Connection) -> None:
    """Fork a keeper for every line that the caller sends, until the caller is gone.

    Between them the caller may name modules that ranks had to import: those that follow find them here.
    """
    torch.set_num_threads(1)  # before the fork: no thread pool to lose
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the keepers
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks a rank where it is: may come before the rank has a handler
    gc.freeze()  # ranks need not look for garbage in all this, and copy its pages by doing so
    with suppress(EOFError, OSError):
        while True:
            if names := caller.recv():
                for name in names:
                    importlib.import_module(name)
                continue
            run = Connection(recv_handle(caller))
            if os.fork() == 0:
                caller.close()
                live(keep, run)
            run.close()


def keep(caller: Connection) -> None:
    """The keeper: fork the ranks, report each end as (rank, wait status), and leave nothing behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":  # what a rank started in a session of its own becomes this one's child when the rank is gone
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    with suppress(EOFError, OSError):
        setting = caller.recv()
        os.chdir(setting["directory"])
        os.environ.clear()
        os.environ.update(setting["environment"])
        sys.path[:], sys.argv[:] = setting["path"], setting["argv"]
        processes: dict[int, int] = {}
        try:
            for rank in range(setting["ranks"]):
                files = [recv_handle(caller) for _ in range(setting["files"])]
                processes[_fork_rank(rank, files, caller)] = rank
            caller.send(list(processes))
            _report_ends(caller, processes)
        finally:
            _end(processes)
            _remove(setting["folder"])


def _fork_rank(rank: int, files: list[int], caller: Connection) -> int:
    pid = os.fork()
    if pid == 0:
        caller.close()
        os.setpgid(0, 0)  # a group of its own: whatever the rank starts can be ended with it. Not a session of its own: Linux
        # shares out the cores among sessions, and a rank that offers its core would not offer it to the other ranks
        _die_with_parent()
        live(main, rank, *files)
    for file in files:
        os.close(file)
    return pid


def _die_with_parent() -> None:
    """Linux: should the keeper itself be killed, its ranks are too. Asked for in the one thread that forks."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent or parent == 1:
            os._exit(1)


def _report_ends(caller: Connection, processes: dict[int, int]) -> None:
    """Tell the caller which rank ended how, until the caller has no more use for them."""

    def report(*_: Any) -> None:
        with suppress(OSError):  # there is no child any more, or no caller
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in processes:
                    kill_session(ended[0])  # what a dead rank had started itself
                    caller.send((processes.pop(ended[0]), ended[1]))

    signal.signal(signal.SIGCHLD, report)
    report()  # those that had ended before
    while not caller.poll(1.0):  # the caller never writes here again: whatever comes is its end
        report()  # a signal just before the wait would not wake it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _end(processes: dict[int, int]) -> None:
    """Kill the ranks, and what they started and left: orphans are the keeper's own children (see `keep`)."""
    for pid in processes:
        kill_session(pid)
    for pid in processes:
        os.waitpid(pid, 0)
    with suppress(ChildProcessError):  # until there is no child any more
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for pid in _children():
                    kill_session(pid)
                os.waitpid(-1, 0)


def _children() -> list[int]:
    """The processes whose parent this is, on Linux."""
    pids = [int(directory.name) for directory in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if state_and_parent(pid)[1] == os.getpid()]


def _remove(folder: str) -> None:
    """The run's own folder, if it has one. Other keepers may be ending processes that still write into it."""
    deadline = time.monotonic() + 1.0
    while folder and os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


def live(work: Callable[..., None], *args: Any) -> None:
    """Run `work` as the whole life of a forked process: nothing of the parent's stack runs after it."""
    try:
        work(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    live(serve, Connection(int(sys.argv[1])))  # its end need not take apart what torch has built
