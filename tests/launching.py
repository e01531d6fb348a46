"""What the tests of the launcher share: waiting for a condition, counting what is left behind, scripts and kernels.

Everything that these tests start carries a mark in its environment: so it can be found wherever it ended up.
"""

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from jupyter_core.utils import ensure_event_loop

import d2lps

MARK = "D2LPS_TEST_MARK"
os.environ.setdefault(MARK, f"{os.getpid()}-{time.monotonic_ns()}")
ROOT = Path(__file__).resolve().parents[1]
zmq.Context.instance().socket(zmq.PAIR).close()  # what ZeroMQ and a kernel's client open once, and keep, is there before any test
ensure_event_loop()


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What `condition()` gives as soon as it is true; what it gives at the end if it never is."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


# ---- processes ------------------------------------------------------------------------------------------------------


def fork_server_of(pid: int) -> psutil.Process | None:
    """The fork server of a process, if it has one."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if any("d2lps.launch.forkserver" in word for word in child.cmdline()):
                    return child
    return None


def kill_fork_server() -> None:
    """End this process's fork server, and return when it is gone; the next run starts another."""
    server = fork_server_of(os.getpid())
    if server is not None:
        server.kill()
        until(lambda: server.status() == psutil.STATUS_ZOMBIE)


def start_fork_server() -> None:
    """See to it that this process has a fork server."""
    server = fork_server_of(os.getpid())
    if server is None or server.status() == psutil.STATUS_ZOMBIE:
        d2lps.run(lambda comm: None, 1, backend="gloo")


def started() -> list[psutil.Process]:
    """Every living process, besides this one, that these tests have started, directly or not."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]:
                found.append(process)
    return found


def listening(processes: list[psutil.Process]) -> list[str]:
    """The addresses on which some processes wait for connections: `["127.0.0.1"]`."""
    addresses = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            addresses += [connection.laddr.ip for connection in found]
    return sorted(addresses)


def command_of(process: psutil.Process) -> str:
    """What a process runs, without its numbers; "" if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return re.sub(r"\d+", "N", " ".join(process.cmdline()))[:80]
    return ""


def orphans() -> list[psutil.Process]:
    """Those of them whose parent is gone."""
    here = started()
    known = {os.getpid(), *(process.pid for process in here)}
    with contextlib.suppress(psutil.Error):
        return [process for process in here if process.ppid() not in known]
    return orphans()


def open_files() -> list[str]:
    """What this process's descriptors stand for, without its numbers (of sockets, pipes, ...)."""
    names = []
    for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        with contextlib.suppress(OSError):  # the one that lists the directory is gone by now
            names.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{descriptor}")))
    return sorted(names)


def zombies() -> int:
    """How many of this process's children have ended without its having noticed."""
    with contextlib.suppress(psutil.Error):
        return [child.status() for child in psutil.Process().children()].count(psutil.STATUS_ZOMBIE)
    return zombies()


def shared_memory() -> set[str]:
    """The names that PyTorch or Python has made in shared memory, without those that processes of others have mapped.

    Other programs' names are left out: tests of other workers run MPI, Envoy and browsers at the same time. Files are known by
    their inodes: whoever makes a semaphore has mapped it by another name, which it had for a moment before.
    """
    if sys.platform != "linux":
        return set()
    names: dict[str, str] = {}  # of each inode
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            if entry.name.startswith(("torch_", "psm_", "sem.")) and entry.stat().st_uid == os.geteuid():
                names[str(entry.inode())] = entry.name
    ours = {os.getpid(), *(process.pid for process in started())} if names else set()
    for process in psutil.process_iter() if names else ():
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if process.pid not in ours:
                for inode in re.findall(r"(\d+) +/dev/shm/", Path(f"/proc/{process.pid}/maps").read_text()):
                    names.pop(inode, None)
    return set(names.values())


def belongings() -> dict[str, Any]:
    """What a run may use but must not leave behind."""
    processes = started()
    return {
        "processes": sorted(filter(None, map(command_of, processes))),
        "zombies": zombies(),
        "listening": listening([psutil.Process(), *processes]),
        "open files": open_files(),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], bool]]:
    """Fails a test that leaves a process, a port, an open file, a temporary file or shared memory behind.

    In the test, `nothing_left(3)` says whether within 3 seconds all processes are gone that have been started since.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    server = fork_server_of(os.getpid())
    if server is not None and MARK not in server.environ():
        kill_fork_server()  # an earlier test's, before there was a mark
    start_fork_server()
    until(lambda: not orphans())  # what an earlier test has killed
    before, memory = belongings(), shared_memory()
    known = started()
    yield lambda seconds: bool(until(lambda: set(started()) <= set(known), seconds + 20))  # more, on a busy machine
    start_fork_server()  # if the test has killed it
    if not until(lambda: belongings() == before and shared_memory() <= memory):  # once is enough: others' memory comes and goes
        left = {what: now for what, now in belongings().items() if now != before[what]}
        was = {what: before[what] for what in left}
        pytest.fail(f"left behind: {left}; before: {was}; in shared memory: {shared_memory() - memory}")


# ---- scripts --------------------------------------------------------------------------------------------------------


def script(path: Path, code: str) -> list[str]:
    """Write a script and return the command that runs it."""
    path.write_text(textwrap.dedent(code))
    return [sys.executable, str(path)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the library on the path."""
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


@contextlib.contextmanager
def running(command: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs while the block does; both its outputs come from one pipe."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment(**more), **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def ending(processes: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """Processes that are gone after the block, however it ends."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> str:
    """Of this machine's, at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def output_of(command: list[str], **more: str) -> str:
    """What a command prints, which must end well."""
    with running(command, **more) as process:
        text, _ = process.communicate(timeout=250)
        assert process.returncode == 0, text
        return text


# ---- notebooks ------------------------------------------------------------------------------------------------------


class Kernel:
    """A real IPython kernel, as a notebook has it."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel  # here, for this file is imported by ranks too

        self.manager, self.client = start_new_kernel(kernel_name="python3", env=environment())
        self.text = self.error = ""
        self.run("import d2lps, functools, os, torch")
        self.run("run = functools.partial(d2lps.run, backend='gloo'); run(lambda comm: None, 1)")  # now there is a fork server

    def start(self, cell: str) -> None:
        """Begin to run a cell."""
        self.text = self.error = ""
        self.client.execute(textwrap.dedent(cell))

    def finish(self, seconds: float = 30.0) -> str:
        """Wait for the end of the cell; return what it showed, or the name of its error."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self.client.get_iopub_msg(timeout=seconds)
                content = message["content"]
                if message["msg_type"] == "stream":
                    self.text += content["text"]
                elif message["msg_type"] == "execute_result":
                    self.text += content["data"]["text/plain"]
                elif message["msg_type"] == "error":
                    self.error = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
                    self.text += content["ename"]
                elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                    self.client.get_shell_msg(timeout=seconds)
                    return self.text
        raise TimeoutError(f"the cell did not end in {seconds} s")

    def run(self, cell: str) -> str:
        self.start(cell)
        return self.finish()

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.context.destroy()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.end()
