"""Parameter servers in virtual time, against the formulas of `d2lps.cost` and against one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import gradients, sources

from d2lps import cost
from d2lps.comm import RankHung
from d2lps.comm.work import in_thread
from d2lps.kvstore import Lost, Refused, Server, simulate
from d2lps.kvstore.core.events import alike
from d2lps.kvstore.core.placement import join_parts
from d2lps.simulator import Model
from d2lps.topology import pcie_tree, star

ALPHA, BETA = 2e-6, 1e-9  # of a path over the two links of a star


def once(kv: Any, n: int, how: str) -> float:
    """Seconds of one push and one pull."""
    value, out = torch.ones(n, device=kv.comm.device), torch.empty(n, device=kv.comm.device)
    kv.init("w", torch.zeros(n, device=kv.comm.device))
    kv.barrier()
    start = kv.comm.now()
    if how == "pushpull":
        kv.pushpull("w", value, out).wait()
    else:
        kv.push("w", value)
        kv.clock()
        kv.pull("w", out).wait()
    return float(kv.comm.now() - start)


@pytest.mark.parametrize("how", ["push, clock, pull", "pushpull"])
@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (4, 2), (4, 4), (8, 3), (2, 4)])
def test_push_and_pull_take_what_the_formula_says(workers: int, servers: int, consistency: str, how: str) -> None:
    n = 240_000
    cluster = star(workers + servers, 1 / BETA, ALPHA / 2)
    run = simulate(once, cluster, workers, servers, n, how, consistency=consistency, split=1000, device="meta", trace=False)
    assert max(run) == pytest.approx(cost.parameter_servers(4 * n, workers, servers, ALPHA, BETA), rel=1e-9)


@pytest.mark.parametrize("machines", [2, 3, 8])
def test_servers_on_the_workers_own_machines(machines: int) -> None:
    n, cluster = 240_000, star(machines, 1 / BETA, ALPHA / 2)
    run = simulate(once, cluster, machines, cluster.devices, n, "pushpull", split=1000, device="meta", trace=False)
    assert max(run) == pytest.approx(cost.colocated_servers(4 * n, machines, ALPHA, BETA), rel=1e-9)


def test_the_textbooks_cpu_that_sums_takes_80_ms() -> None:
    machine = pcie_tree(4, 16e9, latency=0)
    run = simulate(once, machine, 4, machine.hosts, 40_000_000, "pushpull", device="meta", trace=False)
    assert run == pytest.approx([0.080] * 4)


def test_adding_up_takes_the_servers_time_if_the_model_says_so() -> None:
    n, gamma = 1000, 1e-9
    run = simulate(once, star(3, 1 / BETA), 2, 1, n, "pushpull", model=Model(per_combined_byte=gamma), trace=False)
    # Both arrive after 8,000 B; the second is added after two times 4,000 B of adding.
    assert max(run) == pytest.approx(8000 * BETA + 8000 * gamma + 8000 * BETA)


def add_up(kv: Any, steps: int) -> list[torch.Tensor]:
    big, small = torch.zeros(50, 4), torch.zeros(3)
    kv.init("big", big)
    kv.init("small", small)
    for step in range(steps):
        kv.push("big", torch.full((50, 4), float(kv.rank + step)))
        kv.push("small", torch.full((3,), 1.0))
        kv.clock()
        works = [kv.pull("big", big), kv.pull("small", small)]
        for work in works:
            work.wait()
    return [big, small]


@pytest.mark.parametrize("placement", ["hash", "load"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (5, 2), (8, 1)])
def test_values_are_sums_on_any_number_of_servers(workers: int, servers: int, placement: str) -> None:
    run = simulate(add_up, star(workers + servers, 1e9, 1e-6), workers, servers, 3, split=100, placement=placement)
    total = sum(rank + step for rank in range(workers) for step in range(3))
    for big, small in run:
        assert big.unique().tolist() == [total] and small.unique().tolist() == [3 * workers]
    assert torch.equal(run.values["big"], run[0][0]) and torch.equal(run.values["small"], run[0][1])
    assert dict(run.staleness).keys() == {0}


def test_bytes_by_server_and_by_link() -> None:
    run = simulate(add_up, star(5, 1e9, 1e-6), 3, 2, 4, split=100)
    sent = run.trace.bytes_by_link()
    for number, server in enumerate(run.servers):
        own = sum(value.nbytes for value in server.values.values())
        assert server.nbytes == own and server.sent == 3 * 4 * own and server.received == 3 * 5 * own  # init, too
        assert sum(sent[worker, 3 + number] for worker in range(3)) == server.received
        assert sum(sent[3 + number, worker] for worker in range(3)) == server.sent
    assert sum(server.nbytes for server in run.servers) == 812
    assert run.trace.unmatched == 0 and run.trace.rounds > 0
    assert "push big[0:25]" in run.trace.steps and run.trace.bytes_on_links()["gpu0", "switch"] == 5 * 812


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_the_trace_shows_whose_pushes_are_in_whose_values(consistency: str) -> None:
    def worker(kv: Any) -> None:
        gradient, weights = torch.ones(8), torch.zeros(8)
        kv.init("w", weights)
        kv.barrier()
        kv.push("w", gradient)
        kv.clock()
        kv.barrier()
        kv.pull("w", weights).wait()

    trace = simulate(worker, star(5, 1e9, 1e-6), 3, 2, split=16, consistency=consistency).trace
    assert [trace.ops[op] for op in trace.locals["op"]].count("SUM") == 3 * 2
    assert "leave" not in trace.steps and trace.unmatched == 0
    held = sources(trace, "weights")
    assert len(held) == 3 * 2 and all(gradients(found) == {rank: 1 for rank in range(3)} for found in held)


def test_the_log_of_a_run_gives_its_servers_again() -> None:
    run = simulate(add_up, star(5, 1e9, 1e-6), 3, 2, 3, split=100, consistency="ssp", staleness=1, log=True, trace=False)
    values: dict[str, torch.Tensor] = {}
    for report in run.servers:
        server = Server(range(3), "ssp", 1)
        for _, event in report.log:
            server.step(event)
        assert not server.clocks.at and server.number == len(report.log)
        values |= {key: entry.value for key, entry in server.entries.items()}
    assert alike(join_parts(values), run.values)
    assert [time for time, _ in run.servers[0].log] == sorted(time for time, _ in run.servers[0].log)


def test_two_runs_are_the_same() -> None:
    one, other = (simulate(add_up, star(6, 1e9, 1e-6), 4, 2, 3, split=100, consistency="asp") for _ in range(2))
    assert one.time == other.time and alike(one.values, other.values)
    assert one.trace.messages["end"].tolist() == other.trace.messages["end"].tolist()


def test_high_priorities_overtake() -> None:
    def worker(kv: Any, priorities: list[int]) -> list[float]:
        values = [torch.ones(1000) for _ in priorities]
        for key, value in enumerate(values):
            kv.init(key, value)
        start, ended = kv.comm.now(), []
        for work in [kv.push(key, values[key], priority) for key, priority in enumerate(priorities)]:
            work.wait()
            ended.append(round((kv.comm.now() - start) * 1e6))
        return ended

    [ended] = simulate(worker, star(2, 1e9), 1, 1, [0, 0, 0])
    assert ended == [4, 8, 12]
    [ended] = simulate(worker, star(2, 1e9), 1, 1, [0, 1, 2])  # the first is on its way already
    assert ended == [4, 12, 12]


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
def test_no_priority_overtakes_the_end_of_an_iteration(consistency: str) -> None:
    def worker(kv: Any) -> float:
        first, second = torch.ones(10_000), torch.zeros(10_000)
        kv.init("first", first)
        kv.init("second", second)
        kv.push("first", first)  # keeps the connection busy, while the others queue
        kv.push("second", first, priority=-5)
        kv.clock()
        kv.pull("second", second, priority=9).wait()
        return second.sum().item()

    assert simulate(worker, star(2, 1e9, 1e-6), 1, 1, consistency=consistency) == [10_000.0]


def test_messages_of_one_connection_follow_one_another_without_new_latency() -> None:
    def worker(kv: Any) -> float:
        value = torch.ones(1000)
        for key in range(5):
            kv.init(key, value)
        start = kv.comm.now()
        for work in [kv.push(key, value) for key in range(5)]:
            work.wait()
        return float(kv.comm.now() - start)

    assert simulate(worker, star(2, 1e9, 0.5e-3), 1, 1)[0] == pytest.approx(2 * 1e-3 + 5 * 4e-6)


def test_rows_of_an_embedding_travel_alone() -> None:
    def worker(kv: Any) -> tuple[list[float], float]:
        table = torch.zeros(1000, 8)
        kv.init("table", table)
        start, rows = kv.comm.now(), torch.tensor([999, kv.rank, 0, 999])
        kv.push_rows("table", rows, torch.ones(4, 8)).wait()
        kv.barrier()
        out = torch.zeros(3, 8)
        kv.pull_rows("table", torch.tensor([999, 0, 1]), out).wait()
        return out[:, 0].tolist(), kv.comm.now() - start

    run = simulate(worker, star(4, 1e9, 1e-6), 2, 2, split=1000, consistency="asp")
    assert run[0][0] == run[1][0] == [4.0, 3.0, 1.0]
    assert run[0][1] < 20e-6
    assert run.servers[0].sent + run.servers[1].sent == 2 * 3 * 8 * 4
    assert run.values["table"].sum() == 8 * 8


def test_a_worker_that_hangs_is_given_up_and_the_others_go_on() -> None:
    def worker(kv: Any) -> tuple[float, float]:
        out = torch.zeros(1)
        kv.init("w", out)
        for step in range(5):
            if kv.rank == 1 and step == 2:
                kv.comm.sleep(1000.0)
                with pytest.raises(Refused, match="stale epoch"):
                    kv.push("w", out).wait()
                return 0.0, 0.0
            kv.push("w", torch.ones(1))
            kv.clock()
            kv.pull("w", out).wait()
        return out.item(), kv.comm.now()

    run = simulate(worker, star(4, 1e9, 1e-3), 3, 1, events=[(50.0, Lost(1))])
    assert run[0] == run[2] and run[0][0] == 2 * 3 + 3 * 2 and 50 < run[0][1] < 51


@pytest.mark.parametrize("op", ["push", "pushpull", "push_rows"])
def test_a_refused_push_that_nobody_waited_for_is_reported_at_the_end(op: str) -> None:
    def worker(kv: Any, waits: bool) -> str:
        value, rows = torch.ones(2), torch.tensor([1])
        kv.init("w", value)
        kv.pushpull("w", value, value).wait()
        given = {"push": (value,), "pushpull": (value, value), "push_rows": (rows, value[:1])}[op]
        work = getattr(kv, op)("w", *given)  # its round of this key is over
        for _ in range(3):
            kv.pull("w", value).wait()
        if waits:
            with pytest.raises(Refused):
                work.wait()
        return "done"

    assert simulate(worker, star(2, 1e9), 1, 1, True) == ["done"]
    with pytest.raises(Refused, match=rf"kv.{op}\('w'\): .*; nobody has waited for this"):
        simulate(worker, star(2, 1e9), 1, 1, False)


STATE = torch.nn.Linear(9, 9).state_dict()
NONE = torch.zeros(1).grad  # of a parameter that has no gradient


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda kv: kv.push("w", torch.ones(5)), ValueError, r"'w' is float32\[4\], not float32\[5\]"),
        (lambda kv: kv.init(1.5, torch.zeros(1)), TypeError, "a key is a string or a number"),
        (lambda kv: kv.init(True, torch.zeros(1)), TypeError, r"a key is a string or a number, .* not bool with Tensor"),
        (lambda kv: kv.push("w", NONE), TypeError, "both are lists: not 'w' with NoneType"),
        (lambda kv: kv.init(STATE.keys(), STATE.values()), TypeError, "both are lists: not odict_keys with odict_values"),
        (lambda kv: kv.push_rows("e", torch.tensor([0]), torch.ones(1, 1)), ValueError, "must call init"),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_sent(call: Any, kind: type[Exception], told: str) -> None:
    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(4))
        call(kv)

    with pytest.raises(kind, match=told):
        simulate(worker, star(2, 1e9), 1, 1)


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="servers=2, but star"):
        simulate(once, star(3, 1e9), 2, 2)
    with pytest.raises(ValueError, match="consistency='bulk'"):
        simulate(once, star(3, 1e9), 2, 1, consistency="bulk")
    with pytest.raises(ValueError, match="nowhere"):
        simulate(once, star(3, 1e9), 2, ["nowhere"])


def test_strided_tensors_and_parameters() -> None:
    def worker(kv: Any) -> float:
        model = torch.nn.Linear(3, 2, bias=False)
        before = model.weight.detach().clone()
        kv.init("w", model.weight.t())
        kv.push("w", torch.ones(2, 3).t())
        out = torch.zeros(2, 3)
        kv.pull("w", out.t()).wait()
        kv.pull("w", model.weight.t()).wait()
        assert torch.equal(out, model.weight)
        return float((out - before).sum())

    [grown] = simulate(worker, star(3, 1e9), 1, 2, split=8, consistency="asp")
    assert grown == pytest.approx(6.0)


def test_pushes_may_be_made_while_gradients_are_still_computed() -> None:
    def worker(kv: Any) -> list[bool]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        pulls: list[Any] = []
        for key, parameter in enumerate(parameters):
            kv.init(key, parameter)

            def hook(parameter: torch.Tensor, key: int = key) -> None:
                pulls.append(kv.pushpull(key, parameter.grad, parameter.grad, priority=-key))
                kv.comm.sleep(1e-3)

            parameter.register_post_accumulate_grad_hook(hook)
        x = torch.randn(2, 4, generator=kv.comm.generator)
        torch.nn.Sequential(*layers)(x).sum().backward()
        kv.clock()
        for pull in pulls:
            pull.wait()
        return [torch.isfinite(parameter.grad).all().item() for parameter in parameters]  # type: ignore[misc, union-attr]

    assert simulate(worker, star(4, 1e9, 1e-6), 3, 1) == [[True] * 6] * 3


def test_workers_in_inference_mode() -> None:
    def worker(kv: Any) -> list[float]:
        out = torch.zeros(2)
        with torch.inference_mode():
            kv.init("w", torch.zeros(2))
            kv.push("w", torch.ones(2)).wait()
            kv.push("w", torch.ones(2))
            kv.clock()
            kv.pull("w", out).wait()
        return out.tolist()

    assert simulate(worker, star(4, 1e9, 1e-6), 2, 1) == [[4.0, 4.0]] * 2


def test_a_standstill_is_explained() -> None:
    def worker(kv: Any) -> None:
        if kv.rank == 0:
            kv.barrier()
        else:
            kv.comm.recv(torch.zeros(1), src=0)

    with pytest.raises(RankHung) as caught:
        simulate(worker, star(3, 1e9), 2, 1)
    assert "rank 0 waits for a parameter server's answer (in worker" in str(caught.value)
    assert "rank 2 serves, and has nothing to answer" in str(caught.value)
    assert "line 0" not in str(caught.value)  # it is nobody's line that it stands at


def test_a_worker_that_leaves_with_a_read_under_way_gets_it() -> None:
    def worker(kv: Any) -> float:
        kv.init("w", out := torch.zeros(1))
        kv.comm.sleep(kv.rank)
        read = kv.pushpull("w", torch.ones(1), out)
        kv.leave()
        read.wait()
        return out.item()

    assert simulate(worker, star(3, 1e9), 2, 1) == [0.0, 2.0]


def test_who_only_tests_an_answer_hangs_by_name() -> None:
    def worker(kv: Any) -> None:
        kv.init("w", out := torch.zeros(1))
        read = kv.pull("w", out)
        while not read.test():
            kv.comm.sleep(1e-6)
        read = kv.pull("w", out)
        while not read.test():
            pass

    with pytest.raises(RankHung, match="rank 0 has tested 10,000 times"):
        simulate(worker, star(2, 1e9, latency=1e-3), 1, 1)


def test_another_thread_of_a_simulated_worker_is_not_let_in_and_does_no_harm() -> None:
    def worker(kv: Any) -> tuple[str, float]:
        kv.init("w", out := torch.zeros(1))
        try:
            in_thread(lambda: kv.push("w", torch.ones(1)).wait(), "another").result()
        except RuntimeError as error:
            said = str(error)
        kv.clock()
        kv.pull("w", out).wait()
        return said, out.item()

    [(said, value)] = simulate(worker, star(2, 1e9, latency=1e-3), 1, 1)
    assert "belongs to another of its rank's lanes" in said and value == 1.0
