"""d2lps.run in a job that a launcher has started: torchrun, or any that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Starting such a job takes seconds, so a script runs much in one go, and each test looks at what one part of it left.
"""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from launching import ending, environment, free_port, nothing_left, output_of, running, script, started, until
from oracles import TORCH

import d2lps
from d2lps.comm.rank import SEED
from d2lps.launch.launched import JOB_VARIABLES, under_launcher

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]

# Every script begins with this: note(name, call) leaves what a call gave or raised, and how long it took, in a file.
NOTES = """
import json, os, sys, time
import torch
import torch.distributed as dist
import d2lps
from d2lps.collectives import all_reduce

def note(name, call):
    start = time.monotonic()
    try:
        found = call()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    rank = os.environ["RANK"]
    with open(os.path.join(sys.argv[1], f"{name}.{rank}"), "w") as file:
        json.dump([time.monotonic() - start, found], file)

def run(function, *args, ranks=4, **options):
    return d2lps.run(function, ranks, *args, backend="gloo", **options)
"""


def notes_of(directory: Path, name: str) -> list[Any]:
    """What each of the 4 ranks noted, by rank."""
    return [json.loads((directory / f"{name}.{rank}").read_text())[1] for rank in range(4)]


def seconds_of(directory: Path, name: str) -> list[float]:
    return [json.loads((directory / f"{name}.{rank}").read_text())[0] for rank in range(4)]


def job(path: Path, code: str) -> list[str]:
    return [*script(path, NOTES + textwrap.dedent(code)), str(path.parent)]


# A rank that lets go of gloo's groups while one of their threads still lets go of a tensor.
waits_for_its_threads = pytest.mark.skipif(TORCH < (2, 7), reason="torch 2.6 may wait for ever for the threads of its own groups")


# ---- under torchrun -------------------------------------------------------------------------------------------------

MANY_RUNS = """
def work(comm, add):
    tensor = torch.full((8,), float(comm.rank + add))
    all_reduce(comm, tensor, algorithm="ring")
    return tensor[0].item()

def traced():
    result = run(work, 1, trace=True)
    return [result.results, len(result.trace), result.trace.bytes_sent().tolist(), result.time]

note("traced", traced)

def draw(where):
    return torch.rand(3).tolist()

def random_numbers():
    torch.manual_seed(100 + int(os.environ["RANK"]))
    drawn = [run(draw).results, run(draw).results, d2lps.kvstore.run(draw, 3, 1, backend="gloo").results]
    mine = torch.rand(3).tolist()
    torch.manual_seed(100 + int(os.environ["RANK"]))
    return [drawn, mine == torch.rand(3).tolist()]

note("random", random_numbers)
note("second", lambda: run(work, 2).results)
note("too few", lambda: run(work, 0, ranks=3))

def outer(comm):
    if comm.rank == 2:
        return d2lps.run(lambda inner: [inner.rank, inner.size, os.getppid(), "RANK" in os.environ], 2, backend="gloo").results
    comm.barrier() if comm.size < 4 else None

note("nested", lambda: run(outer).results)
note("slow", lambda: run(lambda comm: comm.sleep(3) if comm.rank == 1 else comm.rank, timeout=1.5).results)

def meet(comm, expected):
    if comm.rank == 0:
        comm.send(torch.zeros(2), 1)
    if comm.rank == 1:
        comm.recv(torch.zeros(expected), 0)

note("mismatch", lambda: run(meet, 3, debug=True))
note("after a mismatch", lambda: run(meet, 2, debug=True).results)

def fail(comm):
    if comm.rank == 1:
        raise RuntimeError("on purpose")
    if comm.rank == 2:
        comm.barrier()

note("failure", lambda: run(fail, timeout=1000))

def fail_early(comm, then):
    if comm.rank == 1:
        raise RuntimeError("on purpose")
    if comm.rank == 2:                  # what it posts meets a connection that is closed already
        comm.sleep(1.0)
        then(comm)

LATE = {
    "all-reduce": lambda comm: all_reduce(comm, torch.ones(8)), "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(torch.ones(8), 1),
}
for name, then in LATE.items():
    note("late to a" + "n" * (name[0] == "a") + " " + name, lambda: run(fail_early, then, timeout=20))

def alone(comm):
    if comm.rank == 0:
        dist.all_reduce(torch.ones(2))

note("by itself", lambda: run(alone, timeout=4))

def hang(comm):
    if comm.rank == 0:
        comm.recv(torch.zeros(2), 1)

note("hang", lambda: run(hang, timeout=1))

def fail_within(comm):
    kept = [comm.split(0)]
    kept.append(kept)           # as a module and its hooks know one another: what is left when the function has failed
    if comm.rank == 1:
        raise RuntimeError("on purpose")
    all_reduce(kept[0], torch.ones(8))

note("failure within a group", lambda: run(fail_within, timeout=1000))

def fail_beside(comm):
    if comm.rank == 1:
        raise RuntimeError("on purpose")
    comm.start(all_reduce, torch.ones(8)).wait()

note("failure beside", lambda: run(fail_beside, timeout=2))
note("at last", lambda: run(work, 3).results)
run(fail)
"""


class Job(NamedTuple):
    """A job that has ended: its notes, its exit status, what it printed, and the processes that it has left behind."""

    folder: Path
    status: int
    text: str
    left: list[psutil.Process]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The script above, under torchrun; whose own temporary files are its own affair."""
    folder = tmp_path_factory.mktemp("job")
    known = set(started())
    with running([*TORCHRUN, *job(folder / "many_runs.py", MANY_RUNS)[1:]], TMPDIR=str(folder)) as process:
        text, _ = process.communicate(timeout=250)
    until(lambda: set(started()) <= known, seconds=10)
    return Job(folder, process.returncode, text, sorted(set(started()) - known))


def test_every_rank_gets_every_result_and_the_whole_trace(noted: Job) -> None:
    rows = notes_of(noted.folder, "traced")
    assert rows == [rows[0]] * 4
    results, messages, sent, seconds = rows[0]
    assert (results, messages, sent) == ([10.0] * 4, 2 * 3 * 4, [2 * 3 * 8] * 4)
    assert 0 < seconds < seconds_of(noted.folder, "traced")[0]


def test_random_numbers_are_alike_in_every_rank_and_run_and_the_callers_own_go_on(noted: Job) -> None:
    begin = torch.rand(3, generator=torch.Generator().manual_seed(SEED)).tolist()
    assert notes_of(noted.folder, "random") == [[[[begin] * 4, [begin] * 4, [begin] * 3], True]] * 4


def test_a_nested_run_starts_processes_of_its_own(noted: Job) -> None:
    results = notes_of(noted.folder, "nested")
    assert results == [results[0]] * 4
    nested = results[0][2]
    assert [(rank, size, inherited) for rank, size, _, inherited in nested] == [(0, 2, False), (1, 2, False)]
    assert results[0][0] is results[0][1] is results[0][3] is None


# What came of each part of the script, on each rank: what it returned, or what its error begins with; ... is any.
ON_PURPOSE = "RuntimeError: on purpose"
MISMATCH = "Mismatch: message from rank 0 to rank 1, tag 0: the sender sends float32[2], the receiver expects float32[3]"
FEWER = "ValueError: ranks=3, but this job was launched with WORLD_SIZE=4 processes: they must be equal"


def after(why: str, function: str = "fail") -> str:
    """Why a rank's run has failed: what rank 1 raised in this function."""
    return rf'RankFailed: {why}: rank 1 raised {ON_PURPOSE} \(in {function}, line \d+: raise RuntimeError\("on purpose"\)\)'


def hung(seconds: int, where: str) -> str:
    return rf"RankHung: rank 0 has waited for more than timeout={seconds} s\n  rank 0 {where}"


ENDINGS: dict[str, list[Any]] = {
    "second": [[14.0] * 4] * 4,
    "too few": [re.escape(FEWER)] * 4,
    "slow": [[0, None, 2, 3]] * 4,
    "mismatch": [re.escape(MISMATCH)] * 2 + [...] * 2,
    "after a mismatch": [[None] * 4] * 4,
    "failure": [
        after("rank 0 has returned, but another rank has failed") + "$",
        ON_PURPOSE,
        after("rank 2 has lost another rank") + r"\n  rank 2 waits at a barrier \(in ",
        after("rank 3 has returned, but another rank has failed") + "$",
    ],
    **{
        f"late to a{what}": [..., ON_PURPOSE, after("rank 2 has lost another rank", "fail_early") + r"\n  rank 2 waits ", ...]
        for what in ("n all-reduce", " barrier", " send")
    },
    # Torch's own calls are bounded, and told with their line.
    "by itself": [
        hung(4, r"calls torch.distributed by itself \(in alone, line \d+: dist.all_reduce\(torch.ones\(2\)\)\)$"), ..., ..., ...
    ],
}  # fmt: skip
HANGING: dict[str, list[Any]] = {
    "failure within a group": [
        after("rank 0 has lost another rank", "fail_within") + r"\n  rank 0 waits for rank ", ON_PURPOSE, *["RankFailed"] * 2
    ],
    "failure beside": [
        hung(2, r"waits for the others to call start \(in fail_beside, line \d+: comm.start\("), ON_PURPOSE, ..., ...
    ],
    "hang": [
        hung(1, r"waits for rank 1 to send 8 B, tag 0 \(in hang, line \d+: comm.recv\(torch.zeros\(2\), 1\)\)$"),
        *["RankFailed: .*another rank has failed"] * 3,
    ],
    "at last": [[18.0] * 4] * 4,
}  # fmt: skip


@pytest.mark.parametrize("name", [*ENDINGS, *(pytest.param(name, marks=waits_for_its_threads) for name in HANGING)])
def test_every_rank_hears_what_came_of_a_run(name: str, noted: Job) -> None:
    for rank, (wanted, found) in enumerate(zip((ENDINGS | HANGING)[name], notes_of(noted.folder, name), strict=True)):
        assert wanted is ... or (re.match(wanted, found) if isinstance(wanted, str) else found == wanted), (rank, found)


@waits_for_its_threads
def test_a_failing_rank_fails_the_job_and_leaves_nothing(noted: Job) -> None:
    assert noted.status == 1
    assert "RuntimeError: on purpose" in noted.text
    assert noted.left == []


# ---- under anything else --------------------------------------------------------------------------------------------


def start_by_hand(command: list[str]) -> list[subprocess.Popen[bytes]]:
    """Four processes with the variables that torch calls env://, and no launcher that would watch over them."""
    job_of_4 = environment(WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), OMP_NUM_THREADS="1")
    return [subprocess.Popen(command, env=job_of_4 | {"RANK": str(rank)}) for rank in range(4)]


def test_any_launcher_will_do_and_a_killed_rank_is_noticed(tmp_path: Path, nothing_left: object) -> None:
    code = """
        def work(comm):
            all_reduce(comm, total := torch.tensor([float(comm.rank)]))
            return total.item()
        note("sum", lambda: run(work).results)

        def lose(comm):
            if comm.rank == 3:
                os.kill(os.getpid(), 9)
            comm.recv(torch.zeros(1), 3)
        note("loss", lambda: run(lose, timeout=1000))
        note("too few", lambda: run(work, timeout=1))
    """
    processes = start_by_hand(job(tmp_path / "by_hand.py", code))
    deadline = time.monotonic() + 250
    with ending(processes):
        codes = [process.wait(deadline - time.monotonic()) for process in processes]
    assert codes == [0, 0, 0, -signal.SIGKILL]
    assert notes_of(tmp_path, "sum") == [[6.0] * 4] * 4
    for rank in range(3):
        told = json.loads((tmp_path / f"loss.{rank}").read_text())[1]
        assert told.startswith(f"RankFailed: rank {rank} has lost another rank")
        assert f"rank {rank} waits for rank 3 to send 4 B, tag 0 (in lose, " in told
    told = json.loads((tmp_path / "too few.0").read_text())[1]
    waited = r"RankHung: rank \d has waited for more than timeout=1 s for every rank of the job to call run; not so .*rank 3"
    assert re.fullmatch(waited, told)


# ---- a job whose others never come ----------------------------------------------------------------------------------

MEETING = """
import signal, sys, d2lps
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts tests in the background may ignore it
print("begins", flush=True)
try:
    d2lps.run(lambda comm: comm.rank, 2, timeout=float(sys.argv[1]))
except BaseException as error:
    print(type(error).__name__, error)
"""
NO_JOB = {"127.0.0.1": ["not so rank 1.", "rank 0 was not reached ("], "nohost.invalid": ["rank 0 was not reached ("] * 2}


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("address", NO_JOB)
def test_the_first_meeting_ends_after_the_timeout_and_by_an_interrupt(address: str, rank: int, tmp_path: Path) -> None:
    command, waits = script(tmp_path / "meeting.py", MEETING), []
    for timeout in ("1.5", "1000"):
        job_of_2 = environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT=free_port())
        options: dict[str, Any] = {"env": job_of_2, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        waits.append(subprocess.Popen([*command, timeout], **options))
    short, long = waits
    with ending(waits):
        told, _ = short.communicate(timeout=100)
        assert told.startswith(f"begins\nRankHung rank {rank} has waited for more than timeout=1.5 s for every rank of ")
        assert f"; {NO_JOB[address][rank]}" in told
        assert f"MASTER_ADDR={address}" in told and "WORLD_SIZE=2" in told
        assert long.stdout.readline() == "begins\n"
        time.sleep(0.5)  # so that it waits; if not yet, the interrupt ends it all the more
        long.send_signal(signal.SIGINT)
        assert long.communicate(timeout=100)[0].startswith("KeyboardInterrupt")


# ---- under mpirun and srun ------------------------------------------------------------------------------------------

MINE = "import d2lps; print(d2lps.run(lambda comm: comm.rank + 10 * comm.size, 2, backend='gloo').results)"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI")
def test_mpirun_says_what_to_type_and_then_joins(tmp_path: Path) -> None:
    command = script(tmp_path / "mine.py", MINE)
    with running([*MPIRUN, *command]) as process:
        text, _ = process.communicate(timeout=250)
    typed = "mpirun -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 -n 2 python mine.py"
    assert process.returncode and typed in text
    assert "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=2 say that this is one of 2 processes" in text
    met = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    assert output_of([*MPIRUN, *met, *command]).count("[20, 21]") == 2


SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}  # of a batch script for four tasks
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("variables", "typed"),
    [
        ({}, ""), (SHELL, ""), (SHELL | {"SLURM_STEP_NUM_TASKS": "1"}, ""), ({"PMI_RANK": "0"}, ""),
        (SHELL | STEP, "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 srun -n 4 python "),
        (SHELL | STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun -x MASTER_ADDR=ADDRESS_OF_THE_FIRST_MACHINE -x "),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MASTER_ADDR=ADDRESS_OF_THE_FIRST_MACHINE MASTER_PORT=29500 mpiexec -n 2 python "),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 WORLD_SIZE=2 MASTER_ADDR="), ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
    ],
)  # fmt: skip
def test_who_is_a_task_of_a_job_is_told_how_to_meet(
    variables: dict[str, str], typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not typed:
        assert d2lps.run(lambda comm: d2lps.run(lambda inner: inner.size, 2).results, 1).results == [[2, 2]]
        return
    for call in (d2lps.run, lambda function, ranks: d2lps.kvstore.run(function, ranks, 1)):
        with pytest.raises(RuntimeError, match=re.escape(typed)):
            call(lambda comm: None, 2)


def test_a_task_of_a_step_joins_where_its_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ | SHELL | STEP | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert under_launcher()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["0", "4", "0", "4"]
