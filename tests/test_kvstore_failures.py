"""Servers and workers are killed, paused, lied to: nothing acknowledged is lost, nothing counts twice, nothing is left behind.

D2LPS_SOAK=1 kills 200 of each. D2LPS_REPEAT=9 kills 108 workers that save or load for all.
"""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from launching import nothing_left, output_of, script, until
from safetensors.torch import load_file

from d2lps import disk, kvstore
from d2lps.comm import RankDied, RankHung
from d2lps.kvstore import Cluster, Lost, Membership, Request
from d2lps.kvstore.core import saving
from d2lps.kvstore.core.events import Send
from d2lps.kvstore.core.optimizers import OPTIMIZERS, TorchOptimizer
from d2lps.kvstore.launch.coordinator import Coordinator
from d2lps.kvstore.network.heartbeat import PULSE
from d2lps.kvstore.network.sockets import connect, derive_keys, listen
from d2lps.kvstore.network.wire import NOBODY
from d2lps.kvstore.storage.frame import frame
from d2lps.kvstore.storage.log import Log, LogDamaged, header

pytestmark = pytest.mark.usefixtures("nothing_left")
SOAK = bool(os.environ.get("D2LPS_SOAK"))
KILLS = 200 if SOAK else 5
REPEAT = int(os.environ.get("D2LPS_REPEAT", 1))
SECRET = "a secret of the test"


def test_last_words_that_come_after_the_successor_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zmq hands a name over to the last who comes with it, and gives what is left of the one before another, of bytes."""
    told: list[tuple[str, bytes]] = []
    monkeypatch.setattr(Coordinator, "_heard", lambda self, node, word: told.append((node, word)))
    coordinator, endpoint = Coordinator.__new__(Coordinator), f"ipc://{tmp_path}/control"
    with zmq.Context() as context:
        coordinator.control, coordinator.nodes = listen(context, endpoint, 1 << 20, None), {7: "node 7"}
        killed = connect(context, endpoint, PULSE + b"7", 1 << 10, None)
        for _ in range(3):
            killed.send(b"alive")
        assert coordinator.control.poll(10_000)
        killed.close(linger=10_000)
        time.sleep(0.1)  # its connection ends, and another one begins: on a busy machine perhaps later, and then there is no harm
        successor = connect(context, endpoint, PULSE + b"7", 1 << 10, None)
        successor.send(b"ready")
        time.sleep(0.2)
        until(lambda: coordinator._hear() or ("node 7", b"ready") in told)
        until(lambda: coordinator._hear() or not coordinator.control.poll(100))
        successor.close()
        coordinator.control.close()
    assert {node for node, _ in told} == {"node 7"}


# ---- pushes of known integers, written down as they are acknowledged --------------------------------------------------------

MOST = 100_000  # pushes of one worker


def count(kv: Any, folder: str, pushes: int) -> tuple[int, int]:
    """Push number i adds 1 to row i of this worker's table, and i to all of `sums`; then it goes into the history.

    With pushes=0 until somebody says stop. How many there were, and how many reads missed a push that came before them.
    """
    mine, sums, out = f"rows {kv.rank}", torch.zeros(8, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    kv.init(mine, torch.zeros(MOST, 2, dtype=torch.int64))
    kv.init("sums", sums)
    missed, number = 0, 0
    with open(f"{folder}/{kv.rank}", "wb", buffering=0) as history:
        while number < pushes or not (pushes or os.path.exists(f"{folder}/stop")):
            row = torch.tensor([number * 7919 % MOST])  # on all servers in turn
            works = [kv.push_rows(mine, row, torch.ones(1, 2, dtype=torch.int64)), kv.push("sums", torch.full((8,), number))]
            for work in works:
                work.wait()
            history.write(struct.pack("<q", number))
            kv.clock()
            if number % 10 == 0:
                kv.pull_rows(mine, row, out).wait()
                missed += int(out.sum()) != 2
            number += 1
    return number, missed


def check(folder: Path, run: Any, workers: int) -> None:
    """An acknowledged push counts once, another at most once: from the histories and the values alone."""
    sums = Counter[int]()
    for rank in range(workers):
        history = [number for (number,) in struct.iter_unpack("<q", (folder / str(rank)).read_bytes())]
        rows = run.values[f"rows {rank}"]
        assert history == list(range(len(history))), "the history is no history"
        places = [number * 7919 % MOST for number in range(len(history) + 1)]
        assert all((rows[place] == 1).all() for place in places[:-1]), "an acknowledged push is lost, or counts twice"
        assert rows.sum(0).max() <= len(history) + 1 and rows.max() <= 1 and rows[places[-1]].max() <= 1
        sums["acknowledged"] += sum(history)
        if run[rank] is None:
            sums["perhaps"] += len(history)  # the push that was under way
        else:
            assert run[rank] == (len(history), 0), "a read missed a push that came before it"
    parts = set(run.values["sums"].tolist())
    assert all(sums["acknowledged"] <= part <= sums["acknowledged"] + sums["perhaps"] for part in parts)


def counted(folder: Path, saboteur: Any, workers: int = 2, pushes: int = 0, **options: Any) -> Any:
    """A run whose workers count until the saboteur is done, or so many pushes each: with the values that it should have."""

    def and_stop(cluster: Cluster) -> None:
        saboteur(cluster)
        (folder / "stop").touch()

    options = {"consistency": "bsp" if pushes else "asp", "split": 64, "saboteur": and_stop} | options
    run = kvstore.run(count, workers, 2, str(folder), pushes, **options)
    check(folder, run, workers)
    return run


def told(run: Any) -> list[str]:
    """What happened in a run, without the times."""
    return [line.partition(": ")[2] for line in run.history]


def told_of(cluster: Cluster, words: str) -> None:
    """Wait until the history says so: on a busy machine it takes a while."""
    while words not in str(cluster.history):
        cluster.sleep(0.01)


def all_have_begun(folder: Path) -> None:
    assert until(lambda: all((folder / f"{rank}").exists() and (folder / f"{rank}").stat().st_size for rank in range(2)), 60)


def all_go_on(folder: Path) -> None:
    begun = [(folder / f"{rank}").stat().st_size for rank in range(2)]
    assert until(lambda: all((folder / f"{rank}").stat().st_size > begun[rank] + 80 for rank in range(2)), 60)


def killing(kills: int, chance: random.Random) -> Any:
    """A saboteur who kills servers, one after another, as soon as they are there again."""

    def saboteur(cluster: Cluster) -> None:
        dead = {0, -1}
        for _ in range(kills):
            cluster.sleep(chance.uniform(0.02, 0.15))
            victim = chance.choice(cluster.servers)
            while (pid := victim.pid) in dead:  # on a busy machine it takes a while
                cluster.sleep(0.01)
            victim.kill()
            dead.add(pid)
        cluster.sleep(0.2)

    return saboteur


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("durability", "log_bytes", "budget"),
    [("log", 1 << 30, None), ("log", 20_000, None), ("fsync", 1 << 30, None), ("log", 1 << 30, 1_000_000)],  # of 1,600,032
)
def test_servers_are_killed_during_pushes(tmp_path: Path, durability: str, log_bytes: int, budget: int | None) -> None:
    kills = KILLS if durability == "log" and budget is None else 2
    options: dict[str, Any] = {"durability": durability, "log_bytes": log_bytes, "memory_budget": budget}
    run = counted(tmp_path, killing(kills, random.Random(log_bytes)), **options)
    killed, again = (str(run.history).count(words) for words in ("was killed by SIGKILL", "runs again"))
    assert again == killed >= kills - 1 - kills // 20  # one may hit a server that is dying already


def test_servers_are_killed_during_rounds(tmp_path: Path) -> None:
    run = counted(tmp_path, killing(KILLS, random.Random(2)), workers=3, pushes=40 * KILLS, durability="log")
    assert "runs again" in str(run.history) and run.staleness.keys() <= {0}


def count_big(kv: Any, folder: str) -> int:
    """Add 1, 2, 3 ... to a big tensor, and get the sum into the same memory, until somebody says stop."""
    both, number = torch.zeros(20_000, dtype=torch.int64), 0
    kv.init("sum", both)
    while not os.path.exists(f"{folder}/stop"):
        number += 1
        kv.pushpull("sum", both.fill_(number), both).wait()
        assert (both >= number * (number + 1) // 2).all(), "a read missed a push that came before it"
        kv.clock()
    return number * (number + 1) // 2


@pytest.mark.timeout(900)
def test_servers_are_killed_that_reach_into_the_workers_memory(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        killing(KILLS, random.Random(3))(cluster)
        (tmp_path / "stop").touch()

    run = kvstore.run(count_big, 2, 2, str(tmp_path), consistency="asp", durability="log", split=100_000, saboteur=saboteur)
    assert run.values["sum"].unique().tolist() == [sum(run)] and any("runs again" in line for line in run.history)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("pushes", "address", "times"), [(0, "ipc", 1), (600, "ipc", 2), (0, "tcp", 2)])
def test_a_primary_is_killed_and_its_backup_takes_over_and_has_a_backup(
    tmp_path: Path, pushes: int, address: str, times: int
) -> None:
    """Node 0 dies, then node 2, then node 4: each time what was acknowledged is in the next one."""

    def saboteur(cluster: Cluster) -> None:
        for number, victim in enumerate([cluster.servers[0], cluster.backups[0]][:times]):
            cluster.sleep(0.1)
            victim.kill()
            told_of(cluster, f"node {2 * number + 4} is the backup of server 0")
        cluster.sleep(0.2)

    run = counted(tmp_path, saboteur, pushes=pushes, durability="replica", address=address)
    assert (
        told(run)
        == [
            "server 0 was killed by SIGKILL",
            "node 2 serves as server 0 in view 1",
            "node 4 is the backup of server 0",
            "server 0 was killed by SIGKILL",
            "node 4 serves as server 0 in view 2",
            "node 6 is the backup of server 0",
        ][: 3 * times]
    )


def push_and_wait(kv: Any, folder: Path) -> None:
    """Tells when it is half done, and done; then it pushes once more to a server that has died meanwhile."""
    kv.init("w", torch.zeros(20))
    for number in range(200):
        if number == 100:
            (folder / "half").touch()
            assert until(lambda: (folder / "seen").exists(), 60)
        kv.push("w", torch.ones(20)).wait()
    (folder / "acknowledged").touch()
    assert until(lambda: (folder / "killed").exists(), 60)
    if not (folder / "nobody asks").exists():
        kv.push("w", torch.ones(20))  # nobody waits for it: said all the same


def changed_log(folder: Path, change: Any, durability: str = "log") -> Any:
    """A run whose server's log somebody changes, given what it was when half of it was there, before the server is killed."""
    file = folder / "store" / "server-0" / "log-000000000000"

    def saboteur(cluster: Cluster) -> None:
        until(lambda: (folder / "half").exists(), 60)
        older = file.read_bytes()
        (folder / "seen").touch()
        until(lambda: (folder / "acknowledged").exists(), 60)
        cluster.servers[0].pause()
        change(file, older)
        cluster.servers[0].kill()
        (folder / "killed").touch()

    options: dict[str, Any] = {"durability": durability, "folder": folder / "store", "saboteur": saboteur}
    return kvstore.run(push_and_wait, 1, 1, folder, consistency="asp", **options)


DAMAGE: dict[str, Any] = {
    "half is gone": lambda file, _: os.truncate(file, file.stat().st_size // 2),
    "its end is gone": lambda file, _: os.truncate(file, file.stat().st_size - 100),
    "one bit": lambda file, _: file.write_bytes((whole := file.read_bytes())[:-1] + bytes([whole[-1] ^ 1])),
    "a page of zeros": lambda file, _: file.write_bytes(file.read_bytes()[:-4096] + bytes(4096)),
}


@pytest.mark.parametrize("durability", ["log", "fsync"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_end_of_a_log_is_named_though_nobody_asks(tmp_path: Path, damage: str, durability: str) -> None:
    """The log itself says what was promised."""
    (tmp_path / "nobody asks").touch()
    said = r"record \d+ is broken or missing, and all before \d+ were promised: acknowledged requests are lost"
    with pytest.raises(LogDamaged, match=f"store/server-0/log-0+: {said}"):
        changed_log(tmp_path, DAMAGE[damage], durability)


def test_a_log_in_place_of_which_an_older_one_was_put_is_named_by_who_has_the_answers(tmp_path: Path) -> None:
    """All of it is whole, and promises less."""
    with pytest.raises(kvstore.Refused, match=r"acknowledged requests are lost: worker 0 has the answers to 201,.* of 101,"):
        changed_log(tmp_path, lambda file, older: file.write_bytes(older))


def test_an_unfinished_record_is_cut_off_and_that_is_said(tmp_path: Path) -> None:
    def unfinished(file: Path, older: bytes) -> None:
        copy = Log(shutil.copy(file, tmp_path / "copy"))
        with file.open("ab") as log:
            log.write(header(copy.number, 1000) + b"half of it")
        copy.close()

    run = changed_log(tmp_path, unfinished)
    assert run.values["w"].unique().tolist() == [201.0] and told(run) == [
        "server 0 was killed by SIGKILL",
        "server 0 runs again, with all that was acknowledged",
        "server 0 has cut off 30 bytes of an unfinished record, of which nobody had been told",
    ]


def test_a_server_whose_log_is_gone_does_not_begin_anew(tmp_path: Path) -> None:
    with pytest.raises(LogDamaged, match=r"store/server-0: its log is gone: acknowledged requests are lost") as caught:
        changed_log(tmp_path, lambda file, _: shutil.rmtree(file.parent))
    assert caught.value.__notes__ == ["raised by server 0"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_worker_is_killed_and_the_others_go_on(tmp_path: Path, consistency: str) -> None:
    chance = random.Random(7)
    for number in range(KILLS // 2 + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        victim = chance.randrange(3)

        def saboteur(cluster: Cluster, folder: Path = folder, victim: int = victim) -> None:
            until(lambda: (folder / str(victim)).exists() and (folder / str(victim)).stat().st_size)
            cluster.sleep(chance.uniform(0, 0.1))
            cluster.workers[victim].kill()
            cluster.sleep(0.2)

        with pytest.warns(UserWarning, match=f"rank {victim} of 3 was killed by SIGKILL"):
            run = counted(folder, saboteur, workers=3, pushes=0 if consistency == "asp" else 200)
        assert run[victim] is None and list(run.lost) == [victim] and run.history


def test_the_last_worker_is_killed_and_that_is_the_end(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        cluster.sleep(0.1)
        cluster.workers[0].kill()

    with pytest.raises(RankDied, match="rank 0 of 1 was killed by SIGKILL"):
        kvstore.run(count, 1, 1, str(tmp_path), 0, consistency="asp", saboteur=saboteur)


def test_a_server_without_a_log_is_killed_and_that_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(RankDied, match=r"server \d was killed by SIGKILL, and what it had is lost: durability='log'"):
        counted(tmp_path, killing(1, random.Random(1)))


# ---- a server that sleeps -----------------------------------------------------------------------------------------------------


def test_a_primary_that_wakes_up_in_an_old_view_writes_nothing(tmp_path: Path) -> None:
    """While it sleeps it even gets a push of its own view: it believes it, and can tell nobody."""

    def saboteur(cluster: Cluster) -> None:
        cluster.sleep(0.2)
        cluster.servers[0].pause()
        with zmq.Context[zmq.Socket[bytes]]() as context:
            stranger = connect(context, cluster.addresses[0], b"7.0", 1 << 20, None)
            stranger.send_multipart(message(Request("join", client=7, sequence=1)))
            stranger.send_multipart(message(Request("push", "sums[0:4]", torch.full((4,), 10**9), client=7, sequence=2)))
            cluster.sleep(1.0)
            cluster.servers[0].resume()
            heard.append(stranger.poll(500))
            stranger.close()

    heard: list[int] = []
    first, second, *rest = told(counted(tmp_path, saboteur, durability="replica", patience=0.4))
    assert (first, second) == ("server 0 has not answered for 0.4 s", "node 2 serves as server 0 in view 1")
    assert sorted(rest) == [
        "node 0 is no server any more: stale view: this backup is in view 1, its primary in 0",
        "node 4 is the backup of server 0",
    ]
    assert heard == [0]


def test_two_servers_that_are_killed_at_once_are_both_replaced(tmp_path: Path) -> None:
    """Of both the workers hear together, as of one view: the first backup had been told of the view before."""

    def saboteur(cluster: Cluster) -> None:
        all_have_begun(tmp_path)
        cluster.backups[0].pause()  # it cannot serve before both are dead
        for number, server in enumerate(cluster.servers):
            server.kill()
            told_of(cluster, f"server {number} was killed")
        told_of(cluster, "node 3 serves as server 1 in view 2")
        cluster.backups[0].resume()
        told_of(cluster, "node 2 serves as server 0")
        all_go_on(tmp_path)

    counted(tmp_path, saboteur, durability="replica", patience=60)


def test_a_backup_that_sleeps_is_named_and_another_takes_its_place(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        all_have_begun(tmp_path)
        cluster.backups[0].pause()
        told_of(cluster, "node 4 is the backup of server 0")
        cluster.servers[0].kill()
        told_of(cluster, "in view 1")
        cluster.sleep(0.1)

    assert told(counted(tmp_path, saboteur, durability="replica", patience=0.5))[:4] == [
        "the backup of server 0 has not answered for 0.5 s",
        "node 4 is the backup of server 0",
        "server 0 was killed by SIGKILL",
        "node 4 serves as server 0 in view 1",
    ]


@pytest.mark.parametrize("resumed", [True, False], ids=["wakes up", "sleeps on"])
def test_a_backup_that_sleeps_when_its_primary_dies_serves_only_once_it_is_awake(tmp_path: Path, resumed: bool) -> None:
    def saboteur(cluster: Cluster) -> None:
        all_have_begun(tmp_path)
        cluster.backups[0].pause()
        cluster.servers[0].kill()
        told_of(cluster, "server 0 was killed by SIGKILL")
        cluster.sleep(0.5)
        assert "serves" not in str(cluster.history)
        if resumed:
            os.kill(cluster.backups[0].group.pids[0], signal.SIGCONT)  # .resume() would wait until it is ready
            told_of(cluster, "node 4 is the backup of server 0")
        else:
            cluster.sleep(60)

    if resumed:
        assert "node 2 serves as server 0 in view 1" in told(counted(tmp_path, saboteur, durability="replica", patience=60))
    else:
        why = r"^server 0 was killed by SIGKILL, and its backup, node 2, has not answered for 1\.5 s$"
        with pytest.raises(RankDied, match=why):
            counted(tmp_path, saboteur, durability="replica", patience=1.5)


def test_a_backup_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    """The disk is full: so it is for a process that may write no long file."""

    def saboteur(cluster: Cluster) -> None:
        all_have_begun(tmp_path)
        resource.prlimit(cluster.servers[0].pid, resource.RLIMIT_FSIZE, (1000, 1000))
        cluster.backups[0].kill()
        told_of(cluster, "goes on without a backup")
        assert not [*(tmp_path / "temporary").glob("*/disk/*/handed")]
        all_go_on(tmp_path)

    killed, why = told(counted(tmp_path, saboteur, durability="replica"))
    assert killed == "the backup of server 0 was killed by SIGKILL"
    assert re.match(r"server 0 goes on without a backup: .*File too large: .*/disk/server-4/handed", why)


def test_a_backup_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(TorchOptimizer):
        def __init__(self, lr: float) -> None:
            super().__init__(torch.optim.SGD, lr=lr)

        def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
            super().step(value, gradient, state)
            if (tmp_path / f"{os.getpid()} fails").exists():
                raise MemoryError("no room for this")

    def worker(kv: Any) -> list[float]:
        out = torch.zeros(2)
        kv.init("w", out)
        kv.set_optimizer("failing in the test", lr=1.0)
        (tmp_path / "began").touch()
        until(lambda: (tmp_path / "stop").exists(), 60)
        for _ in range(2):
            kv.pushpull("w", -torch.ones(2), out).wait()
        until(lambda: (tmp_path / "again").exists(), 60)
        return out.tolist()

    def saboteur(cluster: Cluster) -> None:
        until(lambda: (tmp_path / "began").exists(), 60)
        (tmp_path / f"{cluster.backups[0].pid} fails").touch()
        (tmp_path / "stop").touch()
        told_of(cluster, "node 2 is the backup of server 0")
        (tmp_path / "again").touch()

    monkeypatch.setitem(OPTIMIZERS, "failing in the test", Failing)
    run = kvstore.run(worker, 1, 1, durability="replica", consistency="asp", saboteur=saboteur)
    assert run == [[2.0, 2.0]] and told(run) == [
        "the backup of server 0 has failed: MemoryError: no room for this",
        "node 2 is the backup of server 0",
    ]


def test_a_backup_that_cannot_be_started_ends_nothing(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        all_have_begun(tmp_path)
        cluster.backups[0].kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, most))  # of the caller
        try:
            told_of(cluster, "cannot be started")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    killed, why = told(counted(tmp_path, saboteur, durability="replica"))
    assert killed == "the backup of server 0 was killed by SIGKILL"
    assert why.startswith("the backup of server 0 cannot be started: [Errno 24]")


def test_a_server_that_is_busy_for_longer_than_patience_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(TorchOptimizer):
        def __init__(self, lr: float) -> None:
            super().__init__(torch.optim.SGD, lr=lr)

        def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
            super().step(value, gradient, state)
            if len(value) == 2:  # not when it is tried
                time.sleep(3.0)

    def worker(kv: Any) -> list[float]:
        out = torch.zeros(2)
        kv.init("w", out)
        kv.set_optimizer("slow in the test", lr=1.0)
        kv.pushpull("w", -torch.ones(2), out).wait()
        return out.tolist()

    monkeypatch.setitem(OPTIMIZERS, "slow in the test", Slow)
    run = kvstore.run(worker, 1, 1, durability="replica", patience=1.0)
    assert run == [[1.0, 1.0]] and not run.history


def test_a_server_that_has_a_log_and_sleeps_goes_on_where_it_was(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        cluster.sleep(0.1)
        cluster.servers[0].pause()
        cluster.sleep(2.5)  # long enough for requests to be sent again
        cluster.servers[0].resume()
        cluster.sleep(0.1)

    assert not counted(tmp_path, saboteur, durability="log").history


# ---- workers who act for all --------------------------------------------------------------------------------------------------

KEYS = {"w": (3000, 8), "b": (5,), "hot": (4,)}


def killed_after(seconds: float) -> Any:
    """What is done for all, by somebody who does not live for long."""

    def attempt(*given: Any, really: Any = saving.attempt) -> Any:
        threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
        return really(*given)

    return attempt


def save_and_load(kv: Any, folder: str, doomed: Sequence[tuple[str, float]]) -> list[Any]:
    """Whether all parts of all keys are of one moment, after each save and load, and what a step makes of them.

    doomed: of each worker but the last, in which call it is killed, and when after it has begun to act for all, as a share of
    how long such a call takes.
    """
    outs, took, found = [torch.zeros(shape) for shape in KEYS.values()], dict[str, float](), list[Any]()
    kv.init(["w", "b"], outs[:2])
    kv.init("hot", outs[2], everywhere=True)
    kv.set_optimizer("sgd", lr=1.0, momentum=0.5)

    def look() -> list[float]:
        kv.pull([*KEYS], outs).wait()
        return torch.cat([out.flatten() for out in outs]).unique().tolist()

    for number, (what, share) in enumerate([("save", 0.0), ("load", 0.0), *doomed]):
        kv.push([*KEYS], [torch.ones(shape) for shape in KEYS.values()])
        kv.clock()
        before = look()
        kv.barrier()  # nobody is killed while another one still looks
        victim, began = kv.rank == number - 2, time.monotonic()
        if victim:
            saving.attempt = killed_after(share * took[what])
        getattr(kv, what)(f"{folder}/{number if what == 'save' else 0}")
        if victim:
            time.sleep(60)
        took[what] = time.monotonic() - began
        until(lambda: not any("draft" in name for name in os.listdir(folder)), 60)  # whom the dead have left to remove them
        found.append([what, before, look(), os.listdir(folder)])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("again", range(REPEAT))
@pytest.mark.parametrize("durability", ["memory", "log", "fsync", "replica"])
def test_a_worker_that_saves_or_loads_for_all_is_killed(tmp_path: Path, durability: str, again: int) -> None:
    chance, servers, saved = random.Random(f"{durability} {again}"), again % 3 + 1, tmp_path / "saved"
    saved.mkdir()
    doomed = [(chance.choice(["save", "load"]), chance.uniform(0, 0.3)) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* was killed by SIGKILL")
        run = kvstore.run(save_and_load, 4, servers, str(saved), doomed, durability=durability, split=4000)
    assert [*run.lost] == [0, 1, 2] and run[:3] == [None] * 3
    names, momentum, value = {"0"}, 0.0, 0.0
    for number, (what, before, after, files) in enumerate(run[3]):
        momentum, value = 0.5 * momentum + 1, value - (0.5 * momentum + 1)
        assert before == [value], "a step is torn: values or momenta are not all of one moment"
        momentum, value = (1.0, -1.0) if what == "load" else (momentum, value)
        assert after == [value]
        names |= {str(number)} if what == "save" else set()
        assert {*files} == names, "something is left, or missing"
        tensors = load_file(saved / str(number if what == "save" else 0))
        assert all(tensors[key].unique().tolist() == [value] for key in KEYS)
        assert all(tensors[f"{key}.momentum_buffer"].unique().tolist() == [momentum] for key in KEYS)


DRAFTS = """
import os, random, signal, sys, tempfile, time
from pathlib import Path
from d2lps.disk import drafted

def left(final, seconds):
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)  # as a rank
        with drafted(final) as draft:
            draft.write_text("half of it")
            signal.pause()
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        os.killpg(pid, signal.SIGKILL)  # as a rank's supervisor does
    except ProcessLookupError:
        pass
    with drafted(final) as draft:
        draft.write_text("all of it")
    for _ in range(3000):
        if os.listdir(final.parent) == [final.name]:
            return []
        time.sleep(0.01)
    return os.listdir(final.parent)

chance = random.Random(int(sys.argv[1]))
for _ in range(100):
    with tempfile.TemporaryDirectory() as folder:
        print(*left(Path(folder, "file"), chance.uniform(0, 0.006)), end="")
"""


@pytest.mark.parametrize("seed", range(REPEAT))
def test_a_writer_killed_at_any_moment_leaves_no_draft_once_another_has_written(seed: int, tmp_path: Path) -> None:
    """At the worst just when it starts the shell that is to remove the draft. It took a busy machine to see that: 1 in 150."""
    assert output_of([*script(tmp_path / "drafts.py", DRAFTS), str(seed)]) == ""


def save_for_ever(kv: Any, folder: str) -> None:
    """A worker's life; the one that writes for all falls asleep over it."""

    def write(path: str, *given: Any) -> None:
        with disk.drafted(Path(path)) as draft:
            draft.write_text("half of it")
            Path(folder, "writes").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    saving.write = write
    kv.init("w", torch.zeros(2))
    kv.save(f"{folder}/saved/file")


def test_a_worker_that_sleeps_while_it_saves_for_all_is_named_and_its_draft_goes(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    with pytest.raises(RankHung, match=r"rank [12] has waited for more than timeout=2 s\n  rank 0 is stopped \(SIGSTOP\)\n"):
        kvstore.run(save_for_ever, 3, 2, str(tmp_path), timeout=2)
    assert not list((tmp_path / "saved").iterdir())


def test_of_workers_that_are_all_killed_no_draft_is_left(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        assert until(lambda: (tmp_path / "writes").exists(), 60)
        for worker in cluster.workers:
            worker.kill()

    (tmp_path / "saved").mkdir()
    with pytest.raises(RankDied, match="was killed by SIGKILL"):
        kvstore.run(save_for_ever, 2, 1, str(tmp_path), saboteur=saboteur)
    assert not list((tmp_path / "saved").iterdir())


# ---- strangers ----------------------------------------------------------------------------------------------------------------


def steady(kv: Any, folder: str) -> list[float]:
    out = torch.zeros(4)
    kv.init("w", out)
    kv.push("w", torch.ones(4)).wait()
    Path(folder, f"began {kv.rank}").touch()
    until(lambda: Path(folder, "stop").exists(), 30)
    kv.clock()
    kv.pull("w", out).wait()
    return out.tolist()


def visited(folder: Path, visit: Any, **options: Any) -> Any:
    """A run that a stranger visits while its workers wait, and that comes to what it comes to without."""

    def saboteur(cluster: Cluster) -> None:
        assert until(lambda: all((folder / f"began {rank}").exists() for rank in range(2)), 60)
        with zmq.Context[zmq.Socket[bytes]]() as context:
            visit(context, cluster.addresses[0])
        cluster.sleep(0.3)
        (folder / "stop").touch()

    run = kvstore.run(steady, 2, 1, str(folder), saboteur=saboteur, **options)
    assert run == [[2.0] * 4] * 2 and run.servers[0].requests["push"] == 2
    return run


def message(record: Any) -> list[Any]:
    """As a worker on another machine sends it."""
    parts = frame(record)
    return [NOBODY + bytes([len(parts)]), *parts]


FORGED = Request("push", "w", torch.full((4,), 1000.0), client=0, sequence=3, acknowledged=2)


@pytest.mark.parametrize("how", ["a wrong secret", "no secret", "the server's key, but not the client's"])
def test_who_does_not_know_the_secret_never_gets_in(tmp_path: Path, how: str) -> None:
    right, wrong = derive_keys(SECRET), derive_keys(SECRET + "!")
    keys = {"a wrong secret": wrong, "no secret": None}.get(how, type(right)(right.server, wrong.client))
    heard: list[Any] = []

    def visit(context: Any, address: str) -> None:
        for key, name in ((keys, b"x"), (right, b"y")):
            nowhere = f"ipc://{tmp_path}/nobody"  # until somebody looks at what happens to the connection
            stranger = connect(context, nowhere, name, 1 << 20, key)
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            stranger.disconnect(nowhere)
            stranger.connect(address)
            with contextlib.suppress(zmq.Again):  # it may have been turned away before it could say anything
                stranger.send_multipart(message(FORGED if name == b"x" else Lost(0)), zmq.DONTWAIT)
            heard.append(bool(monitor.poll(500 if name == b"x" else 10_000)))
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close(0)

    run = visited(tmp_path, visit, address="tcp", secret=SECRET)
    assert heard == [False, True], "who knows the secret gets in, nobody else"
    assert run.servers[0].requests["not a request"] == 1


@pytest.mark.parametrize("keys", [None, derive_keys(SECRET)], ids=["no key", "keys of one's own"])
def test_another_user_of_the_machine_gets_nothing_done(tmp_path: Path, keys: Any) -> None:
    """The ports of a run that named no secret: as any process of the machine reaches them."""
    heard: list[Any] = []

    def visit(context: Any, address: str) -> None:
        stranger = connect(context, address, b"0.0", 1 << 20, keys)
        stranger.send_multipart(message(FORGED))
        stranger.send_multipart(message(Request("join", client=0, epoch=1, sequence=1)))
        heard.append(stranger.poll(500))
        stranger.close()

    run = visited(tmp_path, visit, address="tcp")
    assert heard == [0] and not {"join", "not a request"} & run.servers[0].requests.keys()


def test_bad_frames_change_nothing(tmp_path: Path) -> None:
    chance = random.Random(3)
    frames = 20_000 if SOAK else 2_000
    card, *good = map(bytes, message(FORGED))
    sends = [Lost(0), Membership(5, (0,)), Send(1, Lost(1)), kvstore.Reply(0, 0, 3)]

    def bad() -> list[bytes]:
        kind, parts = chance.randrange(5), list(good)
        if kind == 0:
            return [chance.randbytes(chance.randrange(300)) for _ in range(chance.randrange(4))]
        if kind == 1:
            return message(chance.choice(sends))
        if kind == 2:
            return [card] * chance.randrange(2) + parts[: chance.randrange(2)] + parts[chance.randrange(2) + 1 :] + [b"x"]
        head = bytearray(parts[0])
        head[chance.randrange(len(head))] ^= 1 << chance.randrange(8)
        return [card, bytes(head), *parts[1:]]

    def visit(context: Any, address: str) -> None:
        stranger = connect(context, address, b"stranger", 1 << 20, None, most=0)
        for _ in range(frames):
            stranger.send_multipart(bad() or [b""])
        huge = connect(context, address, b"huge", 1 << 20, None)
        huge.send_multipart([card, good[0], bytes(4 << 20)])  # more than the server takes: it hangs up
        until(lambda: not stranger.poll(200), 1)
        stranger.close(linger=2000)
        huge.close(linger=200)

    run = visited(tmp_path, visit, limit=1 << 20)
    assert run.staleness == {0: 2} and run.servers[0].requests["not a request"] == frames


# ---- nothing is left ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises() -> None:
    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(2))
        if kv.rank == 1:
            raise KeyError("no such thing")
        kv.barrier()

    with pytest.raises(KeyError, match="no such thing") as caught:
        kvstore.run(worker, 2, 2)
    assert "raised by rank 1 of 2" in caught.value.__notes__


def test_a_worker_that_hangs() -> None:
    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(2))
        if kv.rank == 0:
            kv.barrier()
        time.sleep(1000)

    with pytest.raises(RankHung, match=r"rank 0 waits for a parameter server's answer \(in worker") as caught:
        kvstore.run(worker, 2, 2, timeout=2)
    assert "rank 1 is running" in str(caught.value)


@pytest.mark.parametrize("which", ["server 1", "the backup of server 1"])
def test_a_server_that_is_stopped_is_named(tmp_path: Path, which: str) -> None:
    def saboteur(cluster: Cluster) -> None:
        all_have_begun(tmp_path)
        (cluster.servers if which == "server 1" else cluster.backups)[1].pause()

    options: dict[str, Any] = {"durability": "replica", "patience": 60} if "backup" in which else {}
    with pytest.raises(RankHung, match="waits for a parameter server's answer") as caught:
        counted(tmp_path, saboteur, timeout=2, **options)
    assert f"{which} is stopped (SIGSTOP)" in caught.value.__notes__


def test_an_interrupt(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        cluster.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            counted(tmp_path, saboteur, durability="log")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_killed_caller_takes_everything_with_it(tmp_path: Path, nothing_left: Any) -> None:
    code = f"""
        from d2lps import kvstore

        def worker(kv):
            kv.init("w", torch.zeros(1))
            open({str(tmp_path)!r} + f"/{{kv.rank}}", "w").close()
            while True:
                kv.push("w", torch.ones(1)).wait()

        if __name__ == "__main__":
            import torch
            kvstore.run(worker, 2, 2, consistency="asp", durability="log")
    """
    with subprocess.Popen(script(tmp_path / "caller.py", code)) as process:
        assert until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), 60)
        process.kill()
        process.wait()
        assert nothing_left(30)
    assert until(lambda: not list((tmp_path / "temporary").iterdir()))


def test_a_saboteur_who_fails_is_heard(tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:  # nobody will ever say stop
        raise ArithmeticError("I cannot count")

    with pytest.raises(ArithmeticError, match="cannot count"):
        counted(tmp_path, saboteur)
