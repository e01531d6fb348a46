"""The store's server against a model of it: whatever workers ask, whatever wires do to it, whoever dies, leaves or comes.

The log says in which order requests count, and the model does what it says: each life's requests are to stand there by their
numbers, each once, and all answers and values are to be the model's.
"""

from __future__ import annotations

import math
import os
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from d2lps.kvstore import Lost, Membership, Request, Server
from d2lps.kvstore.core.client import Session
from d2lps.kvstore.core.events import Append, Event, Send, alike, replace
from d2lps.kvstore.storage.frame import pack, unpack

KEYS, ROWS = ("v", "w"), 3
READS, PUSHES, WAIT = ("pull", "pushpull"), ("push", "pushpull"), ("pull", "pushpull", "barrier", "set_optimizer")
REFUSED = "refused"
Answers = dict[tuple[int, int, int], Any]  # by client, life and number: what it is told, or that it is refused


class Model:
    """What a store is, without any care for cost or for failures: who waits for whom, and what is in a value."""

    def __init__(self, workers: int, rounds: bool, staleness: float) -> None:
        self.rounds, self.staleness = rounds, staleness
        self.at = dict.fromkeys(range(workers), 0)  # the clock of every live worker
        self.lives, self.over = dict.fromkeys(range(workers), 0), set[tuple[int, int]]()  # over: of those that were given up
        self.ahead = set[tuple[int, str]]()  # who has ended its iteration of which key alone
        self.began, self.reached = dict.fromkeys(range(workers), 0), 0.0
        self.left: list[tuple[int, int, dict[str, int]]] = []  # who has left; its first round, and by key the one after its last
        self.values, self.momenta = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self.open: dict[tuple[str, int], list[Request]] = {}  # by key and round: pushes
        self.options, self.said = dict[str, Any](), dict[int, str]()
        self.waiting: list[tuple[float, Request]] = []  # the clock at which it was asked

    # ---- who waits for whom -----------------------------------------------------------------------------------------------

    def position(self, worker: int, key: str) -> int:
        return self.at.get(worker, 0) + ((worker, key) in self.ahead)

    def slowest(self, key: str) -> float:
        return min((self.position(worker, key) for worker in self.at), default=math.inf)

    def goes(self, clock: float, asked: Request) -> bool:
        if asked.client not in self.at or asked.op not in WAIT:
            return True
        if asked.op == "barrier":
            return {other.client for _, other in self.waiting if other.op == "barrier"} >= self.at.keys()
        return self.slowest(asked.key) >= clock - self.staleness

    def members(self, round: int, key: str) -> set[int]:
        gone = {worker for worker, first, ends in self.left if first <= round < ends[key]}
        return gone | {worker for worker in self.at if self.began[worker] <= round}

    # ---- what becomes of pushes -------------------------------------------------------------------------------------------

    def close(self, key: str, before: float) -> None:
        for place in sorted(place for place in self.open if place[0] == key and place[1] < before):
            pushes = self.open.pop(place)
            self.change(key, pushes, len(self.members(place[1], key) | {push.client for push in pushes}))

    def change(self, key: str, pushes: list[Request], workers: int) -> None:
        total, touched = torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.bool)
        for push in sorted(pushes, key=lambda push: push.client):
            rows = torch.arange(ROWS) if push.rows is None else push.rows
            total.index_add_(0, rows, push.value)
            touched[rows] = True
        if self.options.get("reduction") == "mean":
            total /= workers
        if "name" in self.options:
            self.momenta[key] = torch.where(touched, 0.5 * self.momenta[key] + total, self.momenta[key])
            total = torch.where(touched, -self.options["lr"] * self.momenta[key], 0.0)
        self.values[key] = self.values[key] + total

    # ---- what is asked ----------------------------------------------------------------------------------------------------

    def execute(self, event: Event) -> Answers:
        """Do what is next in the log; the answers of all who need wait no longer."""
        if isinstance(event, Request):
            if not self.allowed(event):
                return {event.retry_key: REFUSED}
            getattr(self, event.op, lambda event: None)(event)
            self.waiting.append((self.position(event.client, event.key), event))
        elif isinstance(event, Lost):
            self.over.add((event.worker, self.lives[event.worker]))
            self.leave(Request("leave", client=event.worker))
        return self.answers()

    def allowed(self, asked: Request) -> bool:
        if asked.op in (*PUSHES, "pull", "restore") and asked.key not in self.values:
            return False
        if asked.op in PUSHES and self.rounds and (asked.client, asked.key) in self.ahead:
            return False
        if asked.op == "restore" and any(key == asked.key for key, _ in self.open):
            return False
        return asked.client in self.at or asked.op in ("join", "leave")

    def answers(self) -> Answers:
        """Reads see the rounds before their clocks."""
        free = [(clock, asked) for clock, asked in self.waiting if self.goes(clock, asked)]
        self.waiting = [(clock, asked) for clock, asked in self.waiting if not self.goes(clock, asked)]
        said = next((asked.options["said"] for _, asked in free if asked.op == "barrier" and asked.options), "")
        found: Answers = {}
        for clock, asked in sorted((one for one in free if one[1].op in READS), key=lambda one: one[0]):
            self.close(asked.key, min(clock, self.slowest(asked.key)))
            found[asked.retry_key] = self.now(asked)
        for key in self.values:
            self.close(key, self.slowest(key))
        for _, asked in free:
            if asked.op == "set_optimizer" and asked.retry_key[:2] not in self.over:
                self.optimize(dict(asked.options))
            if asked.op == "barrier":
                self.said[asked.client] = said
            found[asked.retry_key] = found.get(asked.retry_key, self.now(asked))
        return {who: REFUSED if who[:2] in self.over else told for who, told in found.items()}

    def now(self, asked: Request) -> Any:
        """What an answer carries, as it is now: it may be asked for once more."""
        if asked.op in READS:
            return self.values[asked.key][... if asked.rows is None or asked.op == "pushpull" else asked.rows].clone()
        return {"barrier": self.said.get(asked.client, ""), "join": self.at.get(asked.client, 0)}.get(asked.op)

    def init(self, asked: Request) -> None:
        if asked.key not in self.values:
            self.restore(asked)

    def restore(self, asked: Request) -> None:
        assert asked.value is not None
        self.values[asked.key], self.momenta[asked.key] = asked.value.clone(), torch.zeros(ROWS)

    def optimize(self, options: dict[str, Any]) -> None:
        if options.get("name") != self.options.get("name"):
            self.momenta = {key: torch.zeros(ROWS) for key in self.momenta}
        self.options = options

    def push(self, asked: Request) -> None:
        if self.rounds:
            self.open.setdefault((asked.key, self.at[asked.client]), []).append(asked)
        else:
            self.change(asked.key, [asked], len(self.at))

    def pushpull(self, asked: Request) -> None:
        self.push(asked)
        self.ahead.add((asked.client, asked.key))

    def clock(self, asked: Request) -> None:
        self.at[asked.client] = asked.clock
        self.ahead -= {(asked.client, key) for key in KEYS}

    def leave(self, asked: Request) -> None:
        if (worker := asked.client) not in self.at:
            return
        self.left.append((worker, self.began.pop(worker), {key: self.position(worker, key) for key in KEYS}))
        self.reached = self.slowest("")
        del self.at[worker]
        self.ahead -= {(worker, key) for key in KEYS}
        self.reached = self.slowest("") if self.at else self.reached

    def join(self, asked: Request) -> None:
        """A newcomer begins with the first iteration of which nothing is over, for no key."""
        self.left, self.lives[asked.client] = self.left if self.at else [], asked.epoch
        begin = int(max(map(self.slowest, ("", *KEYS))) if self.at else self.reached)
        self.at[asked.client] = self.began[asked.client] = begin


OPS = ["push", "push", "push", "pushpull", "pushpull", "pull", "pull", "clock", "clock", "clock", "clock", "barrier"]
OPS += ["set_optimizer", "init", "restore"]
OPTIONS: list[dict[str, Any]] = [{"reduction": "mean"}, {"reduction": "sum"}]
OPTIONS += [{"name": "sgd", "lr": lr, "momentum": 0.5, "reduction": rule} for lr, rule in [(1.0, "mean"), (0.5, "sum")]]
VALUES = [[1.0, 2.0, 3.0], [0.25, 1e8, -4.0], [1e8, -1e8, 0.5], [-1e8, 7.0, 1e8]]  # in float32, another order gives another sum
WIRES = ["", "", "", "", "", "", "late", "deaf"]
after_some_work = rule(chance=st.randoms(use_true_random=True), asks=st.integers(0, 16))


def state(server: Server) -> dict[str, Any]:
    """All of it; what a set has is put in order, which it has none of its own."""
    found = server.state()
    clocks = found["clocks"]
    ahead = {key: sorted(workers) for key, workers in clocks["ahead"].items()}
    return found | {"clocks": clocks | {"ahead": ahead, "over": sorted(clocks["over"])}}


class Store(RuleBasedStateMachine):
    """Workers on wires that lose, repeat and mix up, a server, and its backup."""

    kind: tuple[str, int]  # of consistency, and its bound

    @initialize(count=st.integers(1, 3), keys=st.sampled_from([("w",), KEYS]), options=st.sampled_from(OPTIONS))
    def begin(self, count: int, keys: tuple[str, ...], options: dict[str, Any]) -> None:
        name, staleness = self.kind
        self.made: dict[str, Any] = {"workers": range(count), "consistency": name, "staleness": staleness}
        self.server, self.backup = Server(**self.made, replicate=True), Server(**self.made)
        self.model = Model(count, name == "bsp", math.inf if name == "asp" else staleness)
        self.sessions, self.clocks = {rank: Session(rank) for rank in range(count)}, [0] * 5
        self.log, self.late = list[Event](), list[Request]()
        self.next, self.heard, self.told = dict[Any, int](), dict[Any, int](), Answers()
        for key in keys:
            self.send(0, Request("init", key, torch.zeros(ROWS)))
        self.send(0, Request("set_optimizer", options=options))

    # ---- what happens, to all of them ---------------------------------------------------------------------------------------

    def do(self, event: Event, heard: bool = True) -> list[Any]:
        """Let the server do it, and backup and model what it has logged; what it answers beyond what the model does."""
        wanted, found, others, sent = Answers(), Answers(), list[Any](), 0
        for effect in self.server.step(event):
            if isinstance(effect, Append):
                self.log.append(effect.event)
                wanted |= self.model.execute(effect.event)
                if isinstance(effect.event, Request):
                    *life, number = effect.event.retry_key
                    assert number == self.next.get(tuple(life), 1), "each once, in the order of their numbers"
                    self.next[tuple(life)] = number + 1
                    self.heard[tuple(life)] = max(self.heard.get(tuple(life), 0), effect.event.acknowledged)
                sent -= 1
            elif isinstance(effect, Send):
                beyond, this, again = (
                    self.backup.step(send) for send in (replace(effect, number=effect.number + 1), effect, effect)
                )
                assert beyond[-1].error and not this[-1].error and len(again) == 1
                sent += 1
            else:
                assert sent == 0, "no answer leaves before the backup has what it is an answer to"
                key, kinds = (effect.client, effect.epoch, effect.sequence), {"barrier": effect.said, "join": effect.clock}
                told = REFUSED if effect.error else effect.value if effect.op in READS else kinds.get(effect.op)
                if key in wanted:
                    found[key] = told
                else:
                    others.append(told)
                if heard:
                    self.sessions[effect.client].answered(effect)
        assert alike(found, wanted)
        self.told |= wanted
        return others

    def deliver(self, request: Request, heard: bool = True) -> None:
        """Of what is not new, nothing happens but that it may be answered again."""
        life, number, known = request.retry_key[:2], request.sequence, len(self.log)
        due, again, stale = self.next.get(life, 1), list[Any](), request.view != self.server.view or life in self.model.over
        before = state(self.server) if stale or number != due else None
        if stale:
            again = [REFUSED]
        elif self.heard.get(life, 0) <= number < due and request.retry_key in self.told:
            again = [REFUSED if self.told[request.retry_key] is REFUSED else self.model.now(request)]
        assert alike(self.do(request, heard), again)
        assert len(self.log) == known and alike(state(self.server), before) if before else len(self.log) > known

    def send(self, worker: int, request: Request, wire: str = "") -> None:
        request = self.sessions[worker].number(request, "")
        if wire == "late":
            self.late.append(request)
        else:
            self.deliver(request, heard=wire != "deaf")

    # ---- what workers do, and wires -----------------------------------------------------------------------------------------

    def work(self, chance: Random, asks: int) -> list[int]:
        """Let workers ask for this and that; those who are there."""
        for _ in range(asks if self.model.at else 0):
            worker, op, values, rows = map(chance.choice, (sorted(self.model.at), OPS, VALUES, [None, [1], [2, 0, 2]]))
            if op == "barrier" and any(request.op == op for request, _ in self.sessions[worker].open.values()):
                op = "clock"  # who stands in a barrier asks for no other one
            if op == "clock":  # most often the slowest one's, for whom others wait
                worker = chance.choice([worker, min(self.model.at, key=self.clocks.__getitem__)])
                self.clocks[worker] += chance.choice([1, 1, 1, 3])
            at = None if op not in ("push", "pull") or rows is None else torch.tensor(rows)
            key, value = chance.choice(["w", "w", "v"]), torch.tensor(values if at is None else values[: len(at)])
            fields: dict[str, Any] = {
                "clock": {"clock": self.clocks[worker]},
                "barrier": {"options": chance.choice([{}, {"said": f"{worker}"}])},
                "set_optimizer": {"options": chance.choice(OPTIONS)},
                "pull": {"key": key, "rows": at},
            }.get(op, {"key": key, "rows": at, "value": value})
            note(f"{worker} {op} {fields}")
            self.send(worker, Request(op, **fields), chance.choice(WIRES))
        return sorted(self.model.at)

    @after_some_work
    def what_was_late_comes(self, chance: Random, asks: int) -> None:
        self.work(chance, asks)
        for request in chance.sample(self.late, len(self.late)):
            self.deliver(request)
        self.late = chance.sample(self.late, min(2, len(self.late)))  # which will come once more

    @after_some_work
    def somebody_asks_again(self, chance: Random, asks: int) -> None:
        self.work(chance, asks)
        self.ask_again(chance.choice(sorted(self.sessions)), chance.choice([1, -1]))

    def ask_again(self, worker: int, way: int = 1) -> None:
        """Then there are answers to all that need not wait."""
        session = self.sessions[worker]
        session.repeat(now=0.0)
        while requests := list(iter(session.next, None)):
            for request in requests[::way]:
                self.deliver(request)
        waiting = {asked.retry_key for _, asked in self.model.waiting}
        assert all((session.client, session.epoch, number) in waiting for number in session.open)

    # ---- who dies, and who comes --------------------------------------------------------------------------------------------

    @after_some_work
    def go(self, chance: Random, asks: int) -> None:
        """One leaves, or is given up."""
        if there := self.work(chance, asks):
            if chance.random() < 0.5:
                return self.send(chance.choice(there), Request("leave"))
            lost = Lost(chance.choice(there))
            assert not self.do(lost) and self.log[-1] == lost and not self.server.step(lost)
        return None

    @after_some_work
    def join(self, chance: Random, asks: int) -> None:
        """For the first time, again, or in a new life."""
        away = {*range(5)} - {*self.work(chance, asks)}
        for worker in chance.sample(sorted(away), min(len(away), 2)):
            session = self.sessions.setdefault(worker, Session(worker))
            if (worker, session.epoch) in self.model.over:
                session = self.sessions[worker] = Session(worker, session.epoch + 1)
            self.ask_again(worker)
            session.view = self.server.view
            self.send(worker, Request("join"))
            self.clocks[worker] = self.model.at[worker]

    @after_some_work
    def restart(self, chance: Random, asks: int) -> None:
        """The server dies, and another one is all that it was."""
        self.work(chance, asks)
        how = chance.choice(["its log", "a checkpoint", "its backup"])
        again = self.backup if how == "its backup" else Server(**self.made)
        for event in self.log if how == "its log" else []:
            again.step(event)
        if how == "a checkpoint":
            again.restore(unpack(bytearray(b"".join(pack(self.server.state())))))
        assert alike(state(again), state(self.server))
        self.server, self.backup = again, Server(**self.made)
        self.server.replicate = False
        if how == "its backup":
            self.do(Membership(self.server.view + 1, (1,)))
            assert not self.server.step(Membership(self.server.view, (1,)))
            for session in self.sessions.values():
                session.serve(self.server.view, now=0.0)
        self.server.replicate = True
        self.backup.restore(self.server.state())

    @invariant()
    def all_is_as_the_model_has_it(self) -> None:
        if hasattr(self, "model"):
            assert alike({key: entry.value for key, entry in self.server.entries.items()}, self.model.values)
            waiting = {asked.retry_key for asks in self.server.waiting.values() for asked in asks}
            assert waiting == {asked.retry_key for _, asked in self.model.waiting}


@pytest.mark.parametrize("kind", [("bsp", 0), ("ssp", 0), ("ssp", 1), ("asp", 0)], ids=str)
def test_the_store_does_what_the_model_does(kind: tuple[str, int]) -> None:
    class OfAKind(Store):
        pass

    OfAKind.kind = kind
    often = 20 if os.environ.get("D2LPS_SOAK") else 1
    examples = often * (120 if kind[0] == "bsp" else 20)
    run_state_machine_as_test(OfAKind, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))
