"""The parameter server's state machine: what it does with requests, once each, whatever the network does to them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps.kvstore import Lost, Membership, Reply, Request, Server, register_optimizer
from d2lps.kvstore.core import server as server_module
from d2lps.kvstore.core.client import Session
from d2lps.kvstore.core.events import Append, Event, Send, alike, replace
from d2lps.kvstore.core.exactly_once import WINDOW, ClientRecord
from d2lps.kvstore.core.optimizers import make_optimizer
from d2lps.kvstore.storage.frame import pack, unpack

STORMS = 1_700 if os.environ.get("D2LPS_SOAK") else 50  # of some 60 pushes each


class Asking:
    """A client on a perfect wire: every request is delivered at once."""

    def __init__(self, server: Server, rank: int, epoch: int = 0) -> None:
        self.server, self.session, self.answers = server, Session(rank, epoch), {}
        self.last: Request = Request("")

    def __call__(self, op: str, key: str = "", value: Any = None, **fields: Any) -> list[Reply]:
        """The replies, to anybody, that the request has led to."""
        value = torch.tensor(value) if isinstance(value, list) else value
        self.last = self.session.number(Request(op, key, value, **fields), op)
        replies = [effect for effect in self.server.step(self.last) if isinstance(effect, Reply)]
        for reply in replies:
            self.session.answered(reply)
        return replies


def read(server: Server, key: str = "w") -> list[float]:
    return server.entries[key].value.tolist()


def replayed(log: list[Event], **kwargs: Any) -> Server:
    server = Server(**kwargs)
    for event in log:
        server.step(event)
    return server


# ---- one worker ---------------------------------------------------------------------------------------------------------


def test_push_adds_and_pull_returns_a_copy() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [0.0, 0.0])
    ask("push", "w", [1.0, 2.0])
    ask("push", "w", [1.0, 2.0])
    [reply] = ask("pull", "w")
    assert reply.value is not None and reply.value.tolist() == [2.0, 4.0]
    reply.value.zero_()
    assert read(server) == [2.0, 4.0]
    [reply] = ask("pushpull", "w", [1.0, 1.0])
    assert reply.value is not None and reply.value.tolist() == [3.0, 5.0]


def test_nothing_is_written_into_a_request() -> None:
    server, kept = Server([0], "asp"), torch.ones(2)
    ask = Asking(server, 0)
    ask("init", "w", kept)
    ask("set_optimizer", options={"name": "sgd", "lr": 1.0, "momentum": 0.9, "weight_decay": 0.1})
    pushed = torch.ones(2)
    ask("push", "w", pushed)
    assert kept.tolist() == pushed.tolist() == [1.0, 1.0]


def test_the_first_init_wins() -> None:
    server = Server([0, 1], "asp")
    Asking(server, 0)("init", "w", [1.0])
    [reply] = Asking(server, 1)("init", "w", [2.0])
    assert not reply.error and read(server) == [1.0]


def test_a_key_in_parts_begins_with_one_life_of_one_worker_whoever_dies() -> None:
    """Worker 1 wins where the first part is, and dies before it says so elsewhere; its next life brings another value."""
    home, other = Server([0, 1], "asp"), Server([0, 1], "asp")
    ask = {(server, rank): Asking(server, rank) for server in (home, other) for rank in (0, 1)}
    for rank in (0, 1):
        ask[home, rank]("offer", "w[0:1]", [float(rank)])
        ask[other, rank]("offer", "w[1:2]", [float(rank)])
    assert not other.entries and [offer.owner for offer in other.offers["w[1:2]"]] == [(0, 0), (1, 0)]
    assert [ask[home, rank]("choose", "w[0:1]")[0].owner for rank in (1, 0)] == [(1, 0), (1, 0)]
    for server in (home, other):
        server.step(Lost(1))
    again = Asking(other, 1, epoch=1)
    again("join")
    again("offer", "w[1:2]", [7.0])
    assert "have offered no value" in ask[other, 0]("choose", "w[1:2]", options={"owner": [5, 0]})[0].error
    assert not ask[other, 0]("choose", "w[1:2]", options={"owner": [1, 0]})[0].error
    assert not again("choose", "w[1:2]", options={"owner": [0, 0]})[0].error  # late: it was chosen
    assert read(home, "w[0:1]") + read(other, "w[1:2]") == [1.0, 1.0] and not other.offers
    again("offer", "w[1:2]", [8.0])
    assert not other.offers
    for nonsense in (None, 5, "01", [1], [[1], 0], {"rank": 1}):
        assert "have offered no value" in again("choose", "v[1:2]", options={"owner": nonsense})[0].error


def test_offers_and_what_is_declared_are_compared() -> None:
    server = Server([0, 1], "asp")
    ask, other = Asking(server, 0), Asking(server, 1)
    assert not ask("offer", "w[0:2]", [1.0, 2.0])[0].error
    assert "'w[0:2]' already holds float32[2], not float64[2]" in other("offer", "w[0:2]", torch.ones(2).double())[0].error
    assert not ask("declare", "w", options={"whole": "float32[4]"})[0].error
    assert "key 'w' is float32[4], not float32[5]" in other("declare", "w", options={"whole": "float32[5]"})[0].error
    assert "'w' already holds float32[4], not float32[2]" in other("init", "w", [1.0, 2.0])[0].error
    assert not other("declare", "w", options={"whole": "float32[4]"})[0].error
    assert "'w' is float32[4], and does not lie here: init comes first" in other("pull", "w")[0].error
    assert replayed([Request("declare", "w", options={"whole": "x"}, sequence=1)], workers=[0]).state()["wholes"] == {"w": "x"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Request("restore", "w", torch.ones(3)), "'w' is float32[2], not float32[3]"),
        (Request("restore", "w", torch.ones(2).double()), "'w' is float32[2], not float64[2]"),
        (Request("restore", "w", torch.ones(3), options={"moment": "exp_avg"}), "'w' is float32[2], not float32[3]"),
        (Request("restore", "w"), "not nothing"),
        (Request("restore", "v", torch.ones(2)), "'v' is unknown"),
        (Request("restore", options={"name": "lion"}), "'lion' is unknown"),
        (Request("state", "w", options={"moment": ["exp"]}), "'w' has no ['exp'], only ['step', 'exp_avg', 'exp_avg_sq']"),
        (Request("state", "v"), "'v' is unknown"),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_refused(given: Request, says: str) -> None:
    server = Server([0])
    ask = Asking(server, 0)
    ask("init", "w", [1.0, 2.0])
    ask("set_optimizer", options={"name": "adam"})
    ask("pushpull", "w", [1.0, 1.0])
    ask("clock", clock=1)
    before = deepcopy(server.state() | {"number": 0, "clients": 0})
    assert says in ask(given.op, given.key, given.value, options=given.options)[0].error
    assert alike(server.state() | {"number": 0, "clients": 0}, before)
    ask("push", "w", [1.0, 1.0])
    assert "pushes of a round that is not over" in ask("restore", "w", [1.0, 2.0])[0].error


def test_a_state_that_lacks_something_begins_with_zeros_for_it() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [1.0, 2.0])
    ask("set_optimizer", options={"name": "adam"})
    ask("restore", "w", [3.0, 4.0])
    ask("restore", "w", [0.5, 0.5], options={"moment": "exp_avg"})
    assert not ask("push", "w", [1.0, 1.0])[0].error and server.entries["w"].moments["step"] == 1


def test_the_log_comes_before_the_answer() -> None:
    server = Server([0], "asp", replicate=True)
    effects = server.step(Request("init", "w", torch.zeros(1), sequence=1))
    assert [type(effect) for effect in effects] == [Append, Send, Reply]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request("push", "v", torch.ones(2)), "key 'v' is unknown"),
        (Request("pull", "v"), "key 'v' is unknown"),
        (Request("push", "w", torch.ones(3)), "float32[3] does not fit [2]"),
        (Request("push", "w", torch.ones(2, dtype=torch.float64)), "float64[2]"),
        (Request("push", "w"), "needs a value"),
        (Request("init", "w", torch.ones(3)), "already holds float32[2]"),
        (Request("init", "x"), "needs a value"),
        (Request("push", "w", torch.ones(1), rows=torch.tensor([2])), "go from 0 to 1, not from 2 to 2"),
        (Request("push", "w", torch.ones(1), rows=torch.tensor([-1])), "not from -1"),
        (Request("pull", "w", rows=torch.tensor([0.5])), "int64"),
        (Request("push", "scalar", torch.ones(1), rows=torch.tensor([0])), "must have rows"),
        (Request("clock", clock=-1), "cannot go back to -1"),
        (Request("jump"), "op 'jump' is unknown"),
        (Request("set_optimizer", options={"name": "lion"}), "'lion' is unknown: choose 'adadelta', 'adagrad', 'adam'"),
        (Request("set_optimizer", options={"name": "sgd", "speed": 9}), "speed"),
        (Request("set_optimizer", options={"name": "adam", "lr": "fast"}), "'lr': 'fast'"),
        (Request("set_optimizer", options={"name": "sgd", "reduction": "max"}), "reduction='max'"),
        (Request("set_optimizer"), "names no optimizer"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(request_: Request, says: str) -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [1.0, 2.0])
    ask("init", "scalar", torch.tensor(1.0))
    before = deepcopy(server.state() | {"number": 0, "clients": 0})
    [reply] = ask(**{name: getattr(request_, name) for name in ("op", "key", "value", "rows", "options", "clock")})
    assert says in reply.error
    assert alike(server.state() | {"number": 0, "clients": 0}, before)
    assert not ask("push", "w", [1.0, 1.0])[0].error


def test_integers_are_added_but_not_optimized() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "n", torch.tensor([1]))
    ask("push", "n", torch.tensor([2]))
    ask("set_optimizer", options={"name": "sgd"})
    assert "floating-point" in ask("push", "n", torch.tensor([2]))[0].error
    assert read(server, "n") == [3]


# ---- exactly once ---------------------------------------------------------------------------------------------------------


def test_a_request_that_comes_again_is_answered_again_and_not_applied() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [0.0])
    ask("pushpull", "w", [1.0])
    again = server.step(ask.last)
    assert [type(effect) for effect in again] == [Reply] and again[0].value.tolist() == [1.0]  # type: ignore[union-attr]
    assert ask("push", "v", [1.0])[0].error == server.step(ask.last)[0].error != ""  # type: ignore[union-attr]
    assert read(server) == [1.0]


def test_requests_are_executed_in_the_order_of_their_numbers() -> None:
    server = Server([0], "asp")
    init = Request("init", "w", torch.zeros(1), sequence=1)
    push = Request("push", "w", torch.ones(1), sequence=2)
    pull = Request("pull", "w", sequence=3)
    assert server.step(pull) == server.step(push) == []
    effects = [effect for effect in server.step(init) if isinstance(effect, Reply)]
    assert [effect.op for effect in effects] == ["init", "push", "pull"]
    assert effects[-1].value is not None and effects[-1].value.tolist() == [1.0]


def test_the_filter_remembers_little() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    for _ in range(3 * WINDOW):
        ask("push", "unknown", [1.0])
    assert len(server.clients[0].errors) <= 1
    for sequence in range(10_000, 10_000 + 2 * WINDOW):
        server.step(Request("push", "w", torch.ones(1), sequence=sequence))
    assert len(server.clients[0].held) == 0
    server.step(Request("pull", "w", sequence=10**9, client=77))
    assert 77 not in server.clients


def test_who_has_more_answers_than_the_server_gave_names_the_loss() -> None:
    """After a restart from what a damaged log still had: the gap is not skipped, whoever asks for what."""
    server, log = Server([0, 1], "asp"), list[Event]()
    ask, other = Asking(server, 0), Asking(server, 1)
    ask("init", "w", [0.0])
    log.append(ask.last)
    ask("push", "w", [1.0])
    ask.server = other.server = again = replayed(log, workers=[0, 1], consistency="asp")
    before = again.state()
    for op in ("push", "pull", "clock", "barrier", "leave"):
        [reply] = ask(op, "w", [1.0] if op == "push" else None)
        assert "acknowledged requests are lost: worker 0 has the answers to" in reply.error and "knows of 1," in reply.error
    assert alike(again.state(), before)
    assert other("push", "w", [5.0])[0].error == "" and read(again) == [5.0]  # who had no answer has lost nothing


def test_who_was_refused_before_it_joined_has_lost_nothing() -> None:
    server = Server([0], "asp")
    Asking(server, 0)("init", "w", [0.0])
    ask = Asking(server, 1)
    assert "must join first" in ask("push", "w", [1.0])[0].error
    assert not ask("join")[0].error and not ask("push", "w", [1.0])[0].error and read(server) == [1.0]


def test_a_stray_duplicate_of_what_is_long_acknowledged_gets_no_answer() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("pull", "v")
    stray = ask.last
    ask("init", "w", [0.0])
    assert server.step(stray) == []


def test_an_older_life_is_refused() -> None:
    server = Server([0, 1], "asp")
    old = Asking(server, 1)
    old("init", "w", [0.0])
    server.step(Lost(1))
    assert "stale epoch" in old("push", "w", [1.0])[0].error
    new = Asking(server, 1, epoch=1)
    assert "must join first" in new("push", "w", [1.0])[0].error
    new = Asking(server, 1, epoch=1)
    assert not new("join")[0].error and not new("push", "w", [1.0])[0].error
    assert "stale epoch" in old("push", "w", [1.0])[0].error
    assert read(server) == [1.0]


def test_members_may_begin_with_epochs() -> None:
    server = Server({0: 3}, "asp")
    assert "stale epoch" in Asking(server, 0)("barrier")[0].error
    assert not Asking(server, 0, epoch=3)("barrier")[0].error
    assert "numbered from 1" in server.step(Request("barrier", epoch=3))[0].error  # type: ignore[union-attr]


def test_a_request_of_another_view_is_refused() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [0.0])
    assert [type(effect) for effect in server.step(Membership(view=3, servers=(0,)))] == [Append]
    assert server.step(Membership(view=3, servers=())) == [] == server.step(Membership(view=2, servers=()))
    reply = ask("push", "w", [1.0])[0]
    assert "stale view" in reply.error and reply.view == 3 and read(server) == [0.0]
    again = replace(ask.last, view=3)
    server.step(again)
    server.step(again)
    assert read(server) == [1.0]


def unanswered(session: Session) -> list[Request]:
    session.repeat(now=0.0)
    return list(iter(session.next, None))


class Lossy:
    """Workers, a server, and a network between them that may lose, repeat and reorder; the server may crash, and replay."""

    def __init__(self, consistency: str, workers: int = 3, staleness: int = 0) -> None:
        self.made = {"workers": range(workers), "consistency": consistency, "staleness": staleness}
        self.server = Server(**self.made)
        self.sessions = [Session(worker) for worker in range(workers)]
        self.clocks = [0] * workers
        self.log: list[Event] = []
        self.wire: list[Request | Reply] = []
        self.sums: dict[str, int] = {"a": 0, "b": 0}
        for worker in range(workers):
            for key in self.sums:
                self.ask(worker, Request("init", key, torch.zeros(1, dtype=torch.int64)))

    def ask(self, worker: int, request: Request) -> None:
        self.wire.append(self.sessions[worker].number(request))

    def act(self, kind: int, worker: int, which: int) -> None:
        key = "ab"[which % 2]
        if kind == 0:
            self.sums[key] += which
            self.ask(worker, Request("push", key, torch.tensor([which])))
        elif kind == 1:
            self.ask(worker, Request("pull", key))
        elif kind == 2:
            self.clocks[worker] += 1
            self.ask(worker, Request("clock", clock=self.clocks[worker]))
        elif kind == 3:
            self.wire += unanswered(self.sessions[worker])[: which + 1]
        elif kind == 4 and which % 2 and self.made["consistency"] != "bsp":
            self.sums[key] += 1
            self.ask(worker, Request("pushpull", key, torch.tensor([1])))
        elif kind == 4:
            self.server = replayed(self.log, **self.made)
        elif self.wire:
            self.deliver(which % len(self.wire), again=kind == 5, lose=kind == 6)

    def deliver(self, place: int, again: bool = False, lose: bool = False) -> None:
        message = self.wire[place] if again else self.wire.pop(place)
        if lose:
            return
        if isinstance(message, Reply):
            self.sessions[message.client].answered(message)
            return
        for effect in self.server.step(message):
            if isinstance(effect, Append):
                self.log.append(effect.event)
            elif isinstance(effect, Reply):
                assert not effect.error
                self.wire.append(effect)

    def settle(self) -> None:
        """All say goodbye, and everything is sent until it has been answered."""
        for worker in range(len(self.sessions)):
            self.ask(worker, Request("leave"))
        for _ in range(100):
            for session in self.sessions:
                self.wire += unanswered(session)
            while self.wire:
                self.deliver(0)
            if not any(session.open for session in self.sessions):
                return
        raise AssertionError("some requests are never answered")

    def check(self) -> None:
        assert {key: entry.value.item() for key, entry in self.server.entries.items()} == self.sums
        assert alike(replayed(self.log, **self.made).state(), self.server.state())


ACTIONS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 7)), max_size=60)


@pytest.mark.parametrize(("consistency", "staleness"), [("bsp", 0), ("ssp", 1), ("asp", 0), ("adaptive", 2)])
@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS)
def test_whatever_the_network_does_each_push_counts_once(consistency: str, staleness: int, actions: list[Any]) -> None:
    run = Lossy(consistency, staleness=staleness)
    for action in actions:
        run.act(*action)
    run.settle()
    run.check()


def stormy(seed: int) -> None:
    """A long run in bad weather."""
    run, weather = Lossy("asp"), random.Random(seed)
    for _ in range(400):
        run.act(weather.choice([0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 7, 7]), weather.randrange(3), weather.randrange(8))
    run.settle()
    run.check()


@pytest.mark.timeout(600)
def test_many_pushes_in_bad_weather() -> None:
    for seed in range(STORMS):
        stormy(seed)


def test_without_the_filter_pushes_are_lost_or_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    stormy(1)

    def pop(self: ClientRecord) -> Request | None:  # whatever comes is executed
        return self.held.pop(next(iter(self.held)), None) if self.held else None

    monkeypatch.setattr(ClientRecord, "pop", pop)
    with pytest.raises(AssertionError):
        stormy(1)


def test_without_the_log_acknowledged_pushes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "_logged", lambda self, event: [])
    with pytest.raises(AssertionError):
        stormy(1)


# ---- replay, snapshots, backups -------------------------------------------------------------------------------------------


def eventful() -> tuple[Server, list[Event]]:
    """A server in the middle of everything: open rounds, waiting reads, a barrier, momentum, an error, someone lost."""
    server, log = Server([0, 1, 2]), []
    workers = [Asking(server, rank) for rank in range(3)]

    def do(rank: int, *args: Any, **fields: Any) -> None:
        workers[rank](*args, **fields)
        log.append(workers[rank].last)

    for rank in range(3):
        do(rank, "init", "w", [1.0, 1.0])
        do(rank, "init", "e", torch.ones(4, 2))
        do(rank, "set_optimizer", options={"name": "adam", "lr": 0.1, "betas": [0.5, 0.9]})
    for rank in range(3):
        do(rank, "push", "w", [1.0, float(rank)])
        do(rank, "push", "e", torch.ones(2, 2), rows=torch.tensor([rank, 3]))
        do(rank, "clock", clock=1)
    do(0, "push", "w", [1.0, 1.0])
    do(0, "push", "v", [1.0, 1.0])
    do(0, "pushpull", "e", torch.ones(4, 2))
    do(0, "clock", clock=2)
    do(0, "pull", "w", priority=3)
    do(1, "push", "w", [2.0, 2.0])
    do(0, "offer", "split[0:1]", [5.0])
    do(1, "offer", "split[0:1]", [6.0])
    do(1, "barrier")
    server.step(Lost(2))
    log.append(Lost(2))
    server.step(Request("join", client=5, epoch=1, sequence=1))
    log.append(Request("join", client=5, epoch=1, sequence=1))
    return server, log


def test_replaying_the_log_gives_an_equal_server() -> None:
    server, log = eventful()
    assert any(server.waiting.values()) and server.entries["w"].open and server.entries["w"].moments["step"].item() == 1
    assert alike(replayed(log, workers=[0, 1, 2]).state(), server.state())


def test_a_snapshot_restores_an_equal_server_that_goes_on_alike() -> None:
    server, _ = eventful()
    other = Server([])
    other.restore(unpack(bytearray(b"".join(pack(server.state())))))  # as a log has it
    assert alike(other.state(), server.state())
    for event in (Lost(5), Request("clock", clock=2, client=1, sequence=10), Request("leave", client=0, sequence=13)):
        assert [e for e in server.step(event) if isinstance(e, Reply)] == [e for e in other.step(event) if isinstance(e, Reply)]
    assert alike(other.state(), server.state())


def test_a_backup_follows_its_primary() -> None:
    primary, backup = Server([0], "asp", replicate=True), Server([0], "asp")
    ask, sent = Asking(primary, 0), []
    step = primary.step
    primary.step = lambda event: [sent.append(e) if isinstance(e, Send) else e for e in step(event)]  # type: ignore
    ask("init", "w", [0.0])
    ask("push", "w", [1.0])
    ask("pull", "w")
    assert "some are missing" in backup.step(sent[1])[-1].error  # type: ignore[union-attr]
    for send in sent:
        effects = backup.step(send)
        assert [type(effect) for effect in effects] == [Append, Reply] and not effects[-1].error  # type: ignore[union-attr]
    assert alike(backup.state(), primary.state())
    assert not backup.step(sent[0])[-1].error  # type: ignore[union-attr]  # once more: nothing happens
    assert alike(backup.state(), primary.state())


def test_a_backup_refuses_a_primary_of_an_older_view() -> None:
    backup = Server([0], "asp")
    backup.step(Membership(view=2, servers=(1,)))
    reply = backup.step(Send(2, Request("init", "w", torch.zeros(1), sequence=1), view=1))[-1]
    assert isinstance(reply, Reply) and "stale view" in reply.error and not backup.entries


def an_old_primary_wakes_up() -> tuple[bool, float]:
    """Whether it can still acknowledge a push of 10, and what the new one has, to which 1 was pushed meanwhile."""
    primary, backup = Server([0, 1], "asp", replicate=True), Server([0, 1], "asp")

    def ask(request: Request) -> bool:
        effects = primary.step(request)
        confirmed = [backup.step(effect)[-1] for effect in effects if isinstance(effect, Send)]
        return not any(reply.error for reply in [*confirmed, effects[-1]])  # type: ignore[union-attr]

    assert ask(Request("init", "w", torch.zeros(1), client=0, sequence=1))
    backup.step(Membership(view=1, servers=(1,)))
    backup.step(Request("push", "w", torch.ones(1), client=0, sequence=2, view=backup.view))
    acknowledged = ask(Request("push", "w", torch.full((1,), 10.0), client=1, sequence=1))
    return acknowledged, backup.entries["w"].value.item()


def test_without_views_an_old_primary_acknowledges_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert an_old_primary_wakes_up() == (False, 1.0)
    monkeypatch.setitem(server_module._STEPS, Membership, lambda self, event: [])
    assert an_old_primary_wakes_up() == (True, 1.0)


# ---- optimizers -----------------------------------------------------------------------------------------------------------

HYPER: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.1}),
    ("RAdam", {"lr": 0.1}),
    ("Adamax", {"lr": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("name", "hyper"), HYPER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_optimizers_are_torchs_to_the_bit(name: str, hyper: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype))
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", parameter.detach().clone())
    ask("set_optimizer", options={"name": name.lower(), **hyper})
    optimizer = getattr(torch.optim, name)([parameter], **hyper)
    for _ in range(20):
        parameter.grad = torch.randn(5, 3, generator=generator).to(dtype)
        assert not ask("push", "w", parameter.grad.clone())[0].error
        optimizer.step()
    theirs = {what: tensor for what, tensor in optimizer.state[parameter].items() if tensor is not None}
    assert alike(server.entries["w"].moments, theirs) and torch.equal(server.entries["w"].value, parameter.detach())


@pytest.mark.parametrize(("name", "hyper"), [found for found in HYPER if "dampening" not in found[1]])
def test_rows_step_as_a_tensor_of_their_own_would(name: str, hyper: dict[str, Any]) -> None:
    """The same rows, four times: they are where torch has a tensor of these rows alone, and the others where they were."""
    whole, rows = torch.randn(6, 2), torch.tensor([4, 1])
    parameter = torch.nn.Parameter(whole[rows])
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "e", whole.clone())
    ask("set_optimizer", options={"name": name.lower(), **hyper})
    optimizer = getattr(torch.optim, name)([parameter], **hyper)
    for _ in range(4):
        parameter.grad = torch.randn(2, 2)
        assert not ask("push", "e", parameter.grad.clone(), rows=rows)[0].error
        optimizer.step()
    value = server.entries["e"].value
    assert torch.equal(value[rows], parameter.detach()) and torch.equal(value[[0, 2, 3, 5]], whole[[0, 2, 3, 5]])
    for moment in server.entries["e"].moments.values():
        assert moment.shape in (torch.Size(()), whole.shape)


def test_hyperparameters_that_need_more_state_begin_with_zeros_for_it() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [0.0])
    for hyper in ({}, {"amsgrad": True}, {}):
        ask("set_optimizer", options={"name": "adam", **hyper})
        assert not ask("push", "w", [1.0])[0].error
    assert server.entries["w"].moments.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert server.entries["w"].moments["step"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "adam", "betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"name": "adam", "lr": -1}, "Invalid learning rate: -1"),
        ({"name": "sgd", "nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ({"name": None, "lr": 0.1}, "without an optimizer: name one"),
        ({"name": None, "reduction": "trimmed_mean", "trim": 0}, "trim=0 with reduction='trimmed_mean'"),
        ({"name": None, "reduction": "median", "trim": 1}, "trim=1 with reduction='median'"),
        ({"name": None, "reduction": "trimmed_mean"}, "trim=1 at either end leaves nothing of 2 workers' pushes"),
        ({"name": ["adam"]}, "is unknown: choose"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    server = Server([0, 1])
    assert says in Asking(server, 0)("set_optimizer", options=options)[0].error and not server.options


def test_an_optimizer_loads_no_compiler() -> None:
    """torch._dynamo takes a second to import, which each server would pay."""
    code = "import sys; from d2lps.kvstore.core.optimizers import make_optimizer; make_optimizer('sgd'); make_optimizer('adam');"
    run = subprocess.run([sys.executable, "-c", code + "print('torch._dynamo' in sys.modules)"], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_rows_under_adam_agree_with_torchs_sparse_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # says that we know
    parameter = torch.nn.Parameter(torch.randn(6, 2, generator=generator))
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "e", parameter.detach().clone())
    ask("set_optimizer", options={"name": "adam", "lr": 0.1})
    optimizer = torch.optim.SparseAdam([parameter], lr=0.1)
    for _ in range(10):
        rows = torch.randint(0, 6, (4,), generator=generator)  # some of them twice
        values = torch.randn(4, 2, generator=generator)
        parameter.grad = torch.sparse_coo_tensor(rows[None], values, (6, 2))
        optimizer.step()
        ask("push", "e", values, rows=rows)
    torch.testing.assert_close(server.entries["e"].value, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_rows_touch_nothing_else() -> None:
    server = Server([0, 1])
    workers = [Asking(server, rank) for rank in range(2)]
    for ask in workers:
        ask("init", "e", torch.ones(5, 1))
        ask("set_optimizer", options={"name": "sgd", "lr": 1.0, "momentum": 0.5, "weight_decay": 0.5, "reduction": "sum"})
    workers[0]("push", "e", torch.tensor([[1.0], [2.0]]), rows=torch.tensor([1, 1]))
    workers[1]("push", "e", torch.tensor([[4.0]]), rows=torch.tensor([3]))
    for ask in workers:
        ask("clock", clock=1)
    entry = server.entries["e"]
    assert entry.value.flatten().tolist() == [1.0, 1 - 3.5, 1.0, 1 - 4.5, 1.0]
    assert entry.moments["momentum_buffer"].flatten().tolist() == [0.0, 3.5, 0.0, 4.5, 0.0]
    [reply] = workers[0]("pull", "e", rows=torch.tensor([3, 0]))
    assert reply.value is not None and reply.value.tolist() == [[-3.5], [1.0]]


def test_a_new_learning_rate_keeps_the_momentum_and_another_optimizer_does_not() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [0.0])
    ask("set_optimizer", options={"name": "sgd", "lr": 1.0, "momentum": 0.5})
    ask("push", "w", [1.0])
    ask("set_optimizer", options={"name": "sgd", "lr": 0.1, "momentum": 0.5})
    ask("push", "w", [0.0])
    assert read(server) == pytest.approx([-1.05])
    ask("set_optimizer", options={"name": "adam"})
    assert not server.entries["w"].moments
    ask("push", "w", [1.0])
    assert set(server.entries["w"].moments) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_readers_own_optimizer() -> None:
    class Sign:
        def __init__(self, lr: float) -> None:
            self.lr = lr

        def state(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
            return {}

        def step(self, value: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
            value.sub_(gradient.sign(), alpha=self.lr)

    register_optimizer("test sign", Sign)
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [0.0, 0.0])
    ask("set_optimizer", options={"name": "test sign", "lr": 0.5})
    ask("push", "w", [-9.0, 2.0])
    assert read(server) == [0.5, -0.5]
    with pytest.raises(TypeError, match="'state'"):
        register_optimizer("no", int)
    with pytest.raises(ValueError, match="'none' is unknown"):
        make_optimizer("none")


# ---- who takes part -------------------------------------------------------------------------------------------------------


def test_answers_go_out_by_priority() -> None:
    server = Server([0, 1])
    ask, other = Asking(server, 0), Asking(server, 1)
    for key in "abc":
        ask("init", key, [0.0])
    ask("clock", clock=1)
    for key, priority in (("a", 0), ("b", 7), ("c", 3)):
        assert ask("pull", key, priority=priority) == []
    assert [reply.key for reply in other("clock", clock=1)] == ["b", "c", "a", ""]


def test_a_barrier_waits_for_all_who_live() -> None:
    server = Server([0, 1, 2])
    workers = [Asking(server, rank) for rank in range(3)]
    assert workers[0]("barrier") == workers[1]("barrier") == []
    assert server.step(workers[0].last) == []  # asked again: still waiting
    replies = [effect for effect in server.step(Lost(2)) if isinstance(effect, Reply)]
    assert [(reply.client, reply.op) for reply in replies] == [(0, "barrier"), (1, "barrier")]
    assert workers[1]("barrier") == []
    assert len(workers[0]("barrier")) == 2


# ---- how much work it is --------------------------------------------------------------------------------------------------


def lines_for(keys: int) -> int:
    """Lines that two clients and a server go through, when both push and pull so many keys at once."""
    lines, server, sessions = 0, Server([0, 1]), [Session(0), Session(1)]

    def ask(session: Session, requests: list[Request]) -> None:
        for request in requests:
            session.put(request, request.op)
        while (request := session.next()) is not None:  # type: ignore[assignment]
            for reply in server.step(request):
                if isinstance(reply, Reply):
                    assert not reply.error and sessions[reply.client].answered(reply) == reply.op

    def entered(frame: Any, event: str, arg: object) -> Any:
        def within(frame: Any, event: str, arg: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return within

        return within if "kvstore" in frame.f_code.co_filename else None

    before, value = sys.gettrace(), torch.ones(1)
    sys.settrace(entered)
    try:
        for session in sessions:
            ask(session, [Request("init", str(key), value) for key in range(keys)])
        for session in sessions:
            ask(session, [*(Request("pushpull", str(key), value) for key in range(keys)), Request("clock", clock=1)])
    finally:
        sys.settrace(before)
    assert not any(session.open for session in sessions) and read(server, str(keys - 1)) == [3.0]
    return lines


def test_four_times_the_keys_are_no_more_than_six_times_the_work() -> None:
    few, many = lines_for(2_000), lines_for(8_000)
    assert 3 * few < many <= 6 * few
