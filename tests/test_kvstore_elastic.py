"""Servers that come and go while a run goes on: keys move with them, and nothing is lost, whoever is killed meanwhile."""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import nothing_left

from d2lps import kvstore
from d2lps.comm import RankDied
from d2lps.kvstore import Cluster, Lost, Membership, Reply, Request, Server
from d2lps.kvstore.core.changes import Changes
from d2lps.kvstore.core.client import Client
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Refused, alike
from d2lps.kvstore.core.pieces import Pieces
from d2lps.kvstore.core.placement import Placement, join_parts
from d2lps.kvstore.launch.resize import Resizing, plan_moves
from d2lps.kvstore.network.deployment import deploy
from d2lps.kvstore.storage.parcels import carry_out

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
        orders: dict[int, dict[str, Any]] = {s: {} for s in {*held} | after}
        moves = plan_moves(plan, found, after, orders)
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
    state = {"momentum": value + 100, "steps": torch.tensor(3.0)}
    entries = [
        Entry("w[0:4]", value[:4].clone(), None, {"momentum": state["momentum"][:4].clone(), "steps": state["steps"]}, 5, (1, 0)),
        Entry("w[4:6]", value[4:].clone(), None, {"momentum": state["momentum"][4:].clone(), "steps": state["steps"] + 1}, 6, (1, 0)),
        Entry("e", torch.empty(0, 3)),
    ]
    [cut, moments, version, owner] = Pieces(entries).cut("w[3:5]")
    assert alike([cut, moments], [value[3:5], {"momentum": state["momentum"][3:5], "steps": torch.tensor(4.0)}])
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
    assert not server.settled
    zero("init", key="w", value=torch.zeros(2))
    for ask in (zero, one):
        ask("hold", clock=1)
        ask("push", key="w", value=torch.ones(2))
        ask("clock", clock=1)
    assert not zero("settle") and not server.settled
    assert not one("settle") and server.settled
    assert server.entries["w"].value.tolist() == [2, 2] and not server.entries["w"].open
    replies = server.resize(1, {"v"}, {"v": [torch.ones(1), {}, 3, (0, 0)]})
    assert [(reply.client, reply.op, reply.view, reply.error) for reply in replies] == [(0, "settle", 1, ""), (1, "settle", 1, "")]
    assert server.entries.keys() == {"v"} and not server.settled and not server.stops and list(server.store) == [("v", "")]
    [stale] = server.step(Request("pull", "v", sequence=6))
    assert isinstance(stale, Reply) and stale.error.startswith("stale view")


def test_no_worker_is_no_settled_server() -> None:
    server = Server([0])
    ask = Asking(server, 0)
    ask("settle")
    assert server.settled
    ask("leave")
    assert not server.settled


class Promised:
    """The answer to a hold."""

    def __init__(self, clock: int = 0, error: str = "") -> None:
        self.reply = Reply(0, 0, 1, clock=clock, error=error) if clock or error else None

    def wait(self) -> Reply:
        assert self.reply is not None
        return self.reply


def test_a_worker_stops_where_all_do() -> None:
    changes, answer = Changes(), Promised()
    assert changes.at(6) is None
    assert changes.heard(wanted := Membership(1, {}, (0, 1)), answer) == Request("hold", clock=7)
    assert changes.heard(wanted, answer) is None and changes.heard(Membership(2, {}, (0,)), answer) is None, "one after another"
    assert changes.at(6) is None, "up to its promise it does not even look"
    answer.reply = Promised(8).reply
    assert changes.at(7) is None and changes.at(8) == wanted
    asked, placement = [], Placement([0])

    def request(server: int, request: Request) -> Any:
        asked.append((server, request.op))
        return Promised(8)

    changes.reached(8, [], placement, request)
    assert asked == [(0, "settle")] and placement.servers == [0, 1] and list(changes.followed) == [wanted]
    assert changes.heard(Membership(2, {}, (0,)), Promised(error="no member")) == Request("hold", clock=9)
    with pytest.raises(Refused, match="no member"):
        changes.at(9)
    assert changes.heard(Membership(3, {}, (3,)), None) is not None, "who takes no part only takes notes"
    changes.catch_up(placement)
    assert placement.servers == [3]


def test_sessions_begin_and_end() -> None:
    client = Client(0, 2)
    client.sessions[0].put(Request("clock"))
    assert client.follow(Membership(4, {}, (0, 2))) == ({2}, {1})
    assert {server: session.view for server, session in client.sessions.items()} == {0: 4, 2: 4}
    assert client.sessions[0].posted == 1


# ---- in processes -------------------------------------------------------------------------------------------------------------

KEYS = {f"k{n}": (3,) for n in range(8)} | {"big": (101, 3), "scalar": (), "table": (64, 2)}


def add_ones(kv: Any, steps: int) -> list[int]:
    """Each worker adds 1 to all in each step, to the table by rows; what it reads is checked as far as the rule promises it."""
    outs = {key: torch.zeros(shape) for key, shape in KEYS.items()}
    for key, out in outs.items():
        kv.init(key, out)
    for step in range(1, steps + 1):
        for key, out in outs.items():
            if key == "table":
                kv.push_rows(key, torch.arange(64), torch.ones(64, 2))
            else:
                kv.push(key, torch.ones_like(out), priority=-len(key))
        if step % 3 == 0:
            kv.barrier()
        kv.clock()
        works = [kv.pull(key, out) for key, out in outs.items()]
        if step % 5 == 0:
            kv.comm.barrier()  # as any collective of the workers' own
        for work in works:
            work.wait()
        least = min(float(out.min()) for out in outs.values())
        assert step <= least, "a worker's own pushes are there"
        time.sleep(0.002)
    return list(kv.placement.servers)


def there_and_back(cluster: Cluster) -> None:
    cluster.sleep(0.1)
    assert cluster.add_server() == 2
    cluster.remove_server(0)
    assert cluster.add_server() == 3
    cluster.remove_server(1)
    cluster.remove_server(2)


def check_sums(run: Any, workers: int, steps: int) -> None:
    assert run.values.keys() == KEYS.keys()
    for key, value in run.values.items():
        assert value.shape == KEYS[key] and bool((value == workers * steps).all()), f"{key}: {value.unique()} in {run.history}"


RULES = [("bsp", 0, "hash"), ("ssp", 2, "hash"), ("asp", 0, "hash"), ("bsp", 0, "load")]


@pytest.mark.parametrize(("consistency", "staleness", "placement"), RULES)
@pytest.mark.parametrize("durability", ["memory", "log"])
def test_nothing_is_lost(consistency: str, staleness: int, placement: str, durability: str) -> None:
    options: dict[str, Any] = {"staleness": staleness, "durability": durability, "split": 256, "placement": placement}
    run = kvstore.run(add_ones, 3, 2, 250, consistency=consistency, saboteur=there_and_back, **options)
    assert list(run) == [[3]] * 3
    check_sums(run, 3, 250)
    assert [server.node for server in run.servers] == [0, 1, 2, 3] and not any(server.values for server in run.servers[:3])
    changes = [line.partition(": ")[2] for line in run.history if "keys have moved" in line]
    assert [change.partition(":")[0] for change in changes] == [
        "server 2 has come", "server 0 has gone", "server 3 has come", "server 1 has gone", "server 2 has gone",
    ]  # fmt: skip
    assert "11 keys have moved, 2,080 bytes of their values" not in changes[0] and "0 keys" not in changes[0]
