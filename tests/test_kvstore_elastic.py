"""Servers that come and go while a run goes on: keys move with them, and nothing is lost, whoever is killed meanwhile."""

# ruff: noqa: F401 - fixtures are imported, and named again as parameters

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT, environment, nothing_left, script

from d2lps import kvstore
from d2lps.collectives import broadcast
from d2lps.comm import RankDied
from d2lps.kvstore import Cluster, Lost, Membership, Reply, Request, Server
from d2lps.kvstore.core import saving
from d2lps.kvstore.core.changes import Changes
from d2lps.kvstore.core.client import Client
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Refused, alike
from d2lps.kvstore.core.pieces import Pieces
from d2lps.kvstore.core.placement import Placement, join_parts
from d2lps.kvstore.launch.chaos import RunIsOver
from d2lps.kvstore.launch.node import Node
from d2lps.kvstore.launch.resize import Resizing, plan_orders
from d2lps.kvstore.network.deployment import deploy
from d2lps.kvstore.storage import parcels

pytestmark = pytest.mark.usefixtures("nothing_left")

# ---- parts, cut anew --------------------------------------------------------------------------------------------------------

Servers = dict[int, dict[str, torch.Tensor]]


def spread(values: dict[str, torch.Tensor], placement: Placement) -> Servers:
    """What each server has of these values."""
    held: Servers = {server: {} for server in placement.servers}
    for key, value in values.items():
        for part in placement.place(key, value.shape, value.dtype):
            held[part.server][part.name] = part.of(value)
    return held


@pytest.mark.parametrize("by", ["hash", "load"])
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.integers(0, 40), max_size=6), changes=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_servers_that_only_know_their_parts_come_to_what_workers_reckon(by: str, rows: list[int], changes: list[int]) -> None:
    """The coordinator rebuilds the placement from what is found, and the orders lead to exactly what workers will ask for."""
    values = {f"k{n}": torch.rand(length, 2) for n, length in enumerate(rows)} | {"x[3:4]": torch.tensor(7.0)}
    plan = deploy(1, 2, split=64, placement=by)
    workers = plan.placed()
    held = spread(values, workers)
    for server in changes:
        after = {*workers.servers} ^ {server}
        if not after:
            continue
        found = {s: {name: (list(t.shape), "float32") for name, t in parts.items()} for s, parts in held.items()}
        orders, moves = plan_orders(plan, found, after)
        assert moves == sorted(workers.follow(after), key=moves.index)
        came: dict[int, list[Entry]] = {s: [] for s in orders}
        for src, order in orders.items():
            pieces = Pieces(Entry(name, value) for name, value in held.get(src, {}).items())
            for dst, names in order["gives"].items():
                assert src in orders[dst]["takes"] and dst in after
                came[dst] += [Entry(name, pieces.cut(name)[0]) for name in names]
        now = {}
        for s, order in orders.items():
            pieces = Pieces([*(Entry(name, value) for name, value in held.get(s, {}).items()), *came[s]])
            now[s] = {name: pieces.cut(name)[0] for name in order["parts"]}
        assert all(not now[s] for s in now.keys() - after)
        held = {s: now[s] for s in after}
        asked = {(part.server, part.name) for parts in workers.parts.values() for part in parts}
        assert asked == {(s, name) for s, parts in held.items() for name in parts}
        assert alike(join_parts({name: t for parts in held.values() for name, t in parts.items()}), values)


def test_of_big_tensors_only_what_another_server_gets_travels() -> None:
    workers = Placement([0, 1], split=100)
    workers.place("w", (60, 5), torch.float32)
    assert [(m.first, m.last, m.src, m.dst) for m in workers.follow([0, 1, 2])] == [(20, 30, 0, 1), (40, 60, 1, 2)]


def test_what_belongs_to_a_part_is_cut_with_it() -> None:
    value = torch.arange(12.0).view(6, 2)
    states = [{"momentum": rows + 100, "steps": torch.tensor(steps)} for rows, steps in ((value[:4], 3.0), (value[4:], 4.0))]
    entries = [
        Entry("w[0:4]", value[:4].clone(), None, states[0], 5, (1, 0)),
        Entry("w[4:6]", value[4:].clone(), None, states[1], 6, (1, 0)),
        Entry("e", torch.empty(0, 3)),
    ]
    [cut, moments, version, owner] = Pieces(entries).cut("w[3:5]")
    assert alike([cut, moments], [value[3:5], {"momentum": value[3:5] + 100, "steps": torch.tensor(4.0)}])
    assert (version, owner) == (6, (1, 0))
    cut.zero_()
    assert entries[0].value[3].tolist() == [6.0, 7.0], "it shares no memory with the pieces"
    assert Pieces(entries).cut("e")[0].shape == (0, 3)
    with pytest.raises(ValueError, match=r"rows from 6 of 'w\[3:7\]' are in none"):
        Pieces(entries).cut("w[3:7]")
    with pytest.raises(ValueError, match="rows from 0 of 'v'"):
        Pieces(entries).cut("v")


def test_a_part_that_no_push_has_reached_has_no_state_yet() -> None:
    """Some optimizers make their state in the first step; where there was none, it begins with zeros."""
    pieces = Pieces([Entry("w[0:2]", torch.ones(2), None, {"momentum": torch.ones(2)}), Entry("w[2:4]", torch.ones(2))])
    assert pieces.cut("w")[1]["momentum"].tolist() == [1, 1, 0, 0]
    assert pieces.cut("w[2:3]")[1] == {}


# ---- the state machines ------------------------------------------------------------------------------------------------------


class Asking:
    """A worker on a perfect wire."""

    def __init__(self, server: Server, rank: int) -> None:
        self.server, self.session = server, Client(rank, 1).sessions[0]

    def __call__(self, op: str, **fields: Any) -> list[tuple[int, str, int, str]]:
        request = self.session.number(Request(op, **fields), op)
        return [(r.client, r.op, r.clock, r.error) for r in self.server.step(request) if isinstance(r, Reply)]


def test_all_stop_at_the_latest_clock_that_one_of_them_may_reach() -> None:
    server = Server([0, 1, 2], "ssp", 3)
    zero, one, two = (Asking(server, rank) for rank in range(3))
    assert not zero("hold", clock=4) and not one("hold", clock=7)
    again = Server([])
    again.restore(server.state())
    assert again.stops == {0: 4, 1: 7}
    replies = two("hold", clock=2)
    assert sorted(replies) == [(0, "hold", 7, ""), (1, "hold", 7, ""), (2, "hold", 7, "")]
    server.step(Lost(1))
    late = server.step(Request("hold", clock=4, client=0, sequence=1))
    assert [reply.clock for reply in late if isinstance(reply, Reply)] == [7], "it was said, and stays"


def test_who_is_gone_holds_nobody_up_and_nobody_comes_meanwhile() -> None:
    server = Server([0, 1, 2])
    zero, one, two, three = (Asking(server, rank) for rank in range(4))
    zero("hold", clock=4), one("hold", clock=5)
    [(*_, error)] = three("join")
    assert error == "worker 3 cannot join while the servers change: try again"
    assert [reply[:3] for reply in two("leave")] == [(0, "hold", 5), (1, "hold", 5), (2, "leave", 0)]


def test_settled_is_when_all_have_settled_and_answers_come_with_the_new_view() -> None:
    server = Server([0, 1], "bsp")
    zero, one = Asking(server, 0), Asking(server, 1)
    assert not parcels.settled(server)
    zero("init", key="w", value=torch.zeros(2))
    for ask in (zero, one):
        ask("hold", clock=1)
        ask("push", key="w", value=torch.ones(2))
        ask("clock", clock=1)
    assert not zero("settle") and not parcels.settled(server)
    assert not one("settle") and parcels.settled(server)
    assert server.entries["w"].value.tolist() == [2, 2] and not server.entries["w"].open
    replies = parcels.resize(server, 1, {"v"}, {"v": [torch.ones(1), {}, 3, (0, 0)]})
    assert [(r.client, r.op, r.view, r.error) for r in replies] == [(0, "settle", 1, ""), (1, "settle", 1, "")]
    assert server.entries.keys() == {"v"} and not server.stops and list(server.store) == [("v", "")]
    assert not parcels.settled(server)
    [stale] = server.step(Request("pull", "v", sequence=6))
    assert isinstance(stale, Reply) and stale.error.startswith("stale view")


def test_no_worker_is_no_settled_server() -> None:
    server = Server([0])
    ask = Asking(server, 0)
    ask("settle")
    assert parcels.settled(server)
    ask("leave")
    assert not parcels.settled(server)


class Promised:
    """The answer to a hold, or to a settle: the servers are in a view then."""

    def __init__(self, clock: int = 0, error: str = "", view: int = 0) -> None:
        self.reply = Reply(0, 0, 1, clock=clock, error=error, view=view) if clock or error else None

    def wait(self) -> Reply:
        assert self.reply is not None
        return self.reply


def test_a_worker_stops_where_all_do() -> None:
    changes, answer = Changes(), Promised()
    assert changes.at(6) is None
    assert changes.heard(wanted := Membership(1, (0, 1)), answer) == Request("hold", clock=7)
    assert changes.heard(wanted, answer) is None and changes.heard(Membership(2, (0,)), answer) is None, "one after another"
    assert changes.at(6) is None, "up to its promise it does not even look"
    answer.reply = Promised(8).reply
    assert changes.at(7) is None and changes.at(8) == wanted
    asked, placement = [], Placement([0])

    def request(server: int, request: Request) -> Any:
        asked.append((server, request.op))
        return Promised(8, view=1)

    changes.reached(8, [], placement, request)
    assert asked == [(0, "settle")] and placement.servers == [0, 1] and list(changes.followed) == [wanted]
    assert changes.heard(Membership(2, (0,)), Promised(error="no member")) == Request("hold", clock=9)
    with pytest.raises(Refused, match="no member"):
        changes.at(9)
    assert changes.heard(Membership(3, (3,)), None) is not None, "who takes no part only takes notes"
    changes.catch_up(placement)
    assert placement.servers == [3]


def test_who_leaves_with_a_change_open_hears_of_the_next_ones_too() -> None:
    changes, placement = Changes(), Placement([0])
    assert changes.heard(Membership(1, (0, 1)), Promised(8)) == Request("hold", clock=1), "it never comes to clock 8"
    for wanted in (Membership(2, (1,)), Membership(3, (1, 2)), Membership(3, (1, 2)), Membership(4, (1, 2), instead=3)):
        assert changes.heard(wanted, Promised()) is None
    changes.catch_up(placement)
    assert placement.servers == [1, 2] and [wanted.view for wanted in changes.followed] == [1, 2, 4]
    assert changes.heard(Membership(4, (1, 2), instead=3), Promised()) is None, "it has been followed"
    assert changes.heard(Membership(5, (2,)), Promised()) == Request("hold", clock=1)


def test_a_change_that_came_too_early_is_told_again_to_who_takes_part() -> None:
    changes, placement, second = Changes(), Placement([0]), Membership(2, (1,))
    assert changes.heard(Membership(1, (0, 1)), Promised(1)) is not None and changes.heard(second, Promised()) is None
    changes.reached(1, [], placement, lambda server, request: Promised(1, view=1))
    assert placement.servers == [0, 1]
    assert changes.heard(second, Promised(2)) == Request("hold", clock=2)
    changes.reached(2, [], placement, lambda server, request: Promised(2, view=2))
    assert placement.servers == [1] and not changes.open and not changes.missed


def test_a_change_is_called_off_for_who_has_stopped_and_for_who_has_not() -> None:
    stopped, computing, placement = Changes(), Changes(), Placement([0])
    for changes in (stopped, computing):
        assert changes.heard(Membership(1, (0, 1)), Promised(1)) == Request("hold", clock=1)
    stopped.reached(1, [], placement, lambda server, request: Promised(1, view=0))
    assert placement.servers == [0] and not stopped.followed
    again = Membership(2, (0, 1), instead=1)
    assert stopped.heard(again, Promised(2)) == Request("hold", clock=2)
    assert computing.heard(again, Promised(2)) == Request("hold", clock=1)
    assert [[change.wanted for change in changes.open] for changes in (stopped, computing)] == [[again], [again]]


def test_who_stops_for_a_change_that_was_called_off_before_is_there_for_the_one_in_its_stead() -> None:
    changes, placement, again = Changes(), Placement([0]), Membership(2, (0, 1, 2), instead=1)
    assert changes.heard(Membership(1, (0, 1)), Promised(1)) is not None

    def settle(server: int, request: Request) -> Any:
        assert changes.heard(again, Promised(5)) == Request("hold", clock=2), "while it waits for the first"
        return Promised(1, view=2)

    changes.reached(1, [], placement, settle)
    assert placement.servers == [0, 1, 2] and list(changes.followed) == [again] and not changes.open and not changes.missed


def test_a_server_tells_a_barrier_in_front_of_the_place_where_all_stop() -> None:
    server = Server([0, 1], consistency="asp")
    zero, one = Asking(server, 0), Asking(server, 1)
    assert not one("barrier") and not parcels.stuck(server)
    assert not zero("settle") and parcels.stuck(server) and not parcels.settled(server)
    assert [(reply.client, reply.op, reply.view, reply.error) for reply in parcels.resume(server)] == [(0, "settle", 0, "")]
    assert not parcels.stuck(server) and not server.stops
    assert [op for _, op, *_ in zero("barrier")] == ["barrier", "barrier"] and not parcels.stuck(server)


def test_sessions_begin_and_end() -> None:
    client = Client(0, 2)
    client.sessions[0].put(Request("clock"))
    assert client.follow(Membership(4, (0, 2))) == ({2}, {1})
    assert {server: session.view for server, session in client.sessions.items()} == {0: 4, 2: 4}
    assert client.sessions[0].posted == 1


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
            kv.barrier()
        kv.clock()
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
    """Save, train on, and go back, after the servers have changed; who serves then."""
    add_ones(kv, folder)
    kv.save(f"{folder}/saved")
    before, after = torch.zeros(101, 3), torch.zeros(101, 3)
    kv.pull("big", before).wait()
    kv.pushpull("big", torch.ones(101, 3), after).wait()
    kv.clock()
    kv.load(f"{folder}/saved")
    kv.pull("big", after).wait()
    assert torch.equal(before, after)
    return list(kv.placement.servers)


def test_servers_that_have_come_are_saved_and_given_what_was(tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        cluster.add_server()
        cluster.remove_server(0)

    assert run_and_change(change, tmp_path, save_and_load, workers=2) == [[1, 2]] * 2
    assert saving.read(tmp_path / "saved")[0].keys() == KEYS.keys()


def test_a_later_run_goes_on_where_servers_had_come(tmp_path: Path) -> None:
    options: dict[str, Any] = {"durability": "log", "folder": tmp_path / "store"}
    first = run_and_change(lambda cluster: cluster.add_server(), tmp_path, **options)
    check_sums(first)
    with pytest.raises(ValueError, match="is of a run with servers=3, not 2"):
        kvstore.run(add_ones, 3, 2, str(tmp_path), split=256, **options)
    again = kvstore.run(add_ones, 3, 3, str(tmp_path), split=256, **options)
    assert all("goes on with all that an earlier run had acknowledged" in line for line in again.history)
    assert alike(again.values, {key: value + 3 for key, value in first.values.items()})


HALF_TAKEN = """
import os, signal, sys
from pathlib import Path
from d2lps import kvstore
from d2lps.kvstore.launch.resize import Resizing
from test_kvstore_elastic import add_ones

def heard(self, server, word, text, real=Resizing.heard):
    if word == "take":  # this server has now what the others have no more, or the other way round
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, server, word, text)

if __name__ == "__main__":
    Resizing.heard = heard
    options = {"split": 256, "durability": "fsync", "folder": sys.argv[1] + "/store"}
    kvstore.run(add_ones, 2, 2, sys.argv[1], saboteur=lambda cluster: cluster.add_server(), **options)
"""


def test_no_later_run_goes_on_from_half_a_change(tmp_path: Path) -> None:
    clean = environment(TMPDIR=str(tmp_path), PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    job = subprocess.run([*script(tmp_path / "job.py", HALF_TAKEN), str(tmp_path)], env=clean, timeout=100)
    assert job.returncode == -signal.SIGKILL
    for servers in (2, 3):
        with pytest.raises(ValueError, match=r"servers='\[0, 1\] becoming \[0, 1, 2\]': no other run can go on"):
            kvstore.run(lambda kv: None, 1, servers, split=256, durability="fsync", folder=tmp_path / "store")


@pytest.mark.parametrize("change, servers", [(Cluster.add_server, 3), (lambda cluster: cluster.remove_server(1), 1)])
def test_a_later_run_goes_on_with_the_servers_that_there_were_at_the_end(change: Any, servers: int, tmp_path: Path) -> None:
    def read(kv: Any) -> list[float]:
        outs = [torch.zeros(shape) for shape in KEYS.values()]
        kv.init(list(KEYS), outs)
        kv.pull(list(KEYS), outs).wait()
        return [float(value) for out in outs for value in (out.min(), out.max())]

    options: dict[str, Any] = {"durability": "log", "folder": tmp_path / "disk", "split": 256}
    first = run_and_change(change, tmp_path, consistency="asp", durability="log", folder=tmp_path / "disk")
    check_sums(first)
    wanted = float(sum(steps for steps, _ in first))
    for _ in range(2):
        assert kvstore.run(read, 1, servers, **options) == [[wanted] * 2 * len(KEYS)]


OPTIMIZERS = [{"name": "sgd", "lr": 0.1, "momentum": 0.9}, {"name": "adam", "lr": 0.01}, {"name": "adagrad", "lr": 0.1}]


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
        for key, out in outs.items():
            kv.pull(key, out).wait()
        if folder and step == 3:
            Path(folder, f"begun-{kv.rank}").touch()
        while folder and step == steps // 2 and not os.path.exists(f"{folder}/wished"):
            time.sleep(0.01)  # so that the change comes in the middle


@pytest.mark.soak(50)
@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda options: options["name"])
def test_training_ends_as_without_the_change_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        for rank in range(2):
            while not (tmp_path / f"begun-{rank}").exists():
                cluster.sleep(0.01)
        threading.Timer(0.2, (tmp_path / "wished").touch).start()
        cluster.add_server()
        cluster.remove_server(1)

    plain = kvstore.run(descend, 2, 2, "", options, 40, split=256)
    changed = kvstore.run(descend, 2, 2, str(tmp_path), options, 40, split=256, saboteur=saboteur)
    assert alike(changed.values, plain.values)
    assert [bool(server.values) for server in changed.servers] == [True, False, True]
    assert sum(server.nbytes for server in changed.servers) >= sum(server.nbytes for server in plain.servers)


# ---- whoever is killed meanwhile ----------------------------------------------------------------------------------------------

POINTS = [(stage, when) for stage in ("settled", "give", "take") for when in ("before", "after")]


def kill_at(monkeypatch: pytest.MonkeyPatch, points: list[tuple[str, str]], kill: Callable[[Resizing, int], None]) -> list[str]:
    """In the first change at the first point, in the second one at the second: whom `kill` likes, before or after it is asked."""
    answers, heard, seen, log = Resizing._answers, Resizing.heard, set[tuple[int, int]](), list[str]()

    def at(self: Resizing, number: int, word: str, when: str) -> None:
        if self.view <= len(points) and (word, when) == points[self.view - 1] and (self.view, number) not in seen:
            seen.add((self.view, number))
            log.append(f"{word} {when} {number}")
            kill(self, number)

    def asking(self: Resizing, word: str, orders: dict[int, Any], *rest: Any) -> Any:
        for number in orders:
            at(self, number, word, "before")
        return answers(self, word, orders, *rest)

    def hearing(self: Resizing, server: int, word: str, text: str) -> None:
        heard(self, server, word, text)
        if word == self.word and server in self.said:
            at(self, server, word, "after")

    monkeypatch.setattr(Resizing, "_answers", asking)
    monkeypatch.setattr(Resizing, "heard", hearing)
    return log


@pytest.mark.soak(50)
@pytest.mark.parametrize(("consistency", "durability"), [("bsp", "log"), ("asp", "fsync")])
def test_every_server_is_killed_at_every_stage(
    consistency: str, durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(cluster: Cluster) -> None:
        for _ in range(len(POINTS)):
            cluster.remove_server(cluster.add_server() - 2)

    def kill(resizing: Resizing, number: int) -> None:
        resizing.coordinator.nodes[number].kill()

    log = kill_at(monkeypatch, [point for point in POINTS for _ in "+-"], kill)
    run = run_and_change(change, tmp_path, workers=2, consistency=consistency, durability=durability, timeout=120)
    check_sums(run)
    assert {line.rpartition(" ")[0] for line in log} == {" ".join(point) for point in POINTS}
    assert len(log) == 2 * (2 + 3) + 2 * (2 + 3) + 2 * (3 + 3), "those before, and in the last stage those after it, too"
    assert sum("was killed by SIGKILL" in line for line in run.history) >= len(log) - 2
    assert len(run.servers) == 2 + len(POINTS)


def test_in_memory_the_death_of_a_server_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(resizing: Resizing, number: int) -> None:
        if number == 0:
            resizing.coordinator.nodes[number].kill()

    kill_at(monkeypatch, [("give", "before")], kill)
    with pytest.raises(RankDied, match="server 0 was killed by SIGKILL, and what it had is lost"):
        run_and_change(lambda cluster: cluster.add_server(), tmp_path)


@pytest.mark.soak(50)
@pytest.mark.parametrize("point", POINTS, ids=" ".join)
def test_a_worker_is_killed_at_every_stage(point: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters: list[Cluster] = []

    def kill(resizing: Resizing, number: int) -> None:
        if number == 0:
            clusters[0].workers[1].kill()

    def change(cluster: Cluster) -> None:
        clusters.append(cluster)
        while not (tmp_path / "begun-1").exists():  # before that, its death would be the end of the run
            cluster.sleep(0.01)
        cluster.add_server()
        cluster.remove_server(0)

    kill_at(monkeypatch, [point], kill)
    with pytest.warns(UserWarning, match="rank 1"):
        run = run_and_change(change, tmp_path, add_alone, durability="log")
    assert run[1] is None and list(run.lost) == [1]
    wanted = run[0] + run[2]
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
        for key, out in outs.items():
            kv.pull(key, out).wait()
        Path(folder, f"begun-{kv.rank}").touch()
    return step


# ---- who does not take part, and what is refused ------------------------------------------------------------------------------


def late(kv: Any, folder: str, tell: bool) -> tuple[int, list[int]]:
    """Worker 2 comes when the servers have changed; worker 1 leaves before, or when it has told how far it goes."""
    if kv.rank:
        if kv.rank == 1:
            while tell and not kv.transport.changes.open:
                time.sleep(0.01)
            kv.leave()
        while not os.path.exists(f"{folder}/changed"):
            time.sleep(0.01)
        kv.join()
    steps = add_alone(kv, folder)
    return steps, list(kv.placement.servers)


@pytest.mark.soak(50)
@pytest.mark.parametrize("tell", [False, True])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_who_was_away_finds_the_servers_that_there_are(consistency: str, tell: bool, tmp_path: Path) -> None:
    def change(cluster: Cluster) -> None:
        cluster.add_server()
        cluster.remove_server(0)
        (tmp_path / "changed").touch()
        cluster.sleep(0.5)

    run = run_and_change(change, tmp_path, partial(late, tell=tell), consistency=consistency, absent=[2])
    check_sums(run)
    assert [servers for _, servers in run] == [[1, 2]] * 3


def fall_silent(kv: Any, folder: str) -> int:
    """Worker 1 computes on, without another clock."""
    kv.init("w", torch.zeros(1))
    kv.clock()
    Path(folder, f"begun-{kv.rank}").touch()
    while kv.rank and not os.path.exists(f"{folder}/enough"):
        time.sleep(0.01)
    return int(kv.iteration)


def test_who_ends_no_iteration_any_more_holds_the_change_up_and_the_run_can_end_before_it(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def saboteur(cluster: Cluster) -> None:
        while not all((tmp_path / f"begun-{rank}").exists() for rank in range(2)):
            cluster.sleep(0.01)
        threading.Timer(1.0, (tmp_path / "enough").touch).start()
        try:
            cluster.add_server()
        except BaseException as error:
            raised.append(error)
            raise

    run = kvstore.run(fall_silent, 2, 2, str(tmp_path), saboteur=saboteur)
    assert list(run) == [1, 1] and [type(error) for error in raised] == [RunIsOver]
    assert len(run.servers) == 2 and not run.history


def meet_in_a_barrier(kv: Any, folder: str) -> list[int]:
    """Worker 1 ends many iterations more than the others, which wait for it in a barrier; then they go on together."""
    kv.init("w", torch.zeros(1))
    for step in range(2 + 30 * (kv.rank == 1)):
        kv.push("w", torch.ones(1))
        kv.clock()
        Path(folder, f"begun-{kv.rank}-{step}").touch()
        time.sleep(0.02 * (kv.rank == 1))
    kv.barrier()
    out = torch.zeros(1)
    while not os.path.exists(f"{folder}/stop") or kv.iteration < 40:
        kv.push("w", torch.ones(1))
        kv.clock()
        kv.pull("w", out).wait()
        time.sleep(0.01)
    return [kv.iteration, *kv.placement.servers]


@pytest.mark.soak(50)
@pytest.mark.parametrize("durability", ["memory", "log"])
def test_a_barrier_in_front_of_where_all_stop_calls_the_change_off_until_later(durability: str, tmp_path: Path) -> None:
    def saboteur(cluster: Cluster) -> None:
        while not (tmp_path / "begun-1-4").exists():
            cluster.sleep(0.01)
        cluster.add_server()
        cluster.servers[0].kill() if durability == "log" else cluster.remove_server(0)
        (tmp_path / "stop").touch()

    options: dict[str, Any] = {"consistency": "asp", "durability": durability, "timeout": 20}
    run = kvstore.run(meet_in_a_barrier, 3, 2, str(tmp_path), saboteur=saboteur, **options)
    assert run.values["w"] == sum(iterations for iterations, *_ in run)
    assert [servers for _, *servers in run] == [[0, 1, 2] if durability == "log" else [1, 2]] * 3


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
