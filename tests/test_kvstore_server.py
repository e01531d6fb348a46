"""The parameter server's state machine: what it does with requests, once each, whatever the network does to them."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from oracles import Asking

from d2lps.kvstore import Lost, Membership, Reply, Request, Server, register_optimizer
from d2lps.kvstore.core.client import Session
from d2lps.kvstore.core.events import Event, Send, alike
from d2lps.kvstore.core.exactly_once import WINDOW
from d2lps.kvstore.core.optimizers import make_optimizer


def read(server: Server, key: str = "w") -> list[float]:
    return server.entries[key].value.tolist()


def replayed(log: list[Event], **kwargs: Any) -> Server:
    server = Server(**kwargs)
    for event in log:
        server.step(event)
    return server


# ---- one worker ---------------------------------------------------------------------------------------------------------


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


def test_a_state_that_lacks_something_begins_with_zeros_for_it() -> None:
    server = Server([0], "asp")
    ask = Asking(server, 0)
    ask("init", "w", [1.0, 2.0])
    ask("set_optimizer", options={"name": "adam"})
    ask("restore", "w", [3.0, 4.0])
    ask("restore", "w", [0.5, 0.5], options={"moment": "exp_avg"})
    assert not ask("push", "w", [1.0, 1.0])[0].error and server.entries["w"].moments["step"] == 1


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
def test_what_is_wrong_is_refused_and_changes_nothing(request_: Request, says: str) -> None:
    server = Server([0])
    ask = Asking(server, 0)
    ask("init", "w", [1.0, 2.0])
    ask("init", "scalar", torch.tensor(1.0))
    ask("set_optimizer", options={"name": "adam"})
    ask("pushpull", "w", [1.0, 1.0])
    ask("clock", clock=1)
    before = deepcopy(server.state() | {"number": 0, "clients": 0})
    [reply] = ask(**{name: getattr(request_, name) for name in ("op", "key", "value", "rows", "options", "clock")})
    assert says in reply.error
    assert alike(server.state() | {"number": 0, "clients": 0}, before)
    assert not ask("push", "w", [1.0, 1.0])[0].error
    assert "pushes of a round that is not over" in ask("restore", "w", [1.0, 2.0])[0].error


# ---- exactly once ---------------------------------------------------------------------------------------------------------


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


def test_members_may_begin_with_epochs() -> None:
    server = Server({0: 3}, "asp")
    assert "stale epoch" in Asking(server, 0)("barrier")[0].error
    assert not Asking(server, 0, epoch=3)("barrier")[0].error
    assert "numbered from 1" in server.step(Request("barrier", epoch=3))[0].error  # type: ignore[union-attr]


def test_a_backup_refuses_a_primary_of_an_older_view() -> None:
    backup = Server([0], "asp")
    backup.step(Membership(view=2, servers=(1,)))
    reply = backup.step(Send(2, Request("init", "w", torch.zeros(1), sequence=1), view=1))[-1]
    assert isinstance(reply, Reply) and "stale view" in reply.error and not backup.entries


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


def test_what_is_no_optimizer_is_refused() -> None:
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
