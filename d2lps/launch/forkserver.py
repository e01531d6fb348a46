"""Two processes stand between the caller and its ranks, so that starting is fast and ending is certain.

    caller ── fork server       imports torch once, then only forks; one for each caller, it goes when the caller goes
                └── supervisor      one for each run: forks the ranks, reports those that end, and kills the rest when its
                      ├── rank  line to the caller closes, for whatever reason: a finished run, an error, kill -9
                      └── rank

Importing torch takes seconds, forking a process that has imported it takes milliseconds. The standard library's forkserver
has this half of it; its children outlive the caller. The other half is the supervisor: a process cannot ask to be ended when a
grandparent dies, and one that is stopped cannot do anything at all; but its parent can kill it, and on Linux inherits what it
leaves behind.
"""

import atexit
import ctypes
import errno
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch

from d2lps.launch.launched import JOB_VARIABLES
from d2lps.launch.rank import Job, main
from d2lps.sharedmemory.linux import state_and_parent

# ---- the caller: start the fork server when first needed, ask it for the processes of a run ------------------------------

_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], Connection] | None = None
_lines: weakref.WeakSet[Connection] = weakref.WeakSet()  # this process's ends: of those to the fork server and the supervisors

# PyTorch's, which it reads once, at a process's first tensor: big ones on huge pages, which are faster to get and to read.
_WISHES = {"THP_MEM_ALLOC_ENABLE": "1"}

# Seconds in which what a rank has left may still end by itself: it may be what puts in order what a killed one leaves.
_GRACE = 1.0

# A launcher's variables would make a rank believe that it is part of that launcher's job.
_NOT_HANDED_ON = JOB_VARIABLES | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}


def start_ranks(job: Job, program: bytes, files: Sequence[Sequence[int]], folder: str) -> tuple[Connection, list[int]]:
    """Start one process a rank, which inherits job, program and `files[rank]`; return the line to their supervisor, and the pids.

    The first pid is the supervisor's. Closing the line ends them all, and then removes the folder, if one is named.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        told = "the working directory, in which the ranks would start, has been deleted: os.chdir to one that is there"
        raise FileNotFoundError(errno.ENOENT, told) from None
    setting = directory, _environment(), sys.path, sys.argv, folder, job, program, len(files[0])
    for _ in range(2):
        line, supervisors = Pipe()
        _lines.add(line)
        try:
            with supervisors:
                _tell([], supervisors.fileno())
            line.send(setting)
            for file in chain(*files):
                send_handle(line, file, 0)
            return line, line.recv()
        except BaseException as error:
            line.close()
            if not isinstance(error, EOFError | ConnectionError):
                raise
            with _lock:  # the fork server may have been killed, even with our request in its hands: once more, with another
                _end_server()
    raise RuntimeError("the processes of this run could not be started: their fork server, or their supervisor, ended at once")


def preload(names: set[str]) -> None:
    """Let the fork server import some modules, once for all ranks that it will fork; this does not wait for it."""
    if names and _server is not None:
        with suppress(OSError):  # the next one will be told again
            _tell(sorted(names))


def _environment() -> dict[str, str]:
    """This process's, without the variables of a job that it may be part of, and with `_WISHES` where it says nothing else."""
    own = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON and not k.startswith("TORCHELASTIC_")}
    return _WISHES | own


def _tell(names: list[str], *files: int) -> None:
    """Something for the fork server; if it died, or this is interrupted in the middle, that one is of no more use."""
    global _server
    with _lock:
        try:
            _server = _server or _started()
            _server[0].send_signal(signal.SIGCONT)  # it may have been stopped
            _server[1].send(names)
            for file in files:
                send_handle(_server[1], file, 0)
        except BaseException:
            _end_server()
            raise


def _started() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    _lines.add(ours)
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = f"from {__name__} import live, serve; live(serve, {theirs.fileno()})"
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            env=_environment() | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is not meant for it
        )
    return server, ours


def _end_server() -> None:
    """Let go of the fork server; the supervisors that it has forked do not need it."""
    global _server
    if _server is not None:
        (child, ours), _server = _server, None
        ours.close()
        child.kill()
        child.wait()


def _after_fork() -> None:
    """In a child that the caller forks: a copy of a line kept open here would hide the caller's end from a supervisor."""
    global _lock, _server
    for line in list(_lines):
        line.close()
    if _server is not None:
        _server[0].returncode = 0  # not this process's child
    _lock, _server = threading.Lock(), None


atexit.register(_end_server)
os.register_at_fork(after_in_child=_after_fork)

# ---- the fork server ----------------------------------------------------------------------------------------------------


def serve(line: int) -> None:
    """Fork a supervisor for every line that the caller sends, until the caller is gone.

    Between them the caller may name modules that ranks had to import: those that follow find them here.
    """
    caller = Connection(line)
    torch.set_num_threads(1)  # before the fork: no thread pool to lose
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the supervisors
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


def live(work: Callable[..., None], *args: Any) -> None:
    """Run `work` as the whole life of a process: nothing of a parent's stack runs after it, and nothing is taken apart."""
    try:
        work(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


# ---- the supervisor of a run ------------------------------------------------------------------------------------------------


def keep(caller: Connection) -> None:
    """Fork the ranks, report each end as (rank, wait status), and leave nothing behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a rank started in a session of its own becomes this one's child without it
    with suppress(EOFError, OSError):
        directory, environment, sys.path[:], sys.argv[:], folder, job, program, count = caller.recv()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        processes: dict[int, int] = {}
        reporter = threading.Thread(target=_report_ends, args=(caller, processes), daemon=True)
        try:
            for rank in range(job.ranks):
                files = [recv_handle(caller) for _ in range(count)]
                processes[_fork_rank(caller, files, rank, job, program)] = rank
            caller.send([os.getpid(), *processes])
            reporter.start()  # once all are forked: a fork has one thread only
            caller.poll(None)  # the caller never writes here again: whatever comes is its end
        finally:
            _end(processes, reporter)
            _remove(folder)


def _fork_rank(caller: Connection, files: list[int], *given: Any) -> int:
    supervisor, pid = os.getpid(), os.fork()
    if pid == 0:
        caller.close()
        os.setpgid(0, 0)  # a group of its own: whatever the rank starts can be ended with it. Not a session of its own: Linux
        # shares out the cores among sessions, and a rank that offers its core would not offer it to the other ranks
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: should the supervisor itself be killed, its ranks are too
        if os.getppid() == supervisor:
            live(main, *given, *files)
        os._exit(1)
    for file in files:
        os.close(file)
    return pid


def _prctl(option: int, value: int) -> None:
    """A wish of this process that only Linux grants."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _report_ends(caller: Connection, processes: dict[int, int]) -> None:
    """Tell the caller which rank ended how, for as long as there is a child; a thread's."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid in processes:
                kill_session(pid)  # what a dead rank had started itself
                with suppress(OSError):  # there may be no caller any more
                    caller.send((processes.pop(pid), status))


def _end(processes: dict[int, int], reporter: threading.Thread) -> None:
    """Kill the ranks, and what they started and left: orphans are the supervisor's own children (see `keep`)."""
    for pid in list(processes):
        kill_session(pid)
    if reporter.ident is None:  # the run has ended while its ranks were being forked
        reporter.start()
    reporter.join(_GRACE)
    while reporter.is_alive():  # it ends when there is no child any more
        for pid in [] if processes else _children():  # once the ranks are gone
            kill_session(pid)
        reporter.join(0.02)


def kill_session(pid: int) -> None:
    """SIGKILL to a rank and all it started: it works on stopped processes too."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """The processes whose parent this is, on Linux."""
    pids = [int(directory.name) for directory in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if state_and_parent(pid)[1] == os.getpid()]


def _remove(folder: str) -> None:
    """The run's own folder, if it has one. Other supervisors may be ending processes that still write into it."""
    deadline = time.monotonic() + 1.0
    while folder and os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
