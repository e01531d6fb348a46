"""When pushes take effect and when reads go, under bsp, ssp, asp and the adaptive rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import digits

import d2lps
from d2lps.kvstore import Lost, Reply, Request, Server, simulate
from d2lps.kvstore.core.client import Session
from d2lps.kvstore.core.clocks import ALL, Clocks
from d2lps.kvstore.core.events import Effect
from d2lps.kvstore.storage.frame import pack, unpack
from d2lps.topology import star


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: threads that wait for one another on a busy machine take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Rig:
    """A server, and workers who speak to it directly."""

    def __init__(self, workers: int, consistency: str = "bsp", **kwargs: Any) -> None:
        self.server = Server(range(workers), consistency, **kwargs)
        self.sessions = {rank: Session(rank) for rank in range(workers)}
        self.at = dict.fromkeys(range(workers), 0)
        self.answered: list[Reply] = []

    def ask(self, rank: int, op: str, key: str = "w", value: torch.Tensor | None = None, **fields: Any) -> list[Reply]:
        request = self.sessions[rank].number(Request(op, key, value, **fields), op)
        return self.take(self.server.step(request))

    def take(self, effects: list[Effect]) -> list[Reply]:
        replies = [effect for effect in effects if isinstance(effect, Reply)]
        for reply in replies:
            self.sessions[reply.client].answered(reply)
        self.answered += replies
        return replies

    def init(self, *values: float) -> Rig:
        for rank in self.sessions:
            self.ask(rank, "init", value=torch.tensor(values))
        return self

    def clock(self, rank: int) -> list[Reply]:
        """The answers to others that this has set free."""
        self.at[rank] += 1
        return [reply for reply in self.ask(rank, "clock", "", clock=self.at[rank]) if reply.op != "clock"]

    def value(self, key: str = "w") -> list[float]:
        return self.server.entries[key].value.tolist()


# ---- bsp ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_bsp_sums_in_rank_order_whoever_comes_first(order: tuple[int, ...]) -> None:
    rig, parts = Rig(3).init(0.0), [1e8, 1.0, -1e8]  # in float32, another order gives another sum
    for rank in order:
        rig.ask(rank, "push", value=torch.tensor([parts[rank]]))
        rig.ask(rank, "push", value=torch.tensor([0.25]))
    assert rig.value() == [0.0], "nothing is applied before the round has ended"
    for rank in reversed(order):
        rig.clock(rank)
    total = torch.zeros(1)
    for part in parts:
        total += part
        total += 0.25
    assert rig.value() == total.tolist()


def test_bsp_reads_after_the_rounds_before_it() -> None:
    rig = Rig(2).init(0.0)
    rig.ask(0, "push", value=torch.ones(1))
    rig.clock(0)
    assert rig.ask(0, "pull") == []
    [before] = rig.ask(1, "pull")
    assert before.value is not None and before.value.item() == 0.0
    rig.ask(1, "push", value=torch.ones(1))
    [after] = rig.clock(1)
    assert after.client == 0 and after.value is not None and after.value.item() == 2.0


@pytest.mark.parametrize("op", ["pull", "pushpull"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_read_is_of_the_clock_at_which_it_was_asked_however_far_its_worker_goes_on(op: str, late: int, leaves: bool) -> None:
    rig = Rig(2).init(0.0)
    for rank in (late, 1 - late):  # who comes first neither waits for longer, nor sees more
        rig.ask(rank, "push" if op == "pull" else op, value=torch.ones(1))
        if rank == 0:
            rig.ask(0, "pull")  # of this round if it was ended, else of the one before
            rig.clock(0)
            rig.ask(0, op, value=None if op == "pull" else torch.full((1,), 10.0))
            rig.clock(0)
            rig.ask(0, "push", value=torch.full((1,), 100.0))
            rig.clock(0)
        elif leaves:  # in its first round, so that three rounds end at once
            rig.ask(1, "leave", "")
        else:
            rig.clock(1)
            rig.clock(1)
    reads = [reply.value.item() for reply in rig.answered if reply.client == 0 and reply.value is not None]
    assert reads == ([0.0, 2.0] if op == "pull" else [2.0, 2.0, 12.0])


def test_a_pushpull_ends_the_round_of_its_key_alone() -> None:
    rig = Rig(2).init(0.0)
    assert rig.ask(0, "pushpull", value=torch.ones(1)) == []
    replies = rig.ask(1, "pushpull", value=torch.ones(1))
    assert [(reply.client, reply.value.item()) for reply in replies] == [(0, 2.0), (1, 2.0)]  # type: ignore[union-attr]
    assert "ended its round 0" in rig.ask(0, "push", value=torch.ones(1))[0].error
    [again] = rig.ask(0, "pull")
    assert again.value is not None and again.value.item() == 2.0
    assert rig.clock(0) == [] and rig.clock(1) == []
    assert rig.ask(1, "pushpull", value=torch.ones(1)) == []
    [reply] = rig.clock(0)  # without pushing this key: its round ends too
    assert reply.value is not None and reply.value.item() == 3.0


def test_an_optimizer_of_a_later_round_waits_for_the_earlier_ones() -> None:
    rig = Rig(2).init(0.0)
    for rank in range(2):
        rig.ask(rank, "set_optimizer", "", options={"name": "sgd", "lr": 1.0, "reduction": "sum"})
        rig.ask(rank, "push", value=torch.ones(1))
    rig.clock(0)
    assert rig.ask(0, "set_optimizer", "", options={"name": "sgd", "lr": 100.0}) == []
    assert [reply.op for reply in rig.clock(1)] == ["set_optimizer"]
    assert rig.value() == [-2.0]


@pytest.mark.parametrize(("reduction", "lands"), [("mean", -1.0), ("sum", -4.0)])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_mean_or_sum_of_the_workers_gradients(consistency: str, reduction: str, lands: float) -> None:
    rig = Rig(4, consistency).init(0.0)
    rig.ask(0, "set_optimizer", "", options={"name": "sgd", "lr": 1.0, "reduction": reduction})
    for rank in range(4):
        rig.ask(rank, "push", value=torch.ones(1))
        rig.clock(rank)
    assert rig.value() == [lands]


# ---- who may read when ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(staleness=st.integers(0, 3), moves=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=50))
def test_ssp_answers_exactly_the_reads_that_are_within_the_bound(staleness: int, moves: list[tuple[int, bool]]) -> None:
    rig, waiting = Rig(3, "ssp", staleness=staleness).init(0.0), dict[int, int]()  # worker -> the clock at which it asked
    for rank, reads in moves:
        if rank in waiting:
            continue
        if reads:
            waiting[rank] = rig.at[rank]
            freed = rig.ask(rank, "pull")
        else:
            freed = rig.clock(rank)
        within = {rank for rank, clock in waiting.items() if min(rig.at.values()) >= clock - staleness}
        assert {reply.client for reply in freed} == within
        waiting = {rank: clock for rank, clock in waiting.items() if rank not in within}
    assert max(rig.server.seen, default=0) <= staleness


def test_asp_never_waits_and_pushes_take_effect_at_once() -> None:
    rig = Rig(2, "asp").init(0.0)
    for count in range(1, 10):
        rig.ask(0, "push", value=torch.ones(1))
        rig.clock(0)
        [reply] = rig.ask(0, "pull")
        assert reply.value is not None and reply.value.item() == count
    assert dict(rig.server.seen) == {count: 1 for count in range(1, 10)}


def test_the_adaptive_bound_grows_with_waits_and_shrinks_without() -> None:
    rig, bounds = Rig(2, "adaptive", staleness=2).init(0.0), []
    for _ in range(4):  # worker 0 hurries ahead as far as it may, worker 1 follows
        while rig.ask(0, "pull"):
            rig.clock(0)
        while not rig.clock(1):
            pass
        bounds.append(rig.server.consistency.staleness)
        rig.clock(0)
    assert bounds == [1, 2, 2, 2]
    for _ in range(8):  # side by side
        ahead = rig.at[0] > rig.at[1]
        rig.clock(int(ahead))
        bounds.append(rig.server.consistency.staleness)
    assert bounds[4:] == [2, 1, 0, 0, 0, 0, 0, 0] and rig.server.seen.keys() <= {0, 1, 2}


@pytest.mark.parametrize(
    ("consistency", "staleness", "says"),
    [("bsp", 1, "knows no such bound"), ("asp", 2, "no such bound"), ("ssp", -1, "staleness=-1"), ("fifo", 0, "'fifo'")],
)
def test_impossible_rules_are_refused(consistency: str, staleness: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Server([0], consistency, staleness)


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_a_front_knows_its_slowest(moves: list[tuple[int, int]]) -> None:
    front, at = Clocks({0: 0, 1: 0}), {0: 0, 1: 0}
    for worker, move in moves:
        if move == 3:
            front.leave(worker)
            at.pop(worker, None)
        elif worker not in at:
            front.join(worker)
            at[worker] = front.at[worker]
        else:
            front.tick(worker, at[worker] + move)
            at[worker] += move
        assert front.at == at and front.slowest() == min(at.values(), default=float("inf"))


def test_a_clock_may_jump() -> None:
    rig = Rig(2).init(0.0)
    for rank in range(2):
        rig.at[rank] = 2**60
        rig.clock(rank)
    assert rig.server.clocks.slowest() == 2**60 + 1


def test_fronts_of_keys_follow_the_clocks() -> None:
    clocks = Clocks({0: 0, 1: 0})
    assert clocks.end(0, "w") == set() and clocks.end(1, "w") == {"w"}
    assert clocks.tick(0, 1) == set() and clocks.tick(1, 1) == {ALL}
    assert clocks.tick(0, 2) == set() and clocks.leave(1) == {ALL}


# ---- those who go and those who come --------------------------------------------------------------------------------------


def test_bsp_goes_on_with_those_left_and_keeps_what_was_pushed() -> None:
    rig = Rig(3).init(0.0)
    for rank in (0, 1):
        rig.ask(rank, "push", value=torch.ones(1))
        rig.clock(rank)
        assert rig.ask(rank, "pull") == []
    rig.ask(2, "push", value=torch.tensor([10.0]))
    replies = rig.take(rig.server.step(Lost(2)))
    assert [(reply.client, reply.value.item()) for reply in replies] == [(0, 12.0), (1, 12.0)]  # type: ignore[union-attr]
    assert rig.server.step(Lost(2)) == []


def test_what_a_worker_still_waits_for_is_answered_when_it_leaves_or_is_given_up() -> None:
    rig = Rig(3).init(5.0)
    for rank in (0, 1):
        rig.ask(rank, "pushpull", value=torch.ones(1))
        rig.ask(rank, "barrier", "")
    read, waited, _ = rig.ask(0, "leave", "")
    assert (read.op, read.error, waited.op, waited.error) == ("pushpull", "", "barrier", "")
    assert read.value is not None and read.value.item() == 5.0, "its round is not over, but it can't wait for that any more"
    told = [(reply.op, reply.client, reply.error) for reply in rig.take(rig.server.step(Lost(1)))]
    assert told == [(op, 1, "stale epoch: worker 1 of epoch 0 was given up") for op in ("pushpull", "barrier")]
    assert rig.server.waiting == {} and rig.value() == [5.0]
    rig.clock(2)
    assert rig.value() == [7.0], "what they have pushed counts"


def test_when_all_have_left_open_rounds_are_closed() -> None:
    rig = Rig(2).init(0.0)
    for rank in range(2):
        rig.ask(rank, "push", value=torch.ones(1))
        rig.ask(rank, "leave")
    assert rig.value() == [2.0]


def test_who_joins_does_not_begin_in_a_round_that_is_over_for_some_key() -> None:
    rig = Rig(2).init(0.0)
    for rank in range(2):
        rig.ask(rank, "pushpull", value=torch.ones(1))
    rig.sessions[2], rig.at[2] = Session(2), 1
    assert rig.ask(2, "join", "")[0].clock == 1
    assert rig.ask(2, "pushpull", value=torch.ones(1)) == []
    for rank in range(2):
        rig.clock(rank)
        replies = rig.ask(rank, "pushpull", value=torch.ones(1))
    assert [(reply.client, reply.value.item()) for reply in replies] == [(2, 5.0), (0, 5.0), (1, 5.0)]  # type: ignore[union-attr]


def mean_of(rig: Rig) -> Rig:
    """With values that show by what number of workers pushes are divided."""
    rig.ask(0, "set_optimizer", "", options={"reduction": "mean"})
    for rank in range(1, len(rig.sessions)):
        rig.clock(rank)
    rig.clock(0)
    return rig


@pytest.mark.parametrize("when", range(5))
@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("op", ["push", "pushpull"])
@pytest.mark.parametrize("lost", [False, True])
def test_who_ends_a_round_and_leaves_counts_in_it_whenever_that_is_heard(op: str, when: int, restored: bool, lost: bool) -> None:
    """Worker 2 ends one round without a push, and leaves before or after the others end theirs."""
    rig = mean_of(Rig(3).init(0.0))
    rig.clock(2)
    for turn, rank in enumerate([0, 1, 0, 1, None]):
        if turn == when:
            rig.take(rig.server.step(Lost(2))) if lost else rig.ask(2, "leave")
            fresh = Server([0, 1, 2])
            fresh.restore(unpack(bytearray(b"".join(pack(rig.server.state())))))
            rig.server = fresh if restored else rig.server
        if rank is not None:
            rig.ask(rank, op, value=torch.tensor([3.0]))
            rig.clock(rank)
    assert rig.value() == [2.0 + 3.0] and rig.server.clocks.slowest() == 3


def test_who_joins_does_not_count_in_rounds_before_it() -> None:
    rig = Rig(2).init(0.0)
    rig.ask(0, "init", "b", torch.zeros(1))
    mean_of(rig)
    for rank in range(2):
        rig.ask(rank, "push", "b", torch.ones(1))
        rig.ask(rank, "pushpull", value=torch.ones(1))
    rig.sessions[2], rig.at[2] = Session(2), 2
    assert rig.ask(2, "join", "")[0].clock == 2
    rig.ask(2, "push", "b", torch.tensor([9.0]))
    for rank in range(2):
        rig.clock(rank)
    assert rig.value("b") == [1.0], "the round that had begun is of two workers"
    for rank in range(3):
        rig.clock(rank)
    assert rig.value("b") == [1.0 + 3.0], "and the next one of three"


def test_who_comes_when_all_have_left_is_alone() -> None:
    rig = mean_of(Rig(2).init(0.0))
    rig.clock(0)
    rig.ask(0, "leave")
    rig.ask(1, "leave")
    rig.sessions[2], rig.at[2] = Session(2), 1
    assert rig.ask(2, "join", "")[0].clock == 1
    rig.ask(2, "push", value=torch.ones(1))
    rig.clock(2)
    assert rig.value() == [1.0] and not rig.server.clocks.left


def test_of_those_who_have_left_only_what_still_counts_is_kept() -> None:
    front = Clocks({0: 0, 1: 0})
    for life in range(100):
        front.tick(1, life + 2)
        front.leave(1)
        front.join(1)
        front.tick(0, life + 1)
    assert len(front.left) <= 2 and front.members(100, "w") == {0, 1}


def test_who_joins_begins_at_the_current_clock() -> None:
    rig = Rig(2, "ssp", staleness=1).init(0.0)
    for _ in range(3):
        rig.clock(0)
        rig.clock(1)
    rig.clock(0)
    rig.sessions[7], rig.at[7] = Session(7), 3
    assert rig.ask(7, "join", "")[0].clock == 3
    rig.clock(1)
    rig.clock(0)
    assert rig.ask(0, "pull") == []  # waits for the newcomer
    assert [reply.client for reply in rig.clock(7)] == [0]
    rig.server.step(Request("join", client=8, sequence=1))
    assert rig.server.clocks.at[8] == 4


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
