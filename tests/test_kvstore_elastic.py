"""Servers that come and go at a barrier: keys move with them, and nothing is lost, whoever is killed meanwhile."""

# ruff: noqa: F401 - fixtures are imported, and named again as parameters

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, environment, nothing_left, script, until
from oracles import Asking

from d2lps import kvstore
from d2lps.collectives import broadcast
from d2lps.comm import RankDied
from d2lps.kvstore import Cluster, Lost, Membership, Reply, Request, Server
from d2lps.kvstore.core import saving
from d2lps.kvstore.core.client import Client
from d2lps.kvstore.core.events import alike
from d2lps.kvstore.launch.chaos import RunIsOver
from d2lps.kvstore.launch.node import Node

pytestmark = pytest.mark.usefixtures("nothing_left")

# ---- the state machines ------------------------------------------------------------------------------------------------------


def heard(replies: list[Reply]) -> list[tuple[int, str, str, str]]:
    return [(reply.client, reply.op, reply.said, reply.error) for reply in replies]


def test_all_workers_hear_in_one_barrier_which_servers_are_wanted_or_none_does() -> None:
    server, wanted = Server([0, 1, 2]), Membership(1, (0, 1, 2), wanted=True)
    zero, one, two, three = (Asking(server, rank) for rank in range(4))
    assert not zero("barrier") and not one("barrier")
    assert len(server.step(wanted)) == 1 and not server.step(wanted), "once, however often it is said"
    again = Server([])
    again.restore(server.state())
    assert alike(again.state(), server.state()) and again.wanted == wanted
    word = "[1, 0, 1, 2]"
    assert heard(two("barrier")) == [(rank, "barrier", word, "") for rank in range(3)]
    assert heard(server.step(two.last)) == [(2, "barrier", word, "")], "asked once more"
    assert three("join")[0].error == "worker 3 cannot join while the servers change: try again"
    for ask in (zero, one, two):
        replies = ask("barrier", options={"said": "" if ask is not one else "done"})
    assert heard(replies) == [(rank, "barrier", "done", "") for rank in range(3)], (
        "where somebody may speak, nothing else is said"
    )
    zero("changed", options={"changes": 0})
    assert not three("join")[0].error and server.wanted == wanted, "put off: it is said again"
    assert not zero("changed", options={"changes": 1})[0].error and not server.wanted.servers
    assert "cannot join while the servers change" in Asking(server, 4)("join")[0].error, "it does not know who there is"
    assert not Asking(server, 5)("join", options={"changes": 1})[0].error and not server.step(wanted)


def test_who_is_lost_before_it_comes_never_comes() -> None:
    server = Server([])
    server.step(Lost(3))
    assert "given up" in Asking(server, 3)("join")[0].error and not server.clocks.at


def test_all_keys_can_go_and_what_is_open_can_be_seen() -> None:
    server = Server([0, 1])
    zero, one = Asking(server, 0), Asking(server, 1)

    def is_open() -> bool:
        [reply] = zero("state")
        return bool(json.loads(bytes(reply.value.tolist()))["open"])

    zero("init", key="w", value=torch.zeros(2))
    zero("offer", key="v[0:1]", value=torch.zeros(1))
    assert not is_open()
    zero("pushpull", key="w", value=torch.ones(2))
    assert is_open()
    one("pushpull", key="w", value=torch.ones(2))
    assert is_open(), "worker 0 has ended its iteration of this key, and not of all"
    for ask in (zero, one):
        ask("clock", clock=1)
    assert not is_open() and server.entries["w"].value.tolist() == [2.0, 2.0]
    zero("clear")
    assert not server.entries and not server.offers and not server.store
    for nonsense in (None, "1", [1], 1.5):
        assert "is no number of changes" in zero("changed", options={"changes": nonsense})[0].error


def test_a_client_has_sessions_with_the_servers_that_there_are() -> None:
    client = Client(0, 2)
    client.sessions[0].put(Request("clock"))
    assert client.follow({0, 2}) == ({2}, {1})
    assert client.sessions.keys() == {0, 2} and client.sessions[0].posted == 1


# ---- in processes -------------------------------------------------------------------------------------------------------------

KEYS = {f"k{n}": (3,) for n in range(8)} | {"big": (101, 3), "scalar": (), "table": (64, 2)}


def add_ones(kv: Any, folder: str) -> tuple[int, list[int]]:
    """Each worker adds 1 to all in each step, to the table by rows, until somebody says stop; how many steps, and who serves."""
    outs = {key: torch.zeros(shape) for key, shape in KEYS.items()}
    for key, out in outs.items():
        kv.init(key, out)
    step, stop = 0, torch.zeros(1)
    while not stop:
        step += 1
        for key, out in outs.items():
            if key == "table":
                kv.push_rows(key, torch.arange(64), torch.ones(64, 2))
            else:
                kv.push(key, torch.ones_like(out), priority=-len(key))
        if step % 3 == 0:
            kv.barrier()  # an iteration has begun: no server comes or goes here
        kv.clock()
        kv.barrier()
        works = [kv.pull(key, out) for key, out in outs.items()]
        stop.fill_(os.path.exists(f"{folder}/stop"))
        broadcast(kv.comm, stop, 0)  # workers may wait for one another, too
        for work in works:
            work.wait()
        assert step <= min(float(out.min()) for out in outs.values()), "a worker's own pushes are there"
    return step, list(kv.placement.servers)


def check_sums(run: Any) -> None:
    """Of all that was pushed nothing is lost, and nothing counts twice."""
    wanted = sum(steps for steps, _ in run)
    assert run.values.keys() == KEYS.keys()
    for key, value in run.values.items():
        assert value.shape == KEYS[key] and bool((value == wanted).all()), f"{key}: {value.unique()}, not {wanted}: {run.history}"


def run_and_change(
    change: Callable[[Cluster], Any], folder: Path, /, worker: Any = add_ones, workers: int = 3, **options: Any
) -> Any:
    """A run that ends some steps after the changes."""

    def saboteur(cluster: Cluster) -> None:
        cluster.sleep(0.1)
        change(cluster)
        (folder / "stop").touch()

    return kvstore.run(worker, workers, 2, str(folder), split=256, saboteur=saboteur, **options)


def there_and_back(cluster: Cluster) -> None:
    assert cluster.add_server() == 2
    cluster.remove_server(0)
    assert cluster.add_server() == 3
    cluster.remove_server(1)
    cluster.remove_server(2)


RULES: list[dict[str, Any]] = [
    {"consistency": "bsp", "durability": "log", "memory_budget": 2_000},
    {"consistency": "ssp", "staleness": 2},
    {"consistency": "adaptive", "staleness": 2, "durability": "fsync"},
    {"consistency": "asp"},
    {"consistency": "bsp", "placement": "load"},
]


@pytest.mark.soak(50)
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(map(str, rules.values())))
def test_nothing_is_lost(rules: dict[str, Any], tmp_path: Path) -> None:
    run = run_and_change(there_and_back, tmp_path, **rules)
    check_sums(run)
    assert [servers for _, servers in run] == [[3]] * 3
    assert [server.node for server in run.servers] == [0, 1, 2, 3] and not any(server.values for server in run.servers[:3])
    changes = [line.partition(": ")[2] for line in run.history]
    assert [change.partition(":")[0] for change in changes] == [
        "server 2 has come", "server 0 has gone", "server 3 has come", "server 1 has gone", "server 2 has gone",
    ]  # fmt: skip
    found = [re.search(r"([0-9]+) keys have moved, ([0-9,]+) bytes", change) for change in changes]
    keys, nbytes = ([int(match[n].replace(",", "")) for match in found if match] for n in (1, 2))
    assert all(2 <= count <= len(KEYS) for count in keys), "the two that are cut at least"
    assert 0 <= nbytes[0] - (50 * 12 + 31 * 8) <= 100 and 0 <= nbytes[4] - (51 * 12 + 32 * 8) <= 100, "rows, and some small keys"


def save_and_load(kv: Any, folder: str) -> list[int]:
    """Save, train on, and go back, twice, after the servers have changed; who serves then."""
    kv.init("hot", torch.arange(4.0), everywhere=True)
    add_ones(kv, folder)
    kv.save(f"{folder}/saved")
    before, after = ([torch.zeros(101, 3), torch.zeros(4)] for _ in range(2))
    kv.pull(["big", "hot"], before).wait()
    for _ in range(2):  # the second time, what was pushed after the first is forgotten
        kv.push(["big", "hot"], [torch.ones(101, 3), torch.ones(4)])
        kv.clock()
        kv.pull(["big", "hot"], after).wait()
        assert all(torch.equal(new, old + kv.num_workers) for new, old in zip(after, before, strict=True))
        kv.load(f"{folder}/saved")
    return list(kv.placement.servers)


def test_servers_that_have_come_are_saved_and_given_what_was(tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        cluster.add_server()
        cluster.remove_server(0)

    run = run_and_change(change, tmp_path, save_and_load, workers=2)
    assert run == [[1, 2]] * 2 and run.values["hot"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert saving.read(tmp_path / "saved")[0].keys() == {*KEYS, "hot"}


def add_but_for_one(kv: Any, folder: str) -> int:
    """Worker 2 leaves before the first server comes, so that it never hears of the worker."""
    if kv.rank == 2:
        kv.init(list(KEYS), [torch.zeros(shape) for shape in KEYS.values()])
        kv.leave()
        Path(folder, "left").touch()
        return 0
    assert until(lambda: os.path.exists(f"{folder}/left"), 60)
    return add_alone(kv, folder)


def test_a_later_run_goes_on_where_a_worker_had_left_before_servers_came(tmp_path: Path) -> None:
    options: dict[str, Any] = {"durability": "log", "folder": tmp_path / "store"}
    first = run_and_change(lambda cluster: cluster.add_server(), tmp_path, add_but_for_one, **options)
    again = kvstore.run(lambda kv: None, 1, 3, split=256, **options)
    assert alike(again.values, first.values) and float(first.values["k0"][0]) == sum(first)


@pytest.mark.parametrize("change, servers", [(Cluster.add_server, 3), (lambda cluster: cluster.remove_server(1), 1)])
def test_a_later_run_goes_on_with_the_servers_that_there_were_at_the_end(change: Any, servers: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"durability": "log", "folder": tmp_path / "store"}
    first = run_and_change(change, tmp_path, **options)
    check_sums(first)
    with pytest.raises(ValueError, match=f"is of a run with servers={servers}, not 2"):
        kvstore.run(add_ones, 3, 2, str(tmp_path), split=256, **options)
    for turn in (1, 2):
        again = kvstore.run(add_ones, 3, servers, str(tmp_path), split=256, **options)
        assert all("goes on with all that an earlier run had acknowledged" in line for line in again.history)
        assert alike(again.values, {key: value + 3 * turn for key, value in first.values.items()})


HALF_GIVEN = """
import os, signal, sys
from d2lps import kvstore
from test_kvstore_elastic import add_ones

if __name__ == "__main__":
    def doomed(kv, folder, caller=os.getpid()):
        kv.give = lambda *rest: (os.kill(caller, signal.SIGKILL), signal.pause())
        add_ones(kv, folder)
    options = {"split": 256, "durability": "fsync", "folder": sys.argv[1] + "/store"}
    kvstore.run(doomed, 2, 2, sys.argv[1], saboteur=lambda cluster: cluster.add_server(), **options)
"""


def test_no_later_run_goes_on_from_half_a_change(tmp_path: Path) -> None:
    clean = environment(TMPDIR=str(tmp_path), PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    job = subprocess.run([*script(tmp_path / "job.py", HALF_GIVEN), str(tmp_path)], env=clean, timeout=100)
    assert job.returncode == -signal.SIGKILL
    for servers in (2, 3):
        with pytest.raises(ValueError, match=r"servers='\[0, 1\] becoming \[0, 1, 2\]': no other run can go on"):
            kvstore.run(lambda kv: None, 1, servers, split=256, durability="fsync", folder=tmp_path / "store")


OPTIMIZERS = [{"name": "sgd", "lr": 0.1, "momentum": 0.9}, {"name": "adam", "lr": 0.01}, {"name": "adagrad", "lr": 0.1}]


def meet_until_changed(kv: Any, folder: str) -> None:
    """Barriers until the servers have changed; how many, the first worker alone decides."""
    for turn in count():
        if kv.rank == 0:
            Path(folder, f"over-{turn}").write_text(str(os.path.exists(f"{folder}/changed")))
        kv.barrier()
        if Path(folder, f"over-{turn}").read_text() == "True":
            break


def descend(kv: Any, folder: str, options: dict[str, Any], steps: int) -> None:
    """Gradients that depend on the value, on the worker and on the step; some of rows alone, some by pushpull."""
    generator = torch.Generator().manual_seed(kv.rank)
    outs = {key: torch.full(shape, 1.0) for key, shape in KEYS.items()}
    for key, out in outs.items():
        kv.init(key, out)
    kv.set_optimizer(**options)
    for step in range(steps):
        for key, out in outs.items():
            gradient = out * 0.1 + torch.randn(out.shape, generator=generator)
            rows = torch.randint(64, (9,), generator=generator)
            if key == "table":
                kv.push_rows(key, rows, gradient[rows])
            elif step % 2 and key == "big":
                kv.pushpull(key, gradient, torch.empty_like(out)).wait()
            else:
                kv.push(key, gradient)
        kv.clock()
        kv.barrier()
        for key, out in outs.items():
            kv.pull(key, out).wait()
        if folder and step == 3:
            Path(folder, f"begun-{kv.rank}").touch()
        if folder and step == steps // 2:
            meet_until_changed(kv, folder)


@pytest.mark.soak(50)
@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda options: options["name"])
def test_training_ends_as_without_the_change_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        for rank in range(2):
            while not (tmp_path / f"begun-{rank}").exists():
                cluster.sleep(0.01)
        cluster.add_server()
        cluster.remove_server(1)
        (tmp_path / "changed").touch()

    plain = kvstore.run(descend, 2, 2, "", options, 40, split=256)
    changed = kvstore.run(descend, 2, 2, str(tmp_path), options, 40, split=256, saboteur=saboteur)
    assert alike(changed.values, plain.values)
    assert [bool(server.values) for server in changed.servers] == [True, False, True]
    assert sum(server.nbytes for server in changed.servers) >= sum(server.nbytes for server in plain.servers)


# ---- whoever is killed meanwhile ----------------------------------------------------------------------------------------------


def harassed(change: Callable[[Cluster], Any], harm: Callable[[Cluster, random.Random], None]) -> Callable[[Cluster], None]:
    """The change, while somebody does harm at moments of no choice."""

    def both(cluster: Cluster) -> None:
        over, moments = threading.Event(), random.Random(len(cluster.servers))

        def harming() -> None:
            while not over.wait(moments.uniform(0.0, 0.5)):
                harm(cluster, moments)

        thread = threading.Thread(target=harming)
        thread.start()
        try:
            change(cluster)
        finally:
            over.set()
            thread.join()

    return both


@pytest.mark.soak(50)
@pytest.mark.parametrize(("consistency", "durability"), [("bsp", "log"), ("asp", "fsync")])
def test_servers_are_killed_while_they_come_and_go(consistency: str, durability: str, tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        for _ in range(3):
            cluster.remove_server(cluster.add_server() - 2)

    def harm(cluster: Cluster, moments: random.Random) -> None:
        moments.choice(cluster.servers).kill()

    options: dict[str, Any] = {"consistency": consistency, "durability": durability, "workers": 2, "timeout": 120}
    run = run_and_change(harassed(change, harm), tmp_path, **options)
    check_sums(run)
    assert any("was killed by SIGKILL" in line for line in run.history) and len(run.servers) == 2 + 3
    assert [servers for _, servers in run] == [[3, 4]] * 2


@pytest.mark.soak(50)
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_is_killed_while_servers_come_and_go(seed: int, tmp_path: Path) -> None:
    killed: list[int] = []

    def harm(cluster: Cluster, moments: random.Random) -> None:
        if all((tmp_path / f"begun-{rank}").exists() for rank in range(3)) and not killed:
            killed.append(seed % 3)  # before that, its death would be the end of the run
            cluster.sleep(0.1 * seed)
            cluster.workers[seed % 3].kill()

    def change(cluster: Cluster) -> None:
        while not killed or cluster.history[-1:] == []:
            cluster.remove_server(cluster.add_server() - 2)

    with pytest.warns(UserWarning, match=f"rank {seed % 3}"):
        run = run_and_change(harassed(change, harm), tmp_path, add_alone, durability="log")
    assert run[seed % 3] is None and list(run.lost) == [seed % 3]
    wanted = sum(steps for steps in run if steps)
    assert all(float(value.min()) >= wanted and float(value.max()) <= 1.5 * wanted + 2 for value in run.values.values())


def add_alone(kv: Any, folder: str) -> int:
    """As add_ones, but that no worker waits for another by itself."""
    outs = {key: torch.zeros(shape) for key, shape in KEYS.items()}
    for key, out in outs.items():
        kv.init(key, out)
    step = 0
    while not os.path.exists(f"{folder}/stop"):
        step += 1
        for key, out in outs.items():
            kv.push(key, torch.ones_like(out))
        kv.clock()
        kv.barrier()
        for key, out in outs.items():
            kv.pull(key, out).wait()
        Path(folder, f"begun-{kv.rank}").touch()
    return step


# ---- who does not take part, and what is refused ------------------------------------------------------------------------------


def late(kv: Any, folder: str) -> tuple[int, list[int]]:
    """Worker 2 comes when the servers have changed; worker 1 leaves before, and comes again."""
    if kv.rank:
        if kv.rank == 1:
            kv.leave()
        assert until(lambda: os.path.exists(f"{folder}/changed"), 60)
        kv.join()
    steps = add_alone(kv, folder)
    return steps, list(kv.placement.servers)


@pytest.mark.soak(50)
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_who_was_away_finds_the_servers_that_there_are(consistency: str, tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        cluster.add_server()
        cluster.remove_server(0)
        (tmp_path / "changed").touch()
        cluster.sleep(0.5)

    run = run_and_change(change, tmp_path, late, consistency=consistency, absent=[2])
    check_sums(run)
    assert [servers for _, servers in run] == [[1, 2]] * 3


def meet_once(kv: Any, folder: str) -> list[int]:
    """The only barrier comes in the middle of an iteration."""
    kv.init("w", torch.zeros(1))
    kv.push("w", torch.ones(1))
    kv.barrier()
    kv.clock()
    Path(folder, f"begun-{kv.rank}").touch()
    assert until(lambda: os.path.exists(f"{folder}/enough"), 60)
    return list(kv.placement.servers)


def test_without_a_barrier_between_two_iterations_no_server_comes_and_the_run_can_end_before_it(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def saboteur(cluster: Cluster) -> None:
        threading.Timer(1.0, (tmp_path / "enough").touch).start()
        try:
            cluster.add_server()
        except BaseException as error:
            raised.append(error)
            raise

    run = kvstore.run(meet_once, 2, 2, str(tmp_path), saboteur=saboteur)
    assert list(run) == [[0, 1]] * 2 and [type(error) for error in raised] == [RunIsOver]
    assert len(run.servers) == 2 and not run.history and run.values["w"] == 2


def test_where_it_cannot_be_written_down_no_server_comes_and_all_go_on(tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        with pytest.raises(RuntimeError, match=r"server 2 has not come: .*name it otherwise"):
            cluster.add_server()
        with pytest.raises(RuntimeError, match=r"server 1 has not gone: .*name it otherwise"):
            cluster.remove_server(1)

    def named(kv: Any, folder: str) -> list[int]:
        kv.init(["w", "w.momentum_buffer"], [torch.zeros(1), torch.zeros(1)])
        kv.set_optimizer("sgd", lr=0.0, momentum=0.9)
        while not os.path.exists(f"{folder}/stop"):
            kv.pushpull("w", torch.ones(1), torch.zeros(1)).wait()
            kv.clock()
            kv.barrier()
        return list(kv.placement.servers)

    assert list(run_and_change(change, tmp_path, named)) == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"durability": "replica"}, "durability='replica': servers come and go only where durability is 'memory', 'log' or"),
        ({"address": "tcp"}, "address='tcp://127.0.0.1': servers come and go only where .* address 'ipc'"),
    ],
)
def test_where_it_cannot_be_it_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        run_and_change(lambda cluster: cluster.add_server(), tmp_path, add_alone, **options)


@pytest.mark.parametrize("how", ["no room", "killed", "raises"])
def test_who_cannot_come_is_not_waited_for(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Node.start

    def starting(self: Node) -> None:
        if self.number == 2 and how == "no room" and not failed:
            failed.append(self)
            raise OSError(28, "No space left on device")
        start(self)
        if self.number == 2 and how == "killed" and not failed and self.group is not None:
            failed.append(self)
            os.kill(self.group.pids[0], signal.SIGKILL)

    failed, in_the_way = list[Node](), tmp_path / "store" / "server-2"
    monkeypatch.setattr(Node, "start", starting)

    def change(cluster: Cluster) -> None:
        if how == "raises":
            in_the_way.touch()
        with pytest.raises(RankDied, match=r"server 2 .* before it had anything: the others go on without it"):
            cluster.add_server()
        in_the_way.unlink(missing_ok=True)
        cluster.add_server()

    run = run_and_change(change, tmp_path, durability="log", folder=tmp_path / "store")
    check_sums(run)
    assert [servers for _, servers in run] == [[0, 1, 2]] * 3


def test_who_is_not_there_cannot_go_and_the_last_one_stays(tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        with pytest.raises(ValueError, match=r"server 7 cannot go: there are servers \[0, 1\]"):
            cluster.remove_server(7)
        cluster.remove_server(1)
        with pytest.raises(ValueError, match=r"server 0 cannot go: there are servers \[0\]"):
            cluster.remove_server(0)

    run = run_and_change(change, tmp_path)
    check_sums(run)
