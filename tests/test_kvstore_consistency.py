"""When pushes take effect and when reads go, under bsp, ssp, asp and the adaptive rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import Asking, digits

import d2lps
from d2lps.kvstore import Lost, Server, simulate
from d2lps.kvstore.core.clocks import Clocks
from d2lps.topology import star

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_adaptive_bound_grows_with_waits_and_shrinks_without() -> None:
    server, bounds = Server([0, 1], "adaptive", staleness=2), []
    workers = [Asking(server, rank) for rank in range(2)]
    workers[0]("init", "w", [0.0])

    def clock(rank: int) -> bool:
        """Whether this sets somebody free."""
        return len(workers[rank]("clock", clock=server.clocks.at[rank] + 1)) > 1

    for _ in range(4):  # worker 0 hurries ahead as far as it may, worker 1 follows
        while workers[0]("pull", "w"):
            clock(0)
        while not clock(1):
            pass
        bounds.append(server.consistency.staleness)
        clock(0)
    assert bounds == [1, 2, 2, 2]
    for _ in range(8):  # side by side
        clock(int(server.clocks.at[0] > server.clocks.at[1]))
        bounds.append(server.consistency.staleness)
    assert bounds[4:] == [2, 1, 0, 0, 0, 0, 0, 0] and server.seen.keys() <= {0, 1, 2}


@pytest.mark.parametrize(
    ("consistency", "staleness", "says"),
    [("bsp", 1, "knows no such bound"), ("asp", 2, "no such bound"), ("ssp", -1, "staleness=-1"), ("fifo", 0, "'fifo'")],
)
def test_impossible_rules_are_refused(consistency: str, staleness: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Server([0], consistency, staleness)


def test_a_clock_may_jump() -> None:
    server = Server([0, 1])
    for rank in range(2):
        Asking(server, rank)("clock", clock=2**60)
    assert server.clocks.slowest() == 2**60


# ---- by how many a round's pushes are divided, where workers come and go -----------------------------------------------------


def dividing(workers: int) -> tuple[Server, list[Asking]]:
    """A server whose values show by what number of workers pushes are divided; one more worker may come."""
    server = Server(range(workers))
    asks = [Asking(server, rank) for rank in range(workers + 1)]
    for key in "wb":
        asks[0]("init", key, [0.0])
    asks[0]("set_optimizer", options={"reduction": "mean"})
    return server, asks


def clock(ask: Asking) -> None:
    ask("clock", clock=ask.server.clocks.at[ask.session.client] + 1)


@pytest.mark.parametrize("when", range(5))
@pytest.mark.parametrize("op", ["push", "pushpull"])
@pytest.mark.parametrize("lost", [False, True])
def test_who_ends_a_round_and_leaves_counts_in_it_whenever_that_is_heard(op: str, when: int, lost: bool) -> None:
    """Worker 2 ends one round without a push, and leaves before or after the others end theirs."""
    server, asks = dividing(3)
    clock(asks[2])
    for turn, rank in enumerate([0, 1, 0, 1, None]):
        if turn == when:
            server.step(Lost(2)) if lost else asks[2]("leave")
        if rank is not None:
            asks[rank](op, "w", [3.0])
            clock(asks[rank])
    assert server.entries["w"].value.item() == 2.0 + 3.0 and server.clocks.slowest() == 2


def test_who_joins_does_not_count_in_rounds_before_it() -> None:
    server, asks = dividing(2)
    for ask in asks[:2]:
        ask("push", "b", [1.0])
        ask("pushpull", "w", [1.0])
    assert asks[2]("join")[0].clock == 1
    asks[2]("push", "b", [9.0])
    for ask in asks[:2]:
        clock(ask)
    assert server.entries["b"].value.item() == 1.0, "the round that had begun is of two workers"
    for ask in asks:
        clock(ask)
    assert server.entries["b"].value.item() == 1.0 + 3.0, "and the next one of three"


def test_who_comes_when_all_have_left_is_alone() -> None:
    server, asks = dividing(2)
    clock(asks[0])
    asks[0]("leave")
    asks[1]("leave")
    assert asks[2]("join")[0].clock == 0
    asks[2]("push", "w", [1.0])
    clock(asks[2])
    assert server.entries["w"].value.item() == 1.0 and not server.clocks.left


def test_of_those_who_have_left_only_what_still_counts_is_kept() -> None:
    front = Clocks({0: 0, 1: 0})
    for life in range(100):
        front.tick(1, life + 2)
        front.leave(1)
        front.join(1)
        front.tick(0, life + 1)
    assert len(front.left) <= 2 and front.members(100, "w") == {0, 1}


# ---- training -------------------------------------------------------------------------------------------------------------


def gradient_of(weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of softmax regression's mean cross entropy."""
    wrong = torch.softmax(images @ weights, dim=1) - torch.nn.functional.one_hot(labels, 10)
    return images.T @ wrong / len(images)


@pytest.mark.parametrize(("name", "hyper"), [("sgd", {"lr": 0.5, "momentum": 0.9}), ("adam", {"lr": 0.01})])
def test_bsp_equals_training_in_one_process(name: str, hyper: dict[str, float]) -> None:
    images, labels = digits(1024)
    steps, batch = 30, 64

    def worker(kv: Any) -> torch.Tensor:
        kv.init("weights", torch.zeros(64, 10))
        kv.set_optimizer(name, **hyper)
        weights, share = torch.zeros(64, 10), batch // kv.num_workers
        for step in range(steps):
            kv.pull("weights", weights).wait()
            first = step * batch % 1024 + kv.rank * share
            kv.push("weights", gradient_of(weights, images[first : first + share], labels[first : first + share]))
            kv.clock()
        kv.pull("weights", weights).wait()
        return weights

    weights = torch.nn.Parameter(torch.zeros(64, 10))
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]([weights], **hyper)
    for step in range(steps):
        first = step * batch % 1024
        weights.grad = gradient_of(weights.detach(), images[first : first + batch], labels[first : first + batch])
        optimizer.step()
    run = simulate(worker, star(6, 1e9, 1e-6), 4, 2, split=1000, trace=False)
    for result in run:
        assert torch.equal(result, run[0])
        torch.testing.assert_close(result, weights.detach(), rtol=1e-3, atol=1e-4)
    again = simulate(worker, star(6, 1e9, 1e-6).straggler("gpu2", 50), 4, 2, split=1000, trace=False)
    assert torch.equal(again[0], run[0]), "to the bit, whoever is slow"


def straggle(kv: Any, steps: int, slow: float) -> list[tuple[float, int, list[int]]]:
    """(time, iteration, how many pushes of each worker were seen) of every read."""
    kv.init("seen", torch.zeros(kv.num_workers, dtype=torch.int64))
    mine, seen, reads = torch.zeros(kv.num_workers, dtype=torch.int64), torch.zeros(kv.num_workers, dtype=torch.int64), []
    mine[kv.rank] = 1
    for iteration in range(steps):
        kv.pull("seen", seen).wait()
        reads.append((kv.comm.now(), iteration, seen.tolist()))
        kv.comm.sleep(slow if kv.rank == 0 else 1.0 + 0.01 * kv.rank)
        kv.push("seen", mine)
        kv.clock()
    return reads


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_never_reads_beyond_its_bound_with_a_straggler_of_ten(staleness: int) -> None:
    run = simulate(straggle, star(5, 1e9, 1e-3), 4, 1, 20, 10.0, consistency="ssp", staleness=staleness, trace=False)
    behind = []
    for rank, reads in enumerate(run):
        for _, iteration, seen in reads:
            assert seen[rank] == iteration, "its own pushes a worker sees always"
            assert min(seen) >= iteration - staleness
            behind.append(iteration - min(seen))
    assert max(behind) == staleness == max(run.staleness), "and the bound is reached"


def test_stragglers_cost_bsp_every_round_and_asp_none() -> None:
    def ended(consistency: str, **kwargs: Any) -> list[float]:
        run = simulate(straggle, star(5, 1e9, 1e-3), 4, 1, 20, 10.0, consistency=consistency, trace=False, **kwargs)
        return [reads[-1][0] for reads in run]

    bsp, asp, ssp, adaptive = ended("bsp"), ended("asp"), ended("ssp", staleness=5), ended("adaptive", staleness=5)
    assert min(bsp) > 19 * 10 and max(asp[1:]) < 19 * 1.2
    assert max(asp[1:]) < max(ssp[1:]) < min(bsp) and max(asp[1:]) < max(adaptive[1:]) < min(bsp)


def test_a_worker_that_never_ends_its_iteration_is_a_named_hang_not_a_silent_one() -> None:
    def worker(kv: Any) -> None:
        out = torch.zeros(1)
        kv.init("w", out)
        if kv.rank == 0:
            kv.clock()
            kv.pull("w", out).wait()
        else:
            kv.comm.recv(out, src=0)

    with pytest.raises(d2lps.RankHung, match=r"rank 0 waits for a parameter server's answer .*kv\.pull"):
        simulate(worker, star(3, 1e9), 2, 1)
