"""Six architectures, one job: they come to the same weights, and each takes an accident in its own way."""

# ruff: noqa: F401 - fixtures are imported, and named again as parameters

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from launching import nothing_left
from torch.nn.functional import cross_entropy

from d2lps import architectures, kvstore
from d2lps.architectures import ACCIDENTS, ARCHITECTURES, LARGE, Job, Outcome
from d2lps.architectures.accidents import run_worker
from d2lps.architectures.cloud_native import cloud_native
from d2lps.architectures.six import COLLECTIVE, STORED, count
from d2lps.comm import RankDied
from d2lps.kvstore import Lost
from d2lps.simulator import Kill, simulate
from d2lps.topology import dgx_a100_pod, star

JOB = Job(steps=5)
POD = dgx_a100_pod(1)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], torch.Tensor]:
    """The losses and the last weights of one process, and torch's own optimizer."""
    module, losses = JOB.module(), []
    optimizer = torch.optim.SGD(module.parameters(), **JOB.hyper)
    assert JOB.data is not None
    for step in range(JOB.steps):
        tokens, targets = JOB.data.batch(step * JOB.batch, JOB.batch)
        loss = cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([weight.detach().flatten() for weight in module.parameters()])


def check_same(outcome: Outcome, plain: tuple[list[float], torch.Tensor]) -> None:
    losses, weights = plain
    assert outcome.losses == pytest.approx(losses, abs=1e-12)
    assert outcome.weights is not None and (outcome.weights - weights).abs().max() < 1e-12
    assert all(torch.equal(record.weights, outcome.weights) for record in outcome.records), "all ranks have the same"


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_a_simulation_all_come_to_what_one_process_does(name: str, ranks: int, plain: Any) -> None:
    servers = POD.devices[:2]
    check_same(architectures.simulate(name, JOB, POD, ranks, servers=servers, trace=False), plain)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["parameter server", "hierarchical", "dynamic"])
def test_on_processes_too(name: str, plain: Any) -> None:
    """The other three come to it further down, although somebody is killed, or joins them."""
    outcome = architectures.run(name, JOB, 4)
    check_same(outcome, plain)
    assert outcome.ranks == 4 and not outcome.history and 0 < outcome.time < 600


def test_who_is_there_is_used_as_far_as_the_batch_can_be_shared() -> None:
    assert [JOB.fits(ranks) for ranks in (1, 3, 5, 7, 8, 15, 16, 99)] == [1, 2, 4, 4, 8, 8, 16, 16]
    assert [str(JOB.plan(ranks)) for ranks in (1, 3)] == [
        "micro_batch=8 precision=fp64 overlap=False", "tp=2 micro_batch=8 precision=fp64 overlap=False"
    ]  # fmt: skip
    assert [count("hybrid", LARGE, ranks) for ranks in (64, 63, 16, 15)] == [64, 56, 16, 14]
    assert [count("cloud-native", JOB, 7), count("ring", JOB, 7)] == [7, 4]


# ---- accidents ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], architectures.Row]:
    torch.set_num_threads(1)
    return {(row.architecture, row.accident): row for row in architectures.rows(replace(JOB, steps=4), POD)}


def test_there_are_24_rows_and_in_each_the_job_is_done(rows: Any) -> None:
    assert list(rows) == [(name, accident) for name in ARCHITECTURES for accident in ACCIDENTS]
    assert all(row.steps == 4 and row.time > 0 and 0 <= row.affected <= row.of for row in rows.values())


def test_only_the_server_loses_a_part_of_the_batch(rows: Any) -> None:
    """Its shares belong to workers; the other jobs begin again with all of the batch, or lease it out."""
    assert {key for key, row in rows.items() if not row.same_loss} == {("parameter server", a) for a in ("kill", "cut", "join")}


@pytest.mark.parametrize("name", COLLECTIVE)
def test_collectives_end_and_begin_again(name: str, rows: Any) -> None:
    kill, slow, cut, join = (rows[name, accident] for accident in ACCIDENTS)
    assert kill.time > 5 and kill.of == 4 and kill.affected == 4 and "is dead, and the job is ended" in kill.history[0]
    assert "it begins again on 4 devices" in kill.history[1]
    assert join.time > 5 and join.of == 8 and "all stop after 3 steps" in join.history[0] and join.redone == 0
    assert not slow.history and not cut.history, "nobody is told: they wait"
    assert cut.affected == cut.of == 8 and cut.slowdown > 1.4 and slow.slowdown > 1


def test_a_checkpoint_that_was_not_whole_does_not_count(rows: Any) -> None:
    """The two that were done are saved by then but for the hybrid one, whose pieces many ranks have to write and confirm."""
    assert {name: rows[name, "kill"].redone for name in COLLECTIVE} == {"ring": 0, "hybrid": 2, "hierarchical": 0, "dynamic": 0}


@pytest.mark.parametrize("name", STORED)
def test_of_a_store_others_go_on(name: str, rows: Any) -> None:
    kill, slow, cut, join = (rows[name, accident] for accident in ACCIDENTS)
    for row in (kill, cut):
        assert row.of == 7 and row.redone == 0 and row.slowdown < 2 and row.history[0].endswith("is given up; the others go on")
    assert join.of == 8 and "more join" in join.history[0] and slow.affected == 8


def test_leases_hold_a_slow_worker_up_less_than_shares_do(rows: Any) -> None:
    assert rows["cloud-native", "slow"].slowdown < rows["parameter server", "slow"].slowdown
    assert rows["cloud-native", "join"].slowdown < 1 < rows["parameter server", "join"].slowdown


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.filterwarnings("ignore:.*was killed by SIGKILL")
@pytest.mark.parametrize("name", ["parameter server", "ring", "cloud-native"])
def test_a_process_is_killed(name: str, plain: Any) -> None:
    outcome = architectures.run(name, JOB, 4, "kill")
    assert "rank 2 of 4 was killed by SIGKILL" in outcome.history[0]
    same = outcome.weights is not None and bool((outcome.weights - plain[1]).abs().max() < 1e-12)
    assert same == (name != "parameter server")
    if name == "ring":
        assert outcome.ranks == 2 and outcome.losses == pytest.approx(plain[0], abs=1e-12)
    else:
        assert len(outcome.records) == 3


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["hybrid", "cloud-native"])
def test_a_process_comes(name: str, plain: Any) -> None:
    job = replace(JOB, steps=12) if name == "cloud-native" else JOB  # time to come
    outcome = architectures.run(name, job, 4, "join")
    assert outcome.ranks == 4 and outcome.history
    if name == "hybrid":
        check_same(outcome, plain)


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """The weights of a job that one worker does alone, whom nothing happens to."""
    weights = architectures.simulate("cloud-native", Job(batch=4, steps=3), POD, 1, trace=False).weights
    assert weights is not None
    return weights


@pytest.mark.parametrize("seed", range(6))
def test_the_weights_are_the_same_to_the_bit_whoever_dies_when(seed: int, alone: torch.Tensor) -> None:
    """Up to all of four, and one that is given up though it lives; a fifth comes, and the key is cut over three servers."""
    pod, chance = POD.reached(), random.Random(seed)
    job = Job(batch=4, steps=3, comes=chance.uniform(0, 0.013))
    nodes, dead, given_up = pod.devices, chance.sample(range(4), chance.randint(1, 4)), chance.randrange(4)
    kills = [Kill(nodes[rank], chance.uniform(0, 0.015)) for rank in dead]
    events = [(kill.at + chance.choice([0, 1e-4, 0.01]), Lost(rank)) for kill, rank in zip(kills, dead, strict=True)]
    events = sorted([*events, (chance.uniform(0, 0.015), Lost(given_up))], key=lambda event: event[0])
    run = kvstore.simulate(
        run_worker, pod, nodes[:5], nodes[5:], cloud_native, job, (4,),
        faults=kills, events=events, absent=(4,), consistency="asp", split=10_000, trace=False,
    )  # fmt: skip
    assert run[4] is not None and all(torch.equal(record.weights, alone) for record in run if record)


def test_those_who_die_together_say_nothing_of_one_another() -> None:
    def wait(comm: Any) -> None:
        comm.recv(torch.zeros(1), 1 - comm.rank)

    faults = [Kill("gpu0", 1.0), Kill("gpu1", 1.0)]
    assert simulate(wait, star(2, 1e9), faults=faults) == [None, None]
    with pytest.raises(RankDied, match="rank 0 has died"):
        simulate(wait, star(2, 1e9), faults=faults[:1])


# ---- bytes and time of a described job ----------------------------------------------------------------------------------------

DESCRIBED = replace(LARGE, batch=224, steps=2)
TWO = dgx_a100_pod(2)
N = 2 * sum(weight.numel() for weight in LARGE.module().parameters())  # bytes, in BF16


def on_port(name: str, port: tuple[str, str], **options: Any) -> float:
    """Bytes of gradients and weights in a step, through a port."""
    outcome = architectures.simulate(name, DESCRIBED, TWO, **options)
    return outcome.bytes_on_links()[port] / DESCRIBED.steps


def test_what_a_port_carries_is_what_the_formulas_say() -> None:
    out = ("node0/gpu7", "network")
    assert on_port("ring", out) == pytest.approx(2 * 15 / 16 * N, rel=1e-6)
    assert on_port("hierarchical", out) == pytest.approx(N / 8, rel=1e-6)  # 2 (k - 1)/k n/g with k = 2 machines of g = 8
    server = ["node0/gpu7"]
    # Eight workers elsewhere push all, and pull all; the first value comes once more from each of them.
    assert on_port("parameter server", out, servers=server) == pytest.approx(8 * N, rel=1e-6)
    assert on_port("parameter server", out[::-1], servers=server) == pytest.approx(8 * N * 1.5, rel=1e-6)


def test_of_a_described_job_nothing_is_known_but_time() -> None:
    outcome = architectures.simulate("ring", DESCRIBED, TWO, trace=False)
    assert outcome.weights is None and outcome.loss is None and outcome.losses == [None, None]
    seconds = DESCRIBED.seconds(TWO.device("node0/gpu0")) * 14
    assert seconds < outcome.step_time < 2 * seconds
    row = architectures.row("ring", "slow", replace(DESCRIBED, steps=4), TWO)
    assert row.same_loss is None and row.slowdown > 1.5


# ---- what can't be ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="architecture='star'"):
        architectures.simulate("star", JOB, POD)
    with pytest.raises(ValueError, match="accident='flood'"):
        architectures.simulate("ring", JOB, POD, accident="flood")
    with pytest.raises(ValueError, match="accident='slow'"):
        architectures.run("ring", JOB, 4, "slow")
    for call in (architectures.simulate, architectures.run):
        with pytest.raises(ValueError, match="steps=3"):
            call("ring", replace(JOB, steps=3), POD if call is architectures.simulate else 4, accident="kill")  # type: ignore[operator]
    with pytest.raises(ValueError, match="ranks=1, of which 1 would work"):
        architectures.simulate("ring", JOB, POD, 1, accident="kill")
    with pytest.raises(ValueError, match="ranks=1, of which 1 would work"):
        architectures.run("ring", JOB, 1, "kill")
    with pytest.raises(ValueError, match="ranks=9: the cluster has 8 devices"):
        architectures.simulate("ring", JOB, POD, 9)
    with pytest.raises(ValueError, match="are on all devices"):
        architectures.simulate("cloud-native", JOB, POD, 2, accident="kill", servers=POD.devices)
    with pytest.raises(ValueError, match="batch=16 is no multiple of part=3"):
        Job(part=3)
    with pytest.raises(ValueError, match="have no device"):
        architectures.simulate("ring", JOB, star(2, 1e9))
