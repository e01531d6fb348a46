"""The trace of a real run: that of the simulation of the same worker, but for its times."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, environment, script

from d2lps import kvstore
from d2lps.kvstore.launch.chaos import Cluster
from d2lps.topology import star
from d2lps.trace import Origins, Trace
from d2lps.widgets import Player

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def rounds(kv: Any, n: int) -> None:
    gradient, weights = torch.ones(n), torch.zeros(n)
    kv.init("w", weights)
    kv.barrier()
    for _ in range(2):
        kv.push("w", gradient)
        kv.clock()
        kv.pull("w", weights).wait()
    kv.pushpull("w", gradient, weights).wait()


def messages(trace: Trace) -> Counter[tuple[int, int, int, str, str]]:
    """How many there are of each source, destination, bytes, label and group."""
    m = trace.messages
    names = [trace.steps[step] for step in m["step"]], [trace.groups[group] for group in m["group"]]
    return Counter(zip(*(m[column].tolist() for column in ("src", "dst", "nbytes")), *names, strict=True))


@pytest.mark.parametrize(("n", "split"), [(8, 16), (40_000, 1_000_000)], ids=["small, in parts", "in shared memory"])
def test_a_real_run_has_the_messages_of_the_simulated_one(n: int, split: int) -> None:
    simulated = kvstore.simulate(rounds, star(5, 1e9, 1e-6), 3, 2, n, split=split).trace
    run = kvstore.run(rounds, 3, 2, n, split=split, trace=True)
    assert messages(run.trace) == messages(simulated) and run.trace.unmatched == 0
    sums = [trace.ops[op] for trace in (simulated, run.trace) for op in trace.locals["op"]]
    assert sums.count("SUM") == 2 * 3 * 3 * (2 if n == 8 else 1)
    m = run.trace.messages
    assert (m["start"] <= m["end"]).all() and m["start"].min() >= 0 and m["end"].max() <= run.time
    assert run.trace.time_waiting()[:3].min() > 0


def test_its_pictures_show_whose_gradients_are_in_whose_values() -> None:
    trace = kvstore.run(rounds, 3, 2, 8, split=16, trace=True).trace
    origins, seen = Origins(trace), 0
    for index, buffer in enumerate(trace.buffers):
        for piece in origins.held(index) if buffer.name == "weights" else ():
            sources = {(trace.buffers[source].rank, trace.buffers[source].name) for source, _ in piece.sources}
            assert {source for source in sources if source[1] == "gradient"} == {(rank, "gradient") for rank in range(3)}
            seen += 1
    assert seen == 3 * 2
    scene = Player(trace, clock="time").scene
    assert len(scene["messages"]) == len(trace) and len(scene["ranks"]) == 5
    assert trace.timeline().get_figure() is not None and trace.perfetto()["traceEvents"]


def test_without_it_nothing_is_noted() -> None:
    def worker(kv: Any) -> bool:
        rounds(kv, 8)
        return kv.transport.notes is None and kv.comm.recorder is None

    run = kvstore.run(worker, 1, 1)
    assert run[0]
    with pytest.raises(ValueError, match="trace=True"):
        _ = run.trace


def test_priorities_and_steps_of_the_worker_are_in_it() -> None:
    def worker(kv: Any) -> None:
        values = [torch.full((1000,), float(key)) for key in range(4)]
        for key, value in enumerate(values):
            kv.init(key, value)
        kv.comm.step("backward")
        for work in [kv.push(key, value, priority=key) for key, value in enumerate(values)]:
            work.wait()

    trace = kvstore.run(worker, 1, 1, consistency="asp", trace=True).trace
    counts = Counter(label for _, dst, _, label, _ in messages(trace).elements() if dst == 1)
    assert counts == {"init 0": 1, "init 1": 1, "init 2": 1, "init 3": 1, "backward": 4}
    m = trace.messages
    for row in [row for row in range(len(trace)) if trace.steps[m["step"][row]] == "backward"]:
        one, other = (trace.buffers[m[f"{end}_buffer"][row]] for end in ("src", "dst"))
        assert one.rank == 0 and other.rank == 1 and one.nbytes == 4000


def test_a_late_workers_push_is_a_later_round() -> None:
    """Though nothing that it has received says so: the server had heard the others' by then."""

    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(2))
        kv.barrier()
        kv.comm.sleep(0.5 * kv.rank)
        kv.push("w", torch.ones(2)).wait()

    trace = kvstore.run(worker, 2, 1, trace=True).trace
    pushes = [row for row in range(len(trace)) if trace.steps[trace.messages["step"][row]] == "push w"]
    early, late = sorted(pushes, key=lambda row: trace.messages["src"][row])
    assert trace.replay.round_of[late] > trace.replay.round_of[early]


def test_what_a_killed_server_had_noted_is_missing_and_confuses_nothing(tmp_path: Path) -> None:
    def worker(kv: Any) -> None:
        values = {key: torch.ones(key + 1) for key in range(20)}
        for key, value in values.items():
            kv.init(key, value)
        for key, value in values.items():
            kv.push(key, value).wait()
            if key == 10:
                (tmp_path / "half").touch()
                while not (tmp_path / "killed").exists():
                    kv.comm.sleep(0.01)

    def saboteur(cluster: Cluster) -> None:
        while not (tmp_path / "half").exists():
            cluster.sleep(0.01)
        cluster.servers[0].kill()
        (tmp_path / "killed").touch()

    trace = kvstore.run(worker, 1, 1, consistency="asp", durability="log", saboteur=saboteur, trace=True).trace
    said = messages(trace)
    assert trace.unmatched > 0 and (0, 1, 4, "push 0", "kvstore") not in said
    assert all(said[0, 1, 4 * (key + 1), f"push {key}", "kvstore"] == 1 for key in range(12, 20))
    for _, dst, nbytes, label, _ in said:
        assert dst == 0 or nbytes == 4 * (int(label.split()[1]) + 1)


SCRIPT = """
import sys
from d2lps import kvstore
from d2lps.topology import star
from test_kvstore_trace import messages, rounds

if __name__ == "__main__":
    found = messages(kvstore.run(rounds, 2, 1, 8, trace=True).trace)
    wanted = messages(kvstore.simulate(rounds, star(3, 1e9, 1e-6), 2, 1, 8).trace)
    stores = {message: count for message, count in found.items() if message[4] == "kvstore"}
    assert stores == wanted, (stores, wanted)
"""


def test_under_torchrun_it_is_the_jobs(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    clean = environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path), PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    subprocess.run([*torchrun, *script(tmp_path / "job.py", SCRIPT)[1:]], check=True, env=clean, timeout=250)
