"""A batch that is leased part by part: each part counts once a step, whoever takes it, dies with it, or brings it late."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps.architectures.leases import Leases
from d2lps.kvstore import Lost, Reply, Request, Server
from d2lps.kvstore.core.client import Client
from d2lps.kvstore.core.events import Append, alike

PARTS, STEPS = 4, 3


class Workers:
    """Some on perfect wires to one server; what each has asked, and what it was answered."""

    def __init__(self, count: int) -> None:
        self.server = Server(range(count), "asp")
        self.sessions = {rank: Client(rank, 1).sessions[0] for rank in range(count)}
        self.answers: dict[int, list[Reply]] = {rank: [] for rank in range(count)}
        self.log: list[Any] = []
        self.ask(0, "init", value=torch.zeros(1, dtype=torch.float64))
        self.ask(0, "share", options={"parts": PARTS})

    def step(self, event: Any) -> list[Reply]:
        effects = self.server.step(event)
        self.log += [effect.event for effect in effects if isinstance(effect, Append)]
        replies = [effect for effect in effects if isinstance(effect, Reply)]
        for reply in replies:
            self.answers[reply.client].append(reply)
        return replies

    def ask(self, rank: int, op: str, **fields: Any) -> str:
        """What is wrong with it; "waits" if that is not yet known."""
        request = self.sessions[rank].number(Request(op, "w", **fields), op)
        mine = [reply for reply in self.step(request) if (reply.client, reply.sequence) == (rank, request.sequence)]
        return mine[0].error if mine else "waits"

    def leased(self, rank: int) -> tuple[int, ...]:
        return next(reply.owner for reply in reversed(self.answers[rank]) if reply.op == "lease")

    def bring(self, rank: int, step: int, part: int, last: bool = True) -> str:
        """Each part of each step has a value that no sum of others makes."""
        value = torch.tensor([8.0 ** (step * PARTS + part)], dtype=torch.float64)
        return self.ask(rank, "bring", value=value, options={"step": step, "part": part, "last": last})


@settings(max_examples=150, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["go on", "go on", "again", "die", "restore"])), max_size=60))
def test_every_part_counts_once_a_step_whoever_dies(moves: list[tuple[int, str]]) -> None:
    workers, live, asked = Workers(4), {0, 1, 2, 3}, set[int]()

    def go_on(rank: int) -> None:
        """Ask for a part, or bring the one that was given."""
        if rank not in asked:
            asked.add(rank)
            workers.ask(rank, "lease")
        elif (answered := [reply for reply in workers.answers[rank] if reply.op == "lease"]) and answered[-1].owner:
            assert not workers.bring(rank, *workers.leased(rank))
            workers.answers[rank].clear()
            asked.discard(rank)

    for rank, move in moves:
        if move == "restore":
            again = Server(range(4), "asp")
            again.restore(workers.server.state())
            workers.server = again
        elif rank in live and move == "die" and len(live) > 1:
            live.discard(rank)
            workers.step(Lost(rank))
        elif rank in live and move == "again" and (step := workers.server.more["leases"]["w"].step):
            assert not workers.bring(rank, step - 1, 0), "of a step that is over: it is heard, and counts no more"
        elif rank in live:
            go_on(rank)
    while workers.server.more["leases"]["w"].step < STEPS:
        for rank in live:
            go_on(rank)
    steps = workers.server.more["leases"]["w"].step
    assert workers.server.entries["w"].version == steps
    assert workers.server.entries["w"].value.item() == sum(8.0**k for k in range(steps * PARTS))
    replayed = Server(range(4), "asp")
    for event in workers.log:
        replayed.step(event)
    assert alike(replayed.state(), workers.server.state())
    assert torch.equal(replayed.entries["w"].value, workers.server.entries["w"].value)


def test_who_finds_nothing_free_waits_until_somebody_dies_or_the_step_is_over() -> None:
    workers = Workers(6)
    assert [workers.ask(rank, "lease") for rank in range(6)] == [""] * 4 + ["waits"] * 2
    assert [workers.leased(rank) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    workers.step(Lost(2))
    assert workers.leased(4) == (0, 2)
    for rank, part in ((0, 0), (1, 1), (3, 3)):
        assert not workers.bring(rank, 0, part) and workers.server.entries["w"].version == 0
    assert not workers.bring(4, 0, 2)
    assert workers.server.entries["w"].version == 1 and workers.leased(5) == (1, 0)


def test_parts_are_added_in_their_own_order() -> None:
    """Of floats the order can be seen: 1e16 + 1 - 1e16 is 0, and 1e16 - 1e16 + 1 is 1."""
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        workers = Workers(1)
        for part in order:
            value = torch.tensor([[1e16, 1.0, -1e16, 0.5][part]], dtype=torch.float64)
            workers.ask(0, "bring", value=value, options={"step": 0, "part": part, "last": True})
        assert workers.server.entries["w"].value.item() == 0.5


def test_elsewhere_a_step_ends_when_somebody_speaks_of_the_next() -> None:
    """Whoever brought the last part may be lost on the way to the server that leases: the old weights are still needed."""
    for speaks in ("fetch", "bring"):
        workers = Workers(2)
        for part in range(PARTS):
            assert not workers.bring(0, 0, part, last=False)
        assert not workers.ask(1, "fetch", options={"step": 0}) and workers.server.entries["w"].version == 0
        assert not workers.bring(1, 0, 3, last=False), "once more, by who has leased it after that"
        assert not (workers.ask(1, "fetch", options={"step": 1}) if speaks == "fetch" else workers.bring(1, 1, 0, last=False))
        assert workers.server.entries["w"].version == 1
        assert workers.server.entries["w"].value.item() == sum(8.0**k for k in range(PARTS))
        assert "is at step 1" in workers.ask(1, "fetch", options={"step": 0})


@pytest.mark.parametrize(
    ("op", "fields", "told"),
    [
        ("bring", {"options": {"step": 0, "part": 4}}, "step=0, part=4 of 'w': its steps have 4 parts"),
        ("bring", {"options": {"part": 0}}, "step=None"),
        ("share", {"options": {"parts": 5}}, "'w' has 4 parts, not 5"),
        ("share", {"options": {"parts": 0}}, "parts=0 of 'w' is no number of parts"),
        ("fetch", {"options": {"step": 1}}, "key 'w' is at step 0: its value of step 1 is not there"),
        ("clear", {}, r"servers can't come or go while the parts of \['w'\] are leased"),
    ],
)
def test_what_is_refused(op: str, fields: dict[str, Any], told: str) -> None:
    workers = Workers(1)
    value = {"value": torch.ones(1, dtype=torch.float64)} if op == "bring" else {}
    assert re.search(told, workers.ask(0, op, **fields, **value))
    assert workers.server.more["leases"] == {"w": Leases(PARTS)}


def test_a_key_that_is_not_shared_has_no_leases() -> None:
    server, session = Server([0], "asp"), Client(0, 1).sessions[0]
    server.step(session.number(Request("init", "v", torch.zeros(1)), "init"))
    for op in ("lease", "bring"):
        value = torch.ones(1) if op == "bring" else None
        [*_, reply] = server.step(session.number(Request(op, "v", value), op))
        assert isinstance(reply, Reply) and reply.error == f"{op} of 'v', whose steps have no parts: share comes first"
