"""Two processes stand between the caller and its ranks, so that starting is fast and ending is certain.

    caller ── zygote            imports torch once, then only forks; one for each caller, it goes when the caller goes
                └── keeper      one for each run: forks the ranks, reports those that end, and kills the rest when its
                      ├── rank  socket to the caller closes, for whatever reason: a finished run, an error, kill -9
                      └── rank

Importing torch takes seconds, forking a process that has imported it takes milliseconds. A process cannot ask to be
ended when a grandparent dies, and one that is stopped cannot do anything at all; but its parent can kill it: hence the
keeper. The standard library's forkserver has the first half of this; its children outlive the caller.
"""

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from d2lps.launch import wire
from d2lps.launch.lineage import adopt_orphans, children, die_with_parent, kill_session


def serve(caller: socket.socket) -> None:
    """The zygote: fork a keeper for every socket that the caller sends, until the caller is gone.

    Between them the caller may name modules that ranks had to import: those that follow find them here.
    """
    import numpy
    import torch
    import torch.distributed

    import d2lps.launch.rank  # noqa: F401 - so that it need not be imported in every rank

    torch.set_num_threads(1)  # before the fork: no thread pool to lose
    assert numpy
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the keepers
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks a rank where it is: may come before the rank has a handler
    gc.freeze()  # ranks need not look for garbage in all this, and copy its pages by doing so
    while True:
        try:
            names, files = wire.receive(caller)
        except (EOFError, OSError):
            return
        if not files:
            for name in names:
                importlib.import_module(name)
            continue
        (run,) = files
        if os.fork() == 0:
            caller.close()
            _child(keep, socket.socket(fileno=run))
        os.close(run)


def keep(caller: socket.socket) -> None:
    """The keeper: fork the ranks, report each end as (rank, wait status), and leave nothing behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    with contextlib.suppress(EOFError, OSError):
        setting, _ = wire.receive(caller)
        os.chdir(setting["directory"])
        os.environ.clear()
        os.environ.update(setting["environment"])
        sys.path[:], sys.argv[:] = setting["path"], setting["argv"]
        processes: dict[int, int] = {}
        try:
            for rank in range(setting["ranks"]):
                _, files = wire.receive(caller)
                processes[_fork_rank(rank, files, caller)] = rank
            wire.send(caller, {rank: pid for pid, rank in processes.items()})
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
        from d2lps.launch.rank import main

        _child(main, rank, *files)
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
                wire.send(caller, (processes.pop(pid), status))
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


def _child(work: Callable[..., None], *args: Any) -> None:
    """Run `work` as the whole life of a forked process: nothing of the parent's stack runs after it."""
    try:
        work(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _child(serve, socket.socket(fileno=int(sys.argv[1])))  # its end need not take apart what torch has built
