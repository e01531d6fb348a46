"""d2lps.run on this machine: what it calls, what it gives back, and the rules of its messages."""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import io
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import Kernel, fork_server_of, kernel, kill_fork_server, nothing_left, output_of, script, until
from oracles import TORCH

import d2lps
from d2lps import Communicator, Mismatch, RankHung, ReduceOp
from d2lps.collectives import all_reduce, broadcast
from d2lps.launch.group import Output, lines_of
from d2lps.topology import star

Runner = Callable[..., d2lps.Run]


BACKENDS = ["gloo", "shm"] if sys.platform == "linux" else ["gloo"]


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Runner:
    """d2lps.run with each transport that needs no GPU."""
    return partial(d2lps.run, backend=request.param)


@pytest.fixture(params=[*BACKENDS, "simulated"])
def world(request: pytest.FixtureRequest) -> Runner:
    """The same, and a simulated cluster besides: messages and groups have the same rules in every world."""
    if request.param != "simulated":
        return partial(d2lps.run, backend=request.param)
    return lambda function, ranks, *args, **options: d2lps.simulate(function, star(ranks, 1e9, 1e-6), *args, **options)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_results_are_in_rank_order(run: Runner, ranks: int) -> None:
    assert run(lambda comm: (comm.rank, comm.size), ranks) == [(rank, ranks) for rank in range(ranks)]


def test_a_run_is_a_sequence(run: Runner) -> None:
    squares = run(lambda comm: comm.rank**2, 4)
    assert (squares[3], squares[-1], squares[1:3], len(squares)) == (9, 9, [1, 4], 4)
    assert list(squares) == squares.results == [0, 1, 4, 9]
    assert squares == [0, 1, 4, 9] and squares == d2lps.Run([0, 1, 4, 9], time=7.0) and squares != [0, 1, 4]
    assert repr(squares) == "Run([0, 1, 4, 9])"
    assert 9 in squares and sum(squares) == 14


def test_time_is_that_of_the_slowest_rank_without_the_launch(run: Runner) -> None:
    start = time.monotonic()
    result = run(lambda comm: comm.sleep(0.2) if comm.rank == 1 else None, 3)
    assert 0.2 <= result.time < time.monotonic() - start


def test_ranks_start_together(run: Runner) -> None:
    def work(comm: Communicator) -> tuple[float, float]:
        started = comm.now()
        comm.sleep(0.3)
        return started, comm.now()

    times = run(work, 3).results
    assert max(started for started, _ in times) < min(ended for _, ended in times)


def test_a_trace_is_there_when_asked_for(run: Runner) -> None:
    assert len(run(lambda comm: all_reduce(comm, torch.ones(3), algorithm="ring"), 3, trace=True).trace) == 2 * 2 * 3
    with pytest.raises(ValueError, match="this run left no trace: start it with trace=True"):
        _ = run(lambda comm: None, 1).trace


def test_big_results(run: Runner) -> None:
    result = run(lambda comm: torch.full((12_500_000,), float(comm.rank)), 2)
    assert [tensor.nbytes for tensor in result] == [50_000_000] * 2
    assert all(bool((tensor == rank).all()) for rank, tensor in enumerate(result))


def test_of_a_part_of_a_tensor_only_the_part_is_sent() -> None:
    """There and back, in every container, under a parameter; what is whole stays as it is, and one tensor stays one."""
    big = torch.arange(1_000_000.0)
    parts = {"first": big[:2], "column": [big.view(1000, 1000)[:3, 7]], "weight": torch.nn.Parameter(big[5:7]), "none": big[:0]}
    parts |= {"again": parts["first"], "spread": torch.ones(1).expand(4), "history": (torch.ones(9, requires_grad=True) * 2)[3:]}

    def sizes(tensors: Any) -> list[int]:
        flat = [each for value in tensors.values() for each in (value if isinstance(value, list) else [value])]
        return [tensor.untyped_storage().nbytes() for tensor in flat]

    def work(comm: Communicator, parts: Any) -> Any:
        whole = torch.arange(1_000_000.0)
        parts["mine"] = whole[comm.rank : comm.rank + 1]
        return sizes(parts), parts

    for found in (d2lps.run(work, 2, parts), d2lps.simulate(work, star(2, 1e9), parts)):
        for rank, (there, back) in enumerate(found):
            assert there[:7] == [8, 12, 8, 0, 8, 4, 24] and back["mine"].tolist() == [float(rank)]
            assert back["again"] is back["first"] and isinstance(back["weight"], torch.nn.Parameter)
            assert back["history"].requires_grad and back["weight"].tolist() == [5.0, 6.0] == [*big[5:7]]
            assert back["column"][0].tolist() == [7.0, 1007.0, 2007.0] and back["spread"].stride() == (0,)
    assert all(sizes(back) == [8, 12, 8, 0, 8, 4, 24, 4] for _, back in d2lps.run(work, 2, parts))


# ---- what can be run ------------------------------------------------------------------------------------------------


def of_this_module(comm: Communicator) -> tuple[str, int]:
    return __name__, comm.rank


class Adder:
    def __init__(self, start: int) -> None:
        self.start = start

    def add(self, comm: Communicator) -> int:
        return self.start + comm.rank

    def __call__(self, comm: Communicator) -> int:
        return self.start - comm.rank


def test_functions_of_a_module(run: Runner) -> None:
    assert run(of_this_module, 2) == [(__name__, 0), (__name__, 1)]


def test_methods_and_other_callables(run: Runner) -> None:
    assert run(Adder(10).add, 2) == [10, 11]
    assert run(Adder(10), 2) == [10, 9]
    assert run(partial(lambda factor, comm: factor * comm.rank, 5), 2) == [0, 5]


def test_closures_and_nested_functions(run: Runner) -> None:
    factor = 3

    def outer(comm: Communicator) -> int:
        def inner(value: int) -> int:
            return factor * value if value < 2 else inner(value - 1)

        return inner(comm.rank)

    assert run(outer, 4) == [0, 3, 3, 3]


def test_every_rank_has_its_own_copy_of_function_closure_and_arguments(world: Runner) -> None:
    seen: list[int] = []
    shared, function = torch.zeros(2), lambda comm, given: None

    def work(comm: Communicator, given: dict[str, int]) -> tuple[list[int], float, dict[str, int], int]:
        seen.append(comm.rank)
        shared.add_(comm.rank)
        given["rank"] = comm.rank
        work.calls = getattr(work, "calls", 0) + 1  # type: ignore[attr-defined]
        comm.barrier()
        return seen, shared.sum().item(), given, work.calls  # type: ignore[attr-defined]

    given = {"rank": -1}
    run = world(work, 3, given)
    assert run == [([rank], 2.0 * rank, {"rank": rank}, 1) for rank in range(3)]
    assert seen == [] and shared.sum() == 0 and given == {"rank": -1} and not hasattr(work, "calls")
    assert world(function, 3, given) == [None] * 3


def test_a_function_defined_in_a_cell(kernel: Kernel) -> None:
    kernel.run("""
        offset = 10
        class Pair:
            def __init__(self, a, b): self.a, self.b = a, b
        def work(comm):
            print("hello from", comm.rank)
            return Pair(comm.rank, comm.rank + offset)
    """)
    assert kernel.run("[pair.b for pair in run(work, 2)]") == "rank 0 | hello from 0\nrank 1 | hello from 1\n[10, 11]"


def test_the_traceback_of_a_cell_has_its_lines(kernel: Kernel) -> None:
    kernel.run("""
        def broken(comm):
            if comm.rank == 1:
                raise ZeroDivisionError("on purpose")
    """)
    assert kernel.run("run(broken, 2)") == "ZeroDivisionError"
    assert "Traceback of rank 1 of 2" in kernel.error
    assert 'raise ZeroDivisionError("on purpose")' in kernel.error.partition("The above exception was the direct cause")[0]


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    command = script(
        tmp_path / "plain.py",
        """
        import d2lps

        print("imported once")
        def work(comm):
            return helper(comm.rank)
        def helper(rank):
            return rank + 1
        print(d2lps.run(work, 3, backend="gloo"))
        """,
    )
    assert output_of(command) == "imported once\nRun([1, 2, 3])\n"


# ---- what the ranks print -------------------------------------------------------------------------------------------


def test_prints_are_labelled_and_in_rank_order(run: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank + 1 < comm.size:
            comm.recv(torch.zeros(1), comm.rank + 1)  # so the last rank prints first
        print(f"one\nof {comm.rank}")
        print(f"problem of {comm.rank}", file=sys.stderr)
        if comm.rank:
            comm.send(torch.zeros(1), comm.rank - 1)

    run(work, 3)
    out, err = capfd.readouterr()
    assert out == "rank 0 | one\nrank 0 | of 0\nrank 1 | one\nrank 1 | of 1\nrank 2 | one\nrank 2 | of 2\n"
    assert err == "rank 0 | problem of 0\nrank 1 | problem of 1\nrank 2 | problem of 2\n"


def test_what_python_did_not_print_is_shown_too(run: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    def work(comm: Communicator) -> None:
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["sh", "-c", "echo from a subprocess; echo its complaint >&2"], check=True)

    run(work, 1)
    assert capfd.readouterr() == (
        "rank 0 | from Python\nrank 0 | from C\nrank 0 | from a subprocess\n",
        "rank 0 | its complaint\n",
    )


def test_odd_output(run: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    def work(comm: Communicator) -> None:
        print("é\n\nno end", end="")
        sys.stdout.flush()
        os.write(1, b" \xff")

    run(work, 1)
    assert capfd.readouterr().out == "rank 0 | é\nrank 0 | \nrank 0 | no end \ufffd\n"


@pytest.mark.parametrize("live", [False, True])
def test_of_a_line_that_is_rewritten_the_last_state_is_shown(
    run: Runner, live: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(comm: Communicator) -> None:
        for done in range(0, 101, 5):  # a progress bar, and a line of Windows after it
            print(f"\r{done:3d}% of {comm.rank}", end="", file=sys.stderr, flush=True)
            time.sleep(0.01)
        print(file=sys.stderr)
        print("one\rtwo\r\nthree\r\n\r\n50%\r    \rfour\n99%\r   \r", end="", flush=True)

    run(work, 2, live=live)
    out, err = capfd.readouterr()
    assert sorted(err.splitlines()) == ["rank 0 | 100% of 0", "rank 1 | 100% of 1"]
    lines = [f"rank {rank} | {line}" for rank in range(2) for line in ("two", "three", "", "four")]
    assert sorted(out.splitlines()) == sorted(lines) if live else out.splitlines() == lines


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\n\nb", "\n", "a\r\nb\r\n", "\r\n", "é\x0cb\u2028c\n", "a\n\n"])
def test_lines_that_are_not_rewritten_are_as_they_are(text: str) -> None:
    assert lines_of(text) == text.splitlines()


def test_live_leaves_nothing_out_of_a_long_line_that_has_not_ended() -> None:
    with ExitStack() as files:
        output = Output(["rank 0"], files)
        output.out[0].write(b"." * 1_200_000)
        output.out[0].flush()
        assert output._new(output.out[0], whole_lines=True) == output._new(output.out[0], whole_lines=True) == ""
        output.out[0].write(b"\rdone\n")
        output.out[0].flush()
        assert lines_of(output._new(output.out[0], whole_lines=True))[-1] == "done"


def test_of_too_much_output_the_end_is_shown(run: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    run(lambda comm: print(("." * 99 + "\n") * 15_000 + "the end"), 1)
    lines = capfd.readouterr().out.splitlines()
    greeted = (2, 7) <= TORCH < (2, 10) and run.keywords["backend"] == "gloo"
    gloos = 91 if greeted else 0  # what it prints itself
    assert lines[0] == f"rank 0 | ... {500_008 + gloos:,} bytes left out ..."
    assert lines[-1] == "rank 0 | the end"
    assert sum(len(line) - len("rank 0 | ") + 1 for line in lines[1:]) == 1_000_000


def test_what_was_printed_before_a_failure_is_shown(run: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    def work(comm: Communicator) -> None:
        print("as far as here")
        raise ValueError("no further")

    with pytest.raises(ValueError, match="no further"):
        run(work, 1)
    assert capfd.readouterr().out == "rank 0 | as far as here\n"


class Witness(io.StringIO):
    """A standard output that makes a file when something has been written to it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        self.file.touch()
        return super().write(text)


@pytest.mark.parametrize("live", [True, False])
def test_live_shows_lines_before_the_end(run: Runner, live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Witness(tmp_path / "shown"))

    def work(comm: Communicator, shown: Path) -> bool:
        print("a line")
        return bool(until(shown.exists, seconds=10 if live else 0.5))

    assert run(work, 1, tmp_path / "shown", live=live) == [live]
    assert sys.stdout.getvalue() == "rank 0 | a line\n"


# ---- wrong calls ----------------------------------------------------------------------------------------------------

WRONG_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *(
        (partial(d2lps.run, print, ranks), ValueError, f"ranks={ranks!r} is not a number of processes from 1 to 1024")
        for ranks in (0, -1, True, "4", 4.0, 5000)
    ),
    *(
        (partial(d2lps.run, print, 2, timeout=seconds), ValueError, f"timeout={seconds!r} is not a number of seconds above 0")
        for seconds in (0, -1, float("nan"), "5")
    ),
    (lambda: d2lps.run(print, 2, backend="pigeon"), ValueError, "backend='pigeon' is unknown: choose one of 'auto', "),
    (
        lambda: d2lps.run(print, torch.cuda.device_count() + 1, backend="nccl"),
        ValueError,
        f"backend='nccl' needs a GPU for each rank: {torch.cuda.device_count() + 1} ranks, but this machine has ",
    ),
    (lambda: d2lps.run(4, print), TypeError, "run needs a function of a communicator, not 4"),
    (
        lambda: d2lps.run(lambda comm, lock: None, 2, threading.Lock(), backend="gloo"),
        TypeError,
        "the function or its arguments cannot be sent to other processes: cannot pickle '_thread.lock' object",
    ),
]


@pytest.mark.parametrize("call, kind, message", WRONG_CALLS, ids=[message[:20] for _, _, message in WRONG_CALLS])
def test_a_wrong_call_starts_nothing(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    kill_fork_server()
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    server = fork_server_of(os.getpid())
    assert server is None or server.status() == "zombie"


def test_a_result_that_cannot_be_sent_back(run: Runner) -> None:
    with pytest.raises(TypeError) as caught:
        run(lambda comm: threading.Lock() if comm.rank == 1 else 0, 2)
    assert str(caught.value) == (
        "rank 1 returned a lock, which cannot be sent back to the caller (cannot pickle '_thread.lock' object); "
        "return numbers, strings, tensors, or containers of them"
    )


class Unfit:
    """What can be written, and not be read."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return int, ("twelve",)


def test_a_result_that_cannot_be_read_is_told_with_its_rank(run: Runner) -> None:
    with pytest.raises(TypeError, match=r"^what rank 1 returned cannot be read by the caller \(invalid literal .*; return numb"):
        run(lambda comm: Unfit() if comm.rank == 1 else 0, 2)


def test_who_asks_a_run_for_what_its_trace_has_is_told_so() -> None:
    run = d2lps.simulate(lambda comm: None, d2lps.topology.star(1, 1e9))
    with pytest.raises(AttributeError, match=r"^a Run has no 'timeline': its trace has, run.trace.timeline$"):
        run.timeline()
    with pytest.raises(AttributeError, match=r"^a Run has no 'nonsense'$"):
        run.nonsense  # noqa: B018


SWEEP = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import d2lps

def experiment(comm):
    return comm.rank

def measure(ranks):
    return d2lps.run(experiment, ranks).results

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(*pool.map(measure, [1, 2]))
"""


def test_a_child_of_multiprocessing_runs_functions_of_its_script(tmp_path: Path) -> None:
    assert output_of(script(tmp_path / "sweep.py", SWEEP)) == "[0] [0, 1]\n"


# ---- what surrounds a rank ------------------------------------------------------------------------------------------


def test_directory_path_and_environment_are_the_callers(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reader_module.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("D2LPS_GIVEN", "yes")
    monkeypatch.delenv("HOME", raising=False)

    def work(comm: Communicator) -> tuple[Any, ...]:
        import reader_module

        return os.getcwd(), reader_module.value, os.environ.get("D2LPS_GIVEN"), os.environ.get("HOME")

    assert run(work, 2) == [(str(tmp_path), 7, "yes", None)] * 2


def test_an_edited_module_is_read_anew(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def work(comm: Communicator) -> int:
        import edited_module

        return edited_module.value

    for value in (1, 22):
        (tmp_path / "edited_module.py").write_text(f"value = {value}\n")
        assert run(work, 1) == [value]


def test_a_rank_computes_in_one_thread(run: Runner) -> None:
    assert run(lambda comm: torch.get_num_threads(), 2) == [1, 1]


def test_random_numbers_differ_by_rank_and_repeat_by_run(run: Runner) -> None:
    def draw(comm: Communicator) -> list[int]:
        return torch.randint(2**31, (4,), generator=comm.generator).tolist()

    first = run(draw, 3)
    assert len({tuple(numbers) for numbers in first}) == 3
    assert run(draw, 3) == first


def test_ranks_do_not_share_the_state_of_other_generators(run: Runner) -> None:
    drawn = run(lambda comm: (random.random(), float(np.random.rand())), 3)
    assert len({number for pair in drawn for number in pair}) == 6


def test_ranks_listen_on_the_loopback_interface_alone(run: Runner) -> None:
    def work(comm: Communicator) -> list[str]:
        import psutil

        connections = psutil.Process().net_connections("inet")
        return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]

    addresses = [address for addresses in run(work, 2) for address in addresses]
    assert all(address.removeprefix("::ffff:") == "127.0.0.1" for address in addresses)
    assert bool(addresses) == (run.keywords["backend"] == "gloo")  # shared memory needs none


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_cannot_open_the_store_where_ranks_meet(run: Runner) -> None:
    def work(comm: Communicator) -> list[list[int]]:
        d2lps.backend.group(comm)  # in a run over shared memory, this makes the first store
        files = [f"/proc/{os.getpid()}/fd/{number}" for number in os.listdir("/proc/self/fd")]
        stores = [file for file in files if os.path.exists(file) and "d2lps store" in os.readlink(file)]
        comm.barrier()
        opened = partial(subprocess.run, capture_output=True)
        return [[opened(["cat", file], user=user).returncode for user in (0, 65534)] for file in stores]

    zero, *others = run(work, 2)
    assert zero == [[0, 1]] and all(other in ([], [[0, 1]]) for other in others)


def test_a_rank_and_its_caller_may_have_no_standard_output(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Communicator) -> int:
        print("a line, and then", end=" ")
        os.write(2, b"as it were\n")
        sys.stdout = sys.stderr = None
        return comm.rank

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert run(work, 2) == [0, 1]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run(work, 2) == [0, 1]
    assert sys.stdout.getvalue() == "rank 0 | a line, and then \nrank 1 | a line, and then \n"


def test_too_few_open_files_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    command = script(
        tmp_path / "few.py",
        """
        import os, resource
        import d2lps

        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        print(d2lps.run(lambda comm: comm.rank, 2, backend="gloo"))
        before = len(os.listdir("/dev/fd"))
        try:
            d2lps.run(lambda comm: comm.rank, 64, backend="gloo")
        except OSError as error:
            print(error)
        print(len(os.listdir("/dev/fd")) - before)
        """,
    )
    first, told, left = output_of(command).splitlines()
    assert (first, left) == ("Run([0, 1])", "0")
    wanted = r"\[Errno 24\] 64 ranks take up to 332 open files here beside the \d that are open, and this process may have 256: "
    assert re.fullmatch(wanted + r"raise it \(ulimit -n\), or run fewer", told)


@pytest.mark.parametrize("ranks", [2, 5])
def test_where_a_run_is_not_refused_there_are_open_files_enough(tmp_path: Path, ranks: int) -> None:
    """With as many as the words ask for, and no more, it runs."""
    command = script(
        tmp_path / "enough.py",
        f"""
        import os, re, resource
        import d2lps

        def attempt(most):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            return d2lps.run(lambda comm: comm.rank, {ranks}, backend="gloo")

        attempt(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # starts the fork server
        there = len(os.listdir("/dev/fd"))
        try:
            attempt(there)
        except OSError as error:
            needed = int(re.search("up to ([0-9]+)", str(error))[1])
        print(attempt(there + needed))
        """,
    )
    assert output_of(command) == f"Run({[*range(ranks)]})\n"


def test_a_working_directory_that_was_deleted_is_an_error_that_says_so(tmp_path: Path) -> None:
    command = script(
        tmp_path / "gone.py",
        """
        import os, sys
        import d2lps

        os.mkdir(sys.argv[0] + ".d")
        os.chdir(sys.argv[0] + ".d")
        os.rmdir(sys.argv[0] + ".d")
        try:
            d2lps.run(lambda comm: comm.rank, 2, backend="gloo")
        except FileNotFoundError as error:
            print(error)
        os.chdir("/")
        print(d2lps.run(lambda comm: os.getcwd(), 1, backend="gloo"))
        """,
    )
    told = "[Errno 2] the working directory, in which the ranks would start, has been deleted: os.chdir to one that is there"
    assert output_of(command) == f"{told}\nRun(['/'])\n"


# ---- many runs ------------------------------------------------------------------------------------------------------


def sum_of(run: Runner, value: int) -> list[float]:
    """A run of 2 ranks whose result can only be its own."""

    def work(comm: Communicator) -> float:
        tensor = torch.full((100,), float(value))
        all_reduce(comm, tensor)
        return tensor.sum().item()

    return run(work, 2).results


def test_a_run_inside_a_rank(run: Runner) -> None:
    def work(comm: Communicator) -> list[int]:
        if comm.rank == 1:
            return d2lps.run(lambda inner: inner.rank + 10, 2, backend="gloo").results
        return []

    assert run(work, 2) == [[], [10, 11]]


def test_what_one_run_makes_torch_import_is_there_for_the_next() -> None:
    def make_an_optimizer(comm: Communicator) -> bool:
        there = "torch._dynamo" in sys.modules  # imported by torch for the first optimizer, which takes it a second
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return there

    kill_fork_server()
    assert d2lps.run(make_an_optimizer, 1) == [False]
    assert d2lps.run(make_an_optimizer, 2) == [True, True]


def test_eight_runs_at_once_from_threads(run: Runner) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda value: sum_of(run, value), range(8))) == [[200.0 * value] * 2 for value in range(8)]


def test_eight_runs_at_once_from_processes(run: Runner) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=lambda v=value: answers.put((v, sum_of(run, v)))) for value in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(answers.get() for _ in processes) == [(value, [200.0 * value] * 2) for value in range(8)]


def test_fifty_runs_in_a_row_leave_nothing(run: Runner, nothing_left: None) -> None:
    for value in range(50):
        assert sum_of(run, value) == [200.0 * value] * 2


# ---- messages -------------------------------------------------------------------------------------------------------


def test_messages_of_one_tag_arrive_in_order_both_ways(world: Runner) -> None:
    def work(comm: Communicator) -> list[float]:
        rooms, other, works = [torch.zeros(1) for _ in range(5)], 1 - comm.rank, []
        for number, room in enumerate(rooms):
            works += [comm.irecv(room, other, tag=3), comm.isend(torch.tensor([float(number)]), other, tag=3)]
        for transfer in reversed(works):  # the order of waiting does not matter
            transfer.wait()
        return [room.item() for room in rooms]

    assert world(work, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def test_tags_and_sources_are_received_in_any_order(world: Runner) -> None:
    def work(comm: Communicator) -> list[float]:
        if comm.rank < 2:
            works = [comm.isend(torch.tensor([tag + comm.rank / 2], dtype=torch.float64), 2, tag) for tag in (0, 1, 2**31 - 1)]
            for transfer in works:
                transfer.wait()
            return []
        received = []
        for src, tag in [(1, 2**31 - 1), (0, 1), (1, 0), (0, 2**31 - 1), (0, 0), (1, 1)]:
            comm.recv(into := torch.zeros(1, dtype=torch.float64), src, tag)
            received.append(into.item())
        return received

    assert world(work, 3)[2] == [2**31 - 0.5, 1.0, 0.5, 2**31 - 1.0, 0.0, 1.5]


def test_a_work_knows_without_waiting_whether_it_is_complete(run: Runner) -> None:
    def work(comm: Communicator) -> list[Any]:
        other, into = 1 - comm.rank, torch.zeros(1)
        comm.barrier()
        if comm.rank == 0:  # rank 1 posts nothing before it has seen this rank's first test
            transfers = [comm.irecv(into, other, tag=1), comm.isend(torch.ones(1), other, tag=2)]
            before = [transfer.test() for transfer in transfers]
            comm.barrier()
        else:
            comm.barrier()
            transfers, before = [comm.isend(torch.ones(1), other, tag=1), comm.irecv(into, other, tag=2)], [False, False]
        after = until(lambda: all(transfer.test() for transfer in transfers))
        for transfer in transfers:
            transfer.wait()  # returns at once
        return [before, after, into.item()]

    assert run(work, 2) == [[[False, False], True, 1.0]] * 2


def test_strided_tensors_at_both_ends(world: Runner) -> None:
    def work(comm: Communicator) -> torch.Tensor:
        if comm.rank == 0:
            comm.send(torch.arange(6.0).view(2, 3).t(), 1)  # 0 3 1 4 2 5
            return torch.empty(0)
        into = torch.full((2, 6), -1.0)
        comm.recv(into[:, ::2], 0)
        return into

    assert world(work, 2)[1].tolist() == [[0, -1, 3, -1, 1, -1], [4, -1, 2, -1, 5, -1]]


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Of complex ones torch only notes that they are to be conjugated."""
    return (torch.tensor([0, 1, 3]) * (1 + 2j if dtype.is_complex else 1)).to(dtype).conj()


def test_every_dtype(world: Runner) -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        received = []
        for dtype in DTYPES:
            tensor = numbers(dtype)
            if comm.rank == 0:
                comm.send(tensor, 1)
            else:
                comm.recv(into := torch.zeros_like(tensor), 0)
                received.append(into)
        return received

    for dtype, tensor in zip(DTYPES, world(work, 2)[1], strict=True):
        assert tensor.dtype == dtype and torch.equal(tensor, numbers(dtype))


def test_the_worlds_own_sum_takes_tensors_of_any_shape(run: Runner) -> None:
    def work(comm: Communicator) -> list[list[float]]:
        matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).t()
        comm.native_all_reduce(matrix, ReduceOp.SUM)
        return matrix.tolist()

    assert run(work, 2) == [[[2.0, 6.0, 10.0], [4.0, 8.0, 12.0]]] * 2


def test_tensors_without_elements_or_dimensions_or_with_gradients(world: Runner) -> None:
    def work(comm: Communicator) -> tuple[float, float]:
        empty, scalar = torch.zeros(0), torch.tensor(float(7 - 7 * comm.rank))
        learned = torch.full((2,), 5.0 - 5.0 * comm.rank, requires_grad=True)
        for tensor in (empty, scalar, learned, empty):
            comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0)
        return scalar.item(), learned.sum().item()

    assert world(work, 2)[1] == (7.0, 10.0)


ITSELF = " is this rank itself: a rank sends no message to itself, use comm.copy"
WRONG_MESSAGES: list[tuple[str, Callable[[Communicator], Any], str]] = [
    ("self", lambda comm: comm.send(torch.zeros(1), 0), "dst=0" + ITSELF),
    ("self", lambda comm: comm.recv(torch.zeros(1), 0), "src=0" + ITSELF),
    ("rank", lambda comm: comm.send(torch.zeros(1), 2), "dst=2 is not a rank of this group of 2 (0 to 1)"),
    ("rank", lambda comm: comm.recv(torch.zeros(1), -1), "src=-1 is not a rank of this group of 2 (0 to 1)"),
    ("rank", lambda comm: comm.isend(torch.zeros(1), True), "dst=True is not a rank of this group of 2 (0 to 1)"),
    ("rank", lambda comm: comm.irecv(torch.zeros(1), 1.0), "src=1.0 is not a rank of this group of 2 (0 to 1)"),
    ("tag", lambda comm: comm.send(torch.zeros(1), 1, -1), "tag=-1 is not an integer from 0 to 2**31 - 1"),
    ("tag", lambda comm: comm.recv(torch.zeros(1), 1, 2**31), "tag=2147483648 is not an integer from 0 to 2**31 - 1"),
    ("tag", lambda comm: comm.send(torch.zeros(1), 1, "a"), "tag='a' is not an integer from 0 to 2**31 - 1"),
    ("tensor", lambda comm: comm.send([1, 2], 1), "a message is a torch.Tensor, not list: [1, 2]"),
    ("tensor", lambda comm: comm.recv(None, 1), "a message is a torch.Tensor, not NoneType: None"),
    (
        "sendrecv",
        lambda comm: comm.sendrecv(torch.zeros(1), 1, torch.zeros(1), 5),
        "src=5 is not a rank of this group of 2 (0 to 1)",
    ),
    ("split", lambda comm: comm.split("red"), "color must be None or an integer below 2**62, not 'red'"),
    ("split", lambda comm: comm.split(0, key=True), "key must be None or an integer below 2**62, not True"),
]


def test_a_wrong_message_is_refused_before_anything_moves(world: Runner) -> None:
    def work(comm: Communicator) -> list[str]:
        said = []
        for _, call, _ in WRONG_MESSAGES if comm.rank == 0 else []:
            try:
                call(comm)
            except (TypeError, ValueError) as error:
                said.append(str(error))
        comm.sendrecv(torch.ones(1), 1 - comm.rank, into := torch.zeros(1), 1 - comm.rank)  # all is well afterwards
        return [*said, str(into.item())]

    assert world(work, 2) == [[message for _, _, message in WRONG_MESSAGES] + ["1.0"], ["1.0"]]


def test_a_tensor_without_contents_is_refused_and_does_no_harm(run: Runner) -> None:
    def work(comm: Communicator) -> float:
        for algorithm in ("ring", "native"):
            with pytest.raises(NotImplementedError, match="meta tensor"):
                all_reduce(comm, torch.ones(3, device="meta"), algorithm=algorithm)
        all_reduce(comm, tensor := torch.ones(1))
        return tensor.item()

    assert run(work, 2) == [2.0, 2.0]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sendrecv_goes_round_a_ring_without_deadlock(world: Runner, ranks: int) -> None:
    def work(comm: Communicator) -> list[float]:
        passing, seen = torch.tensor([float(comm.rank)]), []
        for _ in range(comm.size):
            comm.sendrecv(passing, (comm.rank + 1) % comm.size, into := torch.zeros(1), (comm.rank - 1) % comm.size)
            passing = into
            seen.append(into.item())
        return seen

    assert world(work, ranks) == [[(rank - 1 - step) % ranks for step in range(ranks)] for rank in range(ranks)]


def test_nobody_leaves_a_barrier_before_the_last_has_come(world: Runner) -> None:
    def work(comm: Communicator) -> tuple[float, float]:
        comm.sleep(0.1 * comm.rank)
        came = comm.now()
        comm.barrier()
        return came, comm.now()

    times = world(work, 3).results
    assert max(came for came, _ in times) <= min(left for _, left in times)


# ---- messages that do not fit -----------------------------------------------------------------------------------------

MISFITS: list[tuple[torch.Tensor, torch.Tensor, str, str]] = [
    (torch.ones(2), torch.zeros(4), "float32[2]", "float32[4]"),
    (torch.ones(200_000), torch.zeros(2), "float32[200000]", "float32[2]"),
    (torch.ones(4), torch.zeros(4, dtype=torch.int32), "float32[4]", "int32[4]"),
    (torch.ones(2, 3), torch.zeros(0), "float32[6]", "float32[0]"),
]


@pytest.mark.parametrize("tag", [0, 2**31 - 1])
@pytest.mark.parametrize("sent, room, sends, expects", MISFITS, ids=[f"{sends}-{expects}" for _, _, sends, expects in MISFITS])
def test_a_message_that_does_not_fit_is_a_mismatch_at_both_ends(
    run: Runner, sent: torch.Tensor, room: torch.Tensor, sends: str, expects: str, tag: int
) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(Mismatch) as caught:
            comm.send(sent, 1, tag) if comm.rank == 0 else comm.recv(room, 0, tag)
        comm.sendrecv(torch.ones(1), 1 - comm.rank, into := torch.zeros(1), 1 - comm.rank, tag)  # all is well afterwards
        return f"{caught.value} {into.item()}"

    said = f"message from rank 0 to rank 1, tag {tag}: the sender sends {sends}, the receiver expects {expects} 1.0"
    assert run(work, 2) == [said] * 2


def test_a_ring_in_which_one_rank_has_another_length_is_a_mismatch(world: Runner) -> None:
    with pytest.raises(Mismatch, match=r"message from rank 2 to rank 0|message from rank 1 to rank 2"):
        world(lambda comm: all_reduce(comm, torch.ones(30 if comm.rank == 2 else 60), algorithm="ring"), 3)


def test_a_message_that_is_late_fits_all_the_same(world: Runner) -> None:
    def work(comm: Communicator) -> float:
        arriving = comm.irecv(into := torch.zeros(3), 1 - comm.rank)
        comm.sleep(0.5 * comm.rank)  # the others compare what has waited for so long
        comm.send(torch.full((3,), comm.rank + 1.0), 1 - comm.rank)
        comm.sleep(0.5)
        arriving.wait()
        return into.sum().item()

    assert world(work, 2) == [6.0, 3.0]


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_split_by_color_key_and_none(world: Runner) -> None:
    def work(comm: Communicator) -> list[Any]:
        groups = [
            comm.split(comm.rank % 2),
            comm.split(0, key=-comm.rank),
            comm.split(None if comm.rank == 1 else -7),
            comm.split(comm.rank),
        ]
        return [group and (group.rank, group.members) for group in groups]

    assert world(work, 4) == [
        [(0, [0, 2]), (3, [3, 2, 1, 0]), (0, [0, 2, 3]), (0, [0])],
        [(0, [1, 3]), (2, [3, 2, 1, 0]), None, (0, [1])],
        [(1, [0, 2]), (1, [3, 2, 1, 0]), (1, [0, 2, 3]), (0, [2])],
        [(1, [1, 3]), (0, [3, 2, 1, 0]), (2, [0, 2, 3]), (0, [3])],
    ]


def test_a_split_of_a_split(world: Runner) -> None:
    def work(comm: Communicator) -> Any:
        half = comm.split(comm.rank // 3)
        ends = half.split(None if half.rank == 1 else 0, key=-half.rank)
        if ends is None:
            return None
        all_reduce(ends, total := torch.tensor([float(comm.rank)]))
        return ends.rank, ends.members, total.item()

    assert world(work, 6) == [(1, [2, 0], 2.0), None, (0, [2, 0], 2.0), (1, [5, 3], 8.0), None, (0, [5, 3], 8.0)]


def test_messages_of_different_groups_never_meet(world: Runner) -> None:
    def work(comm: Communicator) -> list[float]:
        both = comm.split(0)
        if comm.rank == 0:
            first, second = comm.isend(torch.tensor([1.0]), 1), both.isend(torch.tensor([2.0]), 1)
            first.wait(), second.wait()
            return []
        both.recv(of_both := torch.zeros(1), 0)
        comm.recv(of_world := torch.zeros(1), 0)
        return [of_world.item(), of_both.item()]

    assert world(work, 2)[1] == [1.0, 2.0]


# ---- the debug mode -------------------------------------------------------------------------------------------------


def meet(sent: int, expected: int, dtype: torch.dtype = torch.float32) -> Callable[[Communicator], None]:
    """The ranks 0 and 1, or 1 and 3 of 4, have a message whose ends may differ."""

    def work(comm: Communicator) -> None:
        pair = comm.split(comm.rank % 2) if comm.size == 4 else comm
        if pair is comm or comm.rank % 2:
            pair.send(torch.zeros(sent), 1) if pair.rank == 0 else pair.recv(torch.zeros(expected, dtype=dtype), 0)

    return work


ENDS = "message from rank {} to rank {}, tag 0: the sender sends float32[4], the receiver expects {}"
DISAGREEMENTS: dict[str, tuple[int, Callable[[Communicator], None], str]] = {
    "dtype": (2, meet(4, 4, torch.int32), ENDS.format(0, 1, "int32[4]")),
    "too short": (2, meet(4, 3), ENDS.format(0, 1, "float32[3]")),
    "too long": (2, meet(4, 5), ENDS.format(0, 1, "float32[5]")),
    "in a group, by the run's numbers": (4, meet(4, 3), ENDS.format(1, 3, "float32[3]")),
    "collective": (
        2, lambda comm: all_reduce(comm, torch.zeros(3)) if comm.rank else broadcast(comm, torch.zeros(3)),
        "rank 0 calls broadcast(tensor=float32[3], src=0, algorithm=tree); "
        "rank 1 calls all_reduce(tensor=float32[3], op=SUM, algorithm=ring)",
    ),  # test_collectives.py has more of these
}  # fmt: skip


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_debug_names_what_differs(world: Runner, what: str) -> None:
    ranks, work, said = DISAGREEMENTS[what]
    with pytest.raises(Mismatch) as caught:
        world(work, ranks, debug=True)
    assert str(caught.value).removeprefix("the ranks disagree: ") == said


@pytest.mark.parametrize("letter", ["a", "é", "\U0001f600", "\x1f", '"'])
def test_long_statements_in_any_letters_are_compared(world: Runner, letter: str) -> None:
    def work(comm: Communicator) -> None:
        comm.agree(letter * 1000)
        comm.agree(letter * 1000 if comm.rank else "short")

    with pytest.raises(Mismatch, match="rank 0 calls short; rank 1 calls " + letter * 60):
        world(work, 2)


def test_debug_changes_no_result(world: Runner) -> None:
    def work(comm: Communicator) -> list[float]:
        pair = comm.split(comm.rank // 2)
        tensor = torch.full((5,), 1.0 + comm.rank)
        all_reduce(comm, tensor)
        all_reduce(pair, tensor, algorithm="tree")
        works = [comm.isend(tensor, (comm.rank + 1) % 4), comm.irecv(into := torch.zeros(5), (comm.rank - 1) % 4)]
        for transfer in works:
            transfer.wait()
        return into.tolist()

    assert world(work, 4, debug=True) == [[20.0] * 5] * 4


def test_debug_still_finds_a_deadlock(run: Runner) -> None:
    with pytest.raises(RankHung, match="rank 0 -> rank 1 -> rank 0"):
        run(lambda comm: comm.recv(torch.zeros(1), 1 - comm.rank), 2, debug=True, timeout=0.5)
