"""What goes wrong in a run is named within seconds, and leaves nothing behind.

D2LPS_REPEAT=20 runs every test 20 times.
"""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import contextlib
import ctypes
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launching import Kernel, fork_server_of, kernel, nothing_left, orphans, running, script, until

import d2lps
from d2lps import Communicator, RankDied, RankFailed, RankHung

pytestmark = pytest.mark.usefixtures("nothing_left")
Gone = Callable[[float], bool]
run = functools.partial(d2lps.run, backend="gloo")
LONG = 1000.0  # a timeout that no test lasts for: what happens in such a run is not of it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (times := int(os.environ.get("D2LPS_REPEAT", 1))) > 1:
        metafunc.fixturenames.append("attempt")
        metafunc.parametrize("attempt", range(times))


def line_of(function: Callable[..., Any], line: int) -> int:
    """The number in this file of a function's line, its `def` being line 0."""
    return function.__code__.co_firstlineno + line


def wait_for_ever(comm: Communicator) -> None:
    comm.recv(torch.zeros(1), src=(comm.rank + 1) % comm.size)


# ---- exceptions -----------------------------------------------------------------------------------------------------


def traceback_of(error: BaseException) -> str:
    return str(error.__cause__)


def test_an_exception_is_raised_in_the_caller() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("no such key")
        wait_for_ever(comm)

    with pytest.raises(KeyError) as caught:
        run(work, 3, timeout=LONG)
    assert caught.value.args == ("no such key",)
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]
    assert "Traceback of rank 1 of 3:" in traceback_of(caught.value)
    assert f'File "{__file__}", line {line_of(work, 2)}, in work' in traceback_of(caught.value)
    assert 'raise KeyError("no such key")' in traceback_of(caught.value)


def test_the_earliest_failure_is_raised(tmp_path: Path) -> None:
    class Announced(ValueError):
        def __reduce__(self) -> tuple[Any, ...]:  # called on its way to the caller, when its time has been noted
            (tmp_path / "announced").touch()
            return ValueError, self.args

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise Announced("the cause")
        until((tmp_path / "announced").exists)
        raise ValueError("a consequence")

    with pytest.raises(ValueError, match="the cause") as caught:
        run(work, 3)
    assert caught.value.__notes__ == ["raised by rank 1 of 3"]


class Odd(Exception):
    """It holds a lock, which cannot be sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Speechless(Odd):
    def __str__(self) -> str:
        raise KeyError("words")


@pytest.mark.parametrize(("kind", "told"), [(Odd, "Odd: no further"), (Speechless, "Speechless: <exception str() failed>")])
def test_an_exception_that_cannot_be_carried_is_told(kind: type[Odd], told: str) -> None:
    def work(comm: Communicator) -> None:
        raise kind("no further")

    with pytest.raises(RankFailed) as caught:
        run(work, 1)
    assert str(caught.value) == f"rank 0 of 1 raised {told}"
    assert 'raise kind("no further")' in traceback_of(caught.value)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_rank_that_exits_does_not_end_the_caller(error: BaseException) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise error
        wait_for_ever(comm)

    with pytest.raises(RankFailed, match=f"rank 1 of 2 raised {type(error).__name__}"):
        run(work, 2)


# ---- deaths ---------------------------------------------------------------------------------------------------------


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "crash":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "how, told",
    [
        ("kill", "was killed by SIGKILL"),
        ("exit", "ended with exit status 3 before its function had returned"),
        ("crash", "was killed by SIGSEGV"),
    ],
)
def test_a_death_is_named_while_others_wait(how: str, told: str) -> None:
    def work(comm: Communicator) -> None:
        wait_for_ever(comm) if comm.rank != 1 else die(how)

    with pytest.raises(RankDied) as caught:
        run(work, 3, timeout=LONG)
    assert str(caught.value) == f"rank 1 of 3 {told}"


def test_a_death_tells_the_last_words() -> None:
    def work(comm: Communicator) -> None:
        print("out of cheese", file=sys.stderr)
        die("exit")

    with pytest.raises(RankDied, match="it last wrote: out of cheese"):
        run(work, 1)


# ---- hangs: test_deadlocks.py has those that every world explains -------------------------------------------------------


def hang(work: Callable[..., Any], ranks: int, *args: Any, kind: type[RankHung] = RankHung, timeout: float = 0.5) -> list[str]:
    """The lines that explain why `work` hangs."""
    with pytest.raises(RankHung) as caught:
        run(work, ranks, *args, timeout=timeout)
    assert type(caught.value) is kind, caught.value
    return str(caught.value).splitlines()


def test_a_rank_that_loops_is_found_in_its_line() -> None:
    def work(comm: Communicator) -> None:
        while comm.rank == 1:
            pass
        comm.barrier()

    lines = hang(work, 2)
    assert re.fullmatch(r"  rank 1 is running \(in work, line (\d+): (while comm.rank == 1:|pass)\)", lines[2])


def test_a_rank_that_is_stuck_in_compiled_code_is_found_in_its_line() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            ctypes.CDLL(None).sleep(1000)
        comm.barrier()

    assert hang(work, 2)[2] == f"  rank 1 is running (in work, line {line_of(work, 2)}: ctypes.CDLL(None).sleep(1000))"


def test_a_stopped_rank_is_named() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier()

    assert hang(work, 2)[2].startswith("  rank 1 is stopped (SIGSTOP)")


def test_a_rank_that_was_stopped_while_it_waited_is_named() -> None:
    def work(comm: Communicator) -> None:
        pids = [torch.tensor([0]) for _ in range(3)]
        d2lps.collectives.all_gather(comm, pids, torch.tensor([os.getpid()]))
        if comm.rank == 0:
            victim = psutil.Process(pids[1].item())
            until(lambda: victim.suspend() or victim.status() == psutil.STATUS_STOPPED)
        if comm.rank == 1:
            comm.recv(torch.zeros(1), 0)
        comm.barrier()

    assert hang(work, 3)[2].startswith("  rank 1 is stopped (SIGSTOP)")


def stop_the_first(path: Path) -> None:
    """Stop the process that calls this first, of all that do."""
    with contextlib.suppress(FileExistsError):
        path.touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGSTOP)


class StopsWhereItIsUnpacked:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return stop_the_first, (self.path,)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_is_stopped_before_it_begins_is_named(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2lps.launch.group.START", 1.0)
    with pytest.raises(RankHung) as caught:
        d2lps.run(lambda comm, _: comm.rank, 3, StopsWhereItIsUnpacked(tmp_path / "stopped"), backend=backend, timeout=0.5)
    reason, *lines = str(caught.value).splitlines()
    assert re.fullmatch(r"rank \d has waited for more than timeout=0.5 s", reason)
    stopped, *others = sorted(line.partition(f"rank {rank} ")[2] for rank, line in enumerate(lines))
    assert stopped.startswith("is stopped (SIGSTOP)") and others == ["waits for the others to begin"] * 2


def test_ranks_that_move_are_no_deadlock() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(torch.zeros(1), 1)
        while True:  # busy with one another for ever
            comm.sendrecv(torch.zeros(250_000), 3 - comm.rank, torch.zeros(250_000), 3 - comm.rank)

    reason, *_ = hang(work, 3)
    assert reason == "rank 0 has waited for more than timeout=0.5 s"


def test_the_timeout_bounds_one_wait_and_not_the_run() -> None:
    def work(comm: Communicator) -> None:
        for _ in range(4):
            comm.sleep(0.2)
            comm.barrier()

    assert run(work, 2, timeout=0.6).time > 0.6


# ---- interrupts -----------------------------------------------------------------------------------------------------

WAITING = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import torch
    import d2lps

    folder, option = Path(sys.argv[1]), sys.argv[2]

    def note(who):
        (folder / f"{who}.pid").write_text(str(os.getpid()))

    def work(comm):
        note(comm.rank)
        if comm.rank == 0:
            comm.recv(torch.zeros(1), 1)
        if option == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass

    def fork():
        while not (folder / "0.pid").exists():
            time.sleep(0.01)
        if os.fork() == 0:
            note("fork")
            time.sleep(1000)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
    if option == "forked":
        threading.Thread(target=fork, daemon=True).start()
    try:
        d2lps.run(work, 2, backend="gloo")
    except KeyboardInterrupt:
        print("interrupted")
"""


def pid_in(file: Path) -> int:
    """The process that left a note; 0 if there is none yet."""
    return int(file.read_text() or 0) if file.exists() else 0


@contextlib.contextmanager
def waiting_script(tmp_path: Path, option: str = "running") -> Iterator[subprocess.Popen[str]]:
    """A script in the middle of a run of 2 ranks: one waits, the other loops for ever, or is stopped."""
    with running([*script(tmp_path / "waiting.py", WAITING), str(tmp_path), option]) as process:
        for who in ("0", "1", "fork") if option == "forked" else ("0", "1"):
            assert until(lambda who=who: pid_in(tmp_path / f"{who}.pid"), seconds=30)
        if option == "stopped":
            rank = psutil.Process(pid_in(tmp_path / "1.pid"))
            assert until(lambda: rank.status() == psutil.STATUS_STOPPED)
        yield process


def test_an_interrupt_ends_the_run(tmp_path: Path, nothing_left: Gone) -> None:
    with waiting_script(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
        assert text == "interrupted\n"
        assert nothing_left(0)


def test_an_interrupted_kernel_goes_on(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("run(lambda comm: None, 1)")
    server = fork_server_of(kernel.pid)
    kernel.start(f"""
        def work(comm):
            open({str(tmp_path)!r} + f"/{{comm.rank}}", "w").close()
            comm.recv(torch.zeros(1), 1 - comm.rank)
        run(work, 2)
    """)
    assert until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    kernel.manager.interrupt_kernel()
    assert kernel.finish(60) == "KeyboardInterrupt"
    assert kernel.run("run(lambda comm: comm.rank, 2)") == "Run([0, 1])"
    assert fork_server_of(kernel.pid) == server


# ---- killed from outside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["running", "stopped"])
def test_a_killed_caller_takes_everything_with_it(option: str, tmp_path: Path, nothing_left: Gone) -> None:
    with waiting_script(tmp_path, option) as process:
        process.kill()
        process.wait()
        assert nothing_left(3)


def test_a_fork_of_the_caller_keeps_nothing_alive(tmp_path: Path, nothing_left: Gone) -> None:
    with waiting_script(tmp_path, "forked") as process:
        process.kill()
        process.wait()
        fork = psutil.Process(pid_in(tmp_path / "fork.pid"))  # it lives on, as a child does
        assert until(lambda: orphans() == [fork], seconds=30)
        fork.kill()
        assert nothing_left(1)


def test_a_killed_keeper_takes_its_ranks_with_it(nothing_left: Gone) -> None:
    def work(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            subprocess.Popen(["sleep", "1000"])
            os.kill(os.getppid(), signal.SIGKILL)
        wait_for_ever(comm)

    with pytest.raises(RuntimeError, match="the process that watched over the ranks was killed, and they with it"):
        run(work, 2, timeout=LONG)
    assert nothing_left(1)


@pytest.mark.skipif(sys.platform != "linux", reason="a rank finds them in /proc")
@pytest.mark.parametrize("generation", [0, 1])
def test_a_stopped_keeper_and_a_stopped_fork_server_go_on_for_the_next_run(generation: int) -> None:
    def work(comm: Communicator) -> int:
        if comm.rank == 1:
            comm.sleep(0.2)  # the supervisor has told the caller by now whom it has started
            psutil.Process().parents()[generation].suspend()
        comm.barrier()
        return comm.rank

    assert [run(work, 2, timeout=LONG) for _ in range(2)] == [[0, 1]] * 2


def test_a_fork_server_killed_between_runs_is_replaced() -> None:
    server = fork_server_of(os.getpid())
    server.kill()
    assert run(lambda comm: comm.rank, 2) == [0, 1]
    assert fork_server_of(os.getpid()) != server


def test_a_fork_server_killed_during_a_run_is_not_missed() -> None:
    def work(comm: Communicator) -> int:
        if comm.rank == 0:
            psutil.Process(os.getppid()).parent().kill()
        comm.barrier()
        return comm.rank

    assert run(work, 2) == [0, 1]
    assert run(work, 2) == [0, 1]


# ---- what ranks start -----------------------------------------------------------------------------------------------


def start_children(directory: Path) -> None:
    """A child like any other, one with a session of its own, a daemon whose parent is gone, and forks of both kinds."""
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1001"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 1002 >/dev/null 2>&1 &"], check=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1003,)).start()
    if os.fork() == 0:
        os.setsid()
        time.sleep(1004)
        os._exit(0)
    directory.joinpath("started").touch()


@pytest.mark.parametrize("how", ["returns", "raises", "kill", "hangs"])
def test_what_a_rank_has_started_ends_with_it(how: str, tmp_path: Path, nothing_left: Gone) -> None:
    def work(comm: Communicator, directory: Path) -> None:
        if comm.rank == 1:
            start_children(directory)
            if how == "raises":
                raise ValueError("raises")
            if how == "kill":
                die("kill")
        if how == "hangs":
            wait_for_ever(comm)

    endings = {"returns": contextlib.nullcontext(), "raises": pytest.raises(ValueError), "kill": pytest.raises(RankDied)}
    with endings.get(how, pytest.raises(RankHung)):
        run(work, 2, tmp_path, timeout=0.5)
    assert (tmp_path / "started").exists()
    assert nothing_left(0.5)
