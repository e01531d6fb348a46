"""Messages without contents are written down before they happen: nobody can tell the difference, but by the wall clock."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps import Communicator, Mismatch, RankHung
from d2lps.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter_tensor
from d2lps.simulator import Model, script, simulate
from d2lps.topology import dgx1, pcie_tree, star

Program = Callable[..., Any]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps each script had that was played during the test."""
    lengths: list[int] = []
    play = script.Script.play

    def counted(self: script.Script) -> None:
        lengths.append(len(self.steps))
        play(self)

    monkeypatch.setattr(script.Script, "play", counted)
    yield lengths


def blank(comm: Communicator, elements: int) -> torch.Tensor:
    return torch.empty(elements, device=comm.device)


# ---- time ---------------------------------------------------------------------------------------------------------------


def sleeps(comm: Communicator, number: int) -> None:
    comm.sleep(1e-4 * number * (comm.rank + 1))


def rows(comm: Communicator, number: int) -> None:
    row = comm.split(comm.rank % 2)
    assert row is not None
    all_reduce(row, blank(row, 100 * number))
    all_reduce(comm, blank(comm, number))


def on_the_way(comm: Communicator, number: int) -> None:
    """A message that is posted before a collective and waited for after it."""
    work = [
        comm.irecv(blank(comm, number), (comm.rank - 1) % comm.size),
        comm.isend(blank(comm, number), (comm.rank + 1) % comm.size),
    ]
    all_reduce(comm, blank(comm, 10 * number))
    for message in work:
        message.wait()


def one_tensor_for_all(comm: Communicator, number: int) -> None:
    """The same tensor, at every step to another."""
    all_to_all(comm, [blank(comm, number) for _ in range(comm.size)], [blank(comm, number)] * comm.size, "pairwise")


ACTIONS: list[Callable[[Communicator, int], object]] = [
    sleeps,
    rows,
    on_the_way,
    one_tensor_for_all,
    lambda comm, number: comm.barrier(),
    lambda comm, number: broadcast(comm, blank(comm, number), src=number % comm.size),
    lambda comm, number: all_reduce(comm, blank(comm, number)),
    lambda comm, number: all_reduce(comm, blank(comm, number), algorithm="two_rings"),
    lambda comm, number: all_reduce(comm, blank(comm, number), algorithm="halving_doubling"),
    lambda comm, number: reduce_scatter_tensor(comm, blank(comm, number), blank(comm, number * comm.size)),
    lambda comm, number: all_gather(comm, [blank(comm, number) for _ in range(comm.size)], blank(comm, number)),
    lambda comm, number: all_to_all(
        comm, [blank(comm, number) for _ in range(comm.size)], [blank(comm, number) for _ in range(comm.size)], "pairwise"
    ),
]


def perform(comm: Communicator, plan: list[tuple[int, int, bool]]) -> list[float]:
    """The times at which this rank was done with each action of the plan whose time it looked at."""
    seen = []
    for action, number, looks in plan:
        ACTIONS[action](comm, number)
        if looks:
            seen.append(comm.now())
    return [*seen, comm.now()]


@pytest.mark.parametrize("longest", [1, 3, script.LONGEST])
@given(
    plan=st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(1, 50), st.booleans()), min_size=1, max_size=6),
    topology=st.sampled_from([star(2, 1e6), star(3, 1e6, 1e-5), star(5, 1e6, 1e-4), pcie_tree(8), dgx1()]),
    model=st.sampled_from([Model(), Model(eager=64), Model(eager=math.inf), Model(per_message=1e-4, per_combined_byte=1e-6)]),
)
@settings(max_examples=60, deadline=None)
def test_every_rank_is_at_every_place_at_the_same_time(longest: int, plan: Any, topology: Any, model: Model) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "LONGEST", longest)
        one, two = (simulate(perform, topology, plan, device="meta", model=model, trace=trace) for trace in (True, False))
    assert list(one) == list(two) and one.time == two.time


def test_a_rank_goes_through_a_collective_at_once(played: list[int]) -> None:
    run = simulate(all_reduce_blank, star(8, 1e9, 1e-6), 80, device="meta", trace=False)
    assert played == [14] * 8
    assert run.time == pytest.approx(14 * (2e-6 + 40 / 1e9))


def all_reduce_blank(comm: Communicator, elements: int) -> None:
    all_reduce(comm, blank(comm, elements))


def swap(comm: Communicator) -> None:
    comm.sendrecv(blank(comm, 250), comm.rank ^ 1, blank(comm, 250), comm.rank ^ 1)  # a millisecond


def compares(comm: Communicator) -> float:
    """The pair that slept comes last to the comparison; the other one's swaps are past by then."""
    with comm.inside("ours"):
        for _ in range(3 if comm.rank < 2 else 0):
            swap(comm)
        if comm.rank > 1:
            comm.sleep(1)
        comm.agree("half")
        swap(comm)
    return comm.now()


def receives(comm: Communicator) -> float:
    """Rank 2 gets rid of its message when rank 0 has swapped three times with rank 1, who slept."""
    with comm.inside("ours"):
        for step in range(3 if comm.rank < 2 else 0):
            if comm.rank == 1 and step == 2:
                comm.sleep(1)
            swap(comm)
        if comm.rank == 0:
            comm.recv(blank(comm, 250), 2)
        if comm.rank == 2:
            comm.send(blank(comm, 250), 0)
    return comm.now()


def from_another(comm: Communicator) -> float:
    """Rank 0 sends the same tensor to the same rank, but what it receives at the same time comes from rank 1 and 2 in turn."""
    mine, theirs = blank(comm, 250), blank(comm, 250)
    with comm.inside("ours"):
        for _ in range(3):
            if comm.rank == 0:
                comm.sendrecv(mine, 1, theirs, 1)
                comm.sendrecv(mine, 1, theirs, 2)
            elif comm.rank == 1:
                swap(comm)
                comm.recv(theirs, 0)
            elif comm.rank == 2:
                comm.send(mine, 0)
    return comm.now()


@pytest.mark.parametrize(
    ("program", "seconds"),
    [
        (compares, [1.001, 1.001, 1.001, 1.001]),
        (receives, [1.004, 1.003, 1.004, 0]),
        (from_another, [0.006, 0.006, 0.006, 0]),
    ],
)
@pytest.mark.parametrize("trace", [True, False])
def test_what_is_no_pair_of_messages_waits_for_those_that_are(program: Program, seconds: list[float], trace: bool) -> None:
    assert list(simulate(program, star(4, 1e6), device="meta", trace=trace)) == pytest.approx(seconds)


def test_a_tensor_with_contents_arrives_in_a_run_without(played: list[int]) -> None:

    def work(comm: Communicator) -> list[float]:
        seen = []
        for round_ in range(3):
            all_reduce(comm, blank(comm, 8))
            all_reduce(comm, real := torch.tensor([float(comm.rank + round_)]))
            seen.append(real.item())
        return seen

    assert simulate(work, star(4, 1e9), device="meta", trace=False) == [[6.0, 10.0, 14.0]] * 4
    assert played


MARKS: list[tuple[int, int]] = []  # a module's global is the same for all ranks


def leave_marks(comm: Communicator) -> None:
    for round_ in range(3):
        comm.sleep((comm.rank * 7 + round_) % 5)
        all_reduce(comm, blank(comm, 7))
        comm.sleep((comm.rank * 3) % 4 / 8)
        MARKS.append((round_, comm.rank))


def test_what_a_rank_does_after_a_collective_it_does_in_its_turn() -> None:
    marks = []
    for trace in (True, False):
        MARKS.clear()
        simulate(leave_marks, star(4, 1e3), device="meta", trace=trace)
        marks.append(list(MARKS))
    assert marks[0] == marks[1] and len(marks[0]) == 12


# ---- what goes wrong ------------------------------------------------------------------------------------------------------


def fewer_calls(comm: Communicator) -> None:
    all_reduce(comm, blank(comm, 80))
    if comm.rank != 2:
        all_reduce(comm, blank(comm, 80))


def a_barrier_too_early(comm: Communicator) -> None:
    all_reduce(comm, blank(comm, 80))
    if comm.rank == 1:
        comm.barrier()
    all_reduce(comm, blank(comm, 80))


def the_other_way_round(comm: Communicator) -> None:
    all_reduce(comm, blank(comm, 80))
    step = 1 if comm.rank else -1
    for _ in range(3):
        comm.sendrecv(blank(comm, 5), (comm.rank + step) % comm.size, blank(comm, 5), (comm.rank - step) % comm.size)


def in_a_group(comm: Communicator) -> None:
    half = comm.split(comm.rank // 2)
    assert half is not None
    for _ in range(3 - (comm.rank == 3)):
        all_reduce(half, blank(half, 80))


@pytest.mark.parametrize("program", [fewer_calls, a_barrier_too_early, the_other_way_round, in_a_group])
def test_a_standstill_is_explained_alike(program: Program) -> None:
    said = []
    for trace in (True, False):
        with pytest.raises(RankHung) as caught:
            simulate(program, star(4, 1e6, 1e-3), device="meta", trace=trace)
        said.append(str(caught.value))
    assert said[0] == said[1] and program.__name__ in said[0]


@pytest.mark.parametrize("longest", [1, 3, script.LONGEST])
def test_a_message_that_does_not_fit_is_an_error_of_its_rank(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Communicator) -> None:
        all_reduce(comm, blank(comm, 80))
        all_reduce(comm, blank(comm, 80 if comm.rank != 2 else 84))

    monkeypatch.setattr(script, "LONGEST", longest)
    for trace in (True, False):
        with pytest.raises(Mismatch, match=r"the (sender|receiver) (sends|expects) float32\[2[01]\]") as caught:
            simulate(work, star(4, 1e6, 1e-3), device="meta", trace=trace)
        (note,) = caught.value.__notes__
        assert note.endswith("at 0.01248 s of virtual time")  # after 6 steps of 2 ms and 20 floats
        lines = [str(entry.statement).strip() for entry in caught.traceback if entry.name == "work"]
        assert lines == ["all_reduce(comm, blank(comm, 80 if comm.rank != 2 else 84))"]


def test_equal_bytes_of_another_dtype_do_not_fit() -> None:
    def work(comm: Communicator) -> None:
        all_reduce(comm, blank(comm, 80))
        all_reduce(comm, blank(comm, 80) if comm.rank != 2 else blank(comm, 40).double())

    for trace in (True, False):
        with pytest.raises(Mismatch, match=r"float64\[10\]"):
            simulate(work, star(4, 1e6), device="meta", trace=trace)


def test_a_mismatch_that_is_caught_leaves_the_other_rank_waiting() -> None:
    def work(comm: Communicator) -> tuple[str, float]:
        all_reduce(comm, blank(comm, 8))
        try:
            all_reduce(comm, blank(comm, 8 if comm.rank else 16))
        except Mismatch:
            return "mismatch", comm.now()
        return "fine", comm.now()

    for trace in (True, False):
        with pytest.raises(RankHung, match="has returned"):  # and the other one waits for a message that never comes
            simulate(work, star(2, 1e6), device="meta", trace=trace)


def test_an_error_within_a_collective_comes_when_its_time_has_come() -> None:
    def work(comm: Communicator) -> None:
        with comm.inside("ours"):
            for step in range(4):
                comm.sendrecv(blank(comm, 250), (comm.rank + 1) % comm.size, blank(comm, 250), (comm.rank - 1) % comm.size)
                if comm.rank == 1 and step == 2:
                    raise LookupError("in the middle")

    for trace in (True, False):
        with pytest.raises(LookupError, match="in the middle") as caught:
            simulate(work, star(3, 1e6), device="meta", trace=trace)
        assert caught.value.__notes__ == ["raised by rank 1 of 3, at 0.003 s of virtual time"]


def test_a_script_in_a_hook_is_played_while_the_backward_pass_waits(played: list[int]) -> None:
    def work(comm: Communicator) -> list[float]:
        seen = []
        x = torch.ones(12, device=comm.device, requires_grad=True)

        def hook(gradient: torch.Tensor) -> None:
            comm.sleep(comm.rank)
            all_reduce(comm, gradient)
            seen.append(comm.now())

        x.register_hook(hook)
        for _ in range(2):
            (2 * x).sum().backward()
        return seen

    one, two = (simulate(work, star(3, 1e3), device="meta", trace=trace) for trace in (True, False))
    assert list(one) == list(two) and len(played) >= 3
