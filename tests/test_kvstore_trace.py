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
from oracles import gradients, sources

from d2lps import kvstore
from d2lps.kvstore.core.events import Membership, Request, replace
from d2lps.kvstore.core.recorder import ServerNotes, StoreRecorder
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.launch.chaos import Cluster
from d2lps.topology import star
from d2lps.trace import Recorder, Trace
from d2lps.trace.recorder import COLUMNS
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
    assert (m["start"] <= m["end"]).all() and m["start"].min() >= 0
    # Nobody waits for a clock: a server that was busy may take it in and answer when all workers have returned.
    awaited = [not run.trace.steps[step].startswith("clock") for step in m["step"]]
    assert m["end"][awaited].max() <= run.time
    assert run.trace.time_waiting()[:3].min() > 0


def test_its_pictures_show_whose_gradients_are_in_whose_values() -> None:
    trace = kvstore.run(rounds, 3, 2, 8, split=16, trace=True).trace
    held = sources(trace, "weights")
    assert len(held) == 3 * 2 and all(gradients(found) == {rank: 2 + 1 for rank in range(3)} for found in held)
    scene = Player(trace, clock="time").scene
    assert sum(message.get("n", 1) for message in scene["messages"]) == len(trace) and len(scene["ranks"]) == 5
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


def pushes_after_a_pull(kv: Any) -> None:
    """Worker 1 pushes while worker 0 may still read what it has pulled: that is a copy."""
    gradient, weights = torch.ones(8), torch.zeros(8)
    kv.init("w", weights)
    for rank in (0, 1, 1):
        kv.barrier()
        if kv.rank == 0:
            kv.pull("w", weights).wait()
        kv.comm.barrier()  # of this the server hears nothing
        if kv.rank == rank:
            kv.push("w", gradient).wait()
        kv.comm.barrier()
    kv.pull("w", weights).wait()


def test_a_value_that_was_copied_is_still_the_same_value() -> None:
    run = kvstore.run(pushes_after_a_pull, 2, 1, consistency="asp", trace=True)
    wanted = kvstore.simulate(pushes_after_a_pull, star(3, 1e9), 2, 1, consistency="asp").trace
    assert run.values["w"].tolist() == [3.0] * 8
    found = sources(run.trace, "weights")
    assert found == sources(wanted, "weights") == [Counter({(2, "w"): 1, (0, "gradient"): 1, (1, "gradient"): 2})] * 2


def test_a_push_that_was_refused_or_came_again_is_in_no_value() -> None:
    recorder = Recorder(1, lambda: 0.0)
    server = Server([0])
    notes = StoreRecorder(server, recorder)
    asked = [
        Request("init", "w", torch.zeros(2), sequence=1),
        Request("push", "w", torch.zeros(3), sequence=2),  # of another shape
        Request("pushpull", "w", torch.ones(2), sequence=3),
    ]
    for request in [*asked, asked[2]]:
        notes.stepped(server.step(request))
    assert len(recorder.tables["locals"]) == len(COLUMNS["locals"]) and not notes.pushed


def test_servers_that_come_and_go_leave_no_messages_without_an_end(tmp_path: Path) -> None:
    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(64))
        while not (tmp_path / "stop").exists():
            kv.push("w", torch.ones(64))
            kv.clock()
            kv.barrier()

    def saboteur(cluster: Cluster) -> None:
        cluster.add_server()
        cluster.remove_server(0)
        (tmp_path / "stop").touch()

    trace = kvstore.run(worker, 1, 2, split=64, saboteur=saboteur, trace=True).trace
    assert trace.unmatched == 0 and trace.ranks == 4
    assert {trace.buffers[into].name for into in trace.locals["buffer"]} == {"w"}


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


def test_a_request_that_comes_again_is_one_message() -> None:
    """A worker that has no answer for a second asks again, and notes what it has asked once."""
    recorder = Recorder(1, lambda: 0.0)
    notes = ServerNotes(Server([0]), recorder, 1)
    asked = [Request("init", "w", torch.zeros(2), sequence=1), Request("pull", "w", sequence=2)]
    for request in asked:
        notes.step(request)
    once = len(recorder.ends)
    answers = [notes.step(request)[-1] for request in asked]
    assert [answer.sequence for answer in answers] == [1, 2] and len(recorder.ends) == once == 4 * len(COLUMNS["ends"])


def test_an_answer_that_tells_of_another_view_is_none() -> None:
    recorder = Recorder(1, lambda: 0.0)
    notes = ServerNotes(Server([0]), recorder, 1)
    notes.step(Membership(view=1, servers=(0,)))
    early = Request("init", "w", torch.zeros(2), sequence=1)
    assert notes.step(early)[-1].error.startswith("stale view")
    assert not notes.step(replace(early, view=1))[-1].error
    assert len(recorder.ends) == 2 * len(COLUMNS["ends"])
