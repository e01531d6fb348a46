"""A gallery of programs that hang: both worlds say the same of them, the simulator at once, the real one in time.

Under each program stands what the explainer must say: each rank with what it waits for, and its line (marked `# 0:`,
`# 1:` in the program by the rank that stops there); then the circle of waits, if there is one, and a hint.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import d2lps
from d2lps import Communicator, Deadlock, RankHung
from d2lps.collectives import all_reduce, broadcast
from d2lps.comm.status import IN_VAIN, Status
from d2lps.launch.failure import Failure
from d2lps.launch.group import Group
from d2lps.simulator import Model, simulate
from d2lps.topology import star

Program = Callable[[Communicator], None]
World = Callable[[Program, int], RankHung]
TEN = torch.zeros(10)  # 40 bytes


def in_the_simulator(program: Program, ranks: int) -> RankHung:
    start = time.monotonic()
    with pytest.raises(RankHung) as caught:
        simulate(program, star(ranks, 1e9, 1e-6))
    assert time.monotonic() - start < 1.0  # without a timeout
    assert "s of virtual time nothing can happen any more" in str(caught.value)
    return caught.value


def on_real_processes(program: Program, ranks: int) -> RankHung:
    start = time.monotonic()
    with pytest.raises(RankHung) as caught:
        d2lps.run(program, ranks, timeout=1)
    waited = time.monotonic() - start
    assert waited >= 1.0 or "waits for one that has returned" in str(caught.value)  # which nobody need wait for
    return caught.value


@pytest.fixture(params=[in_the_simulator, on_real_processes], ids=["simulated", "real"])
def world(request: pytest.FixtureRequest) -> World:
    return request.param


def lines_of(program: Program) -> dict[int, str]:
    """`{0: "line 7: comm.send(...)"}`: where the marks of a program's source say that its ranks stop."""
    source, first = inspect.getsourcelines(program)
    found = {}
    for number, line in enumerate(source, first):
        if marked := re.search(r"# ((?:\d[ ,]*)+):", line):
            shown = line.strip()
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            found |= {int(rank): f"line {number}: {shown}" for rank in re.findall(r"\d", marked[1])}
    return found


def check(error: RankHung, program: Program, said: Sequence[str], circle: Sequence[int] = (), hint: str = "") -> None:
    """`said[r]` is what must be said of rank r; its line is looked up in the program."""
    text, places = str(error), lines_of(program)
    for rank, words in enumerate(said):
        where = f" (in {program.__name__}, {places[rank]})" if rank in places else ""
        assert f"  rank {rank} {words}{where}\n" in text + "\n", f"not said of rank {rank}: {words}{where}\n{text}"
    assert isinstance(error, Deadlock) == bool(circle), text
    named = [int(rank) for rank in re.findall(r"rank (\d+)", text.partition(", each waits for the next")[0])] if circle else []
    turned = [[*circle[k:], *circle[:k], circle[k]] for k in range(len(circle))]  # it may be told from any of its ranks
    assert not circle or named in turned, text
    assert hint in text


# ---- the gallery --------------------------------------------------------------------------------------------------------


def two_send_first(comm: Communicator) -> None:
    comm.send(TEN, 1 - comm.rank)  # 0, 1:
    comm.recv(TEN, 1 - comm.rank)


def test_two_ranks_send_first(world: World) -> None:
    said = [f"waits for rank {1 - rank} to receive 40 B, tag 0" for rank in range(2)]
    check(world(two_send_first, 2), two_send_first, said, circle=[0, 1])


def all_send_first(comm: Communicator) -> None:
    comm.send(TEN, (comm.rank + 1) % comm.size)  # 0, 1, 2, 3:
    comm.recv(TEN, (comm.rank - 1) % comm.size)


def test_a_ring_in_which_all_send_first(world: World) -> None:
    said = [f"waits for rank {(rank + 1) % 4} to receive 40 B, tag 0" for rank in range(4)]
    check(world(all_send_first, 4), all_send_first, said, circle=[0, 1, 2, 3])


def all_receive_first(comm: Communicator) -> None:
    comm.recv(TEN, (comm.rank - 1) % comm.size)  # 0, 1, 2:
    comm.send(TEN, (comm.rank + 1) % comm.size)


def test_a_ring_in_which_all_receive_first(world: World) -> None:
    said = [f"waits for rank {(rank - 1) % 3} to send 40 B, tag 0" for rank in range(3)]
    check(world(all_receive_first, 3), all_receive_first, said, circle=[2, 1, 0])


def other_tags(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(TEN, 1, tag=7)  # 0:
    else:
        comm.recv(TEN, 0, tag=8)  # 1:


def test_tags_that_do_not_match(world: World) -> None:
    said = ["waits for rank 1 to receive 40 B, tag 7", "waits for rank 0 to send 40 B, tag 8"]
    hint = "rank 0 sends with tag 7, rank 1 receives with tag 8: they never meet"
    check(world(other_tags, 2), other_tags, said, circle=[0, 1], hint=hint)


def only_some_call(comm: Communicator) -> None:
    if comm.rank != 2:
        broadcast(comm, TEN, src=2, algorithm="flat")  # 0, 1:


def test_a_collective_that_only_some_ranks_call(world: World) -> None:
    said = ["waits for rank 2 to send 40 B, tag 0 in broadcast"] * 2 + ["has returned"]
    check(world(only_some_call, 3), only_some_call, said)


def other_collectives(comm: Communicator) -> None:
    if comm.rank == 0:
        all_reduce(comm, TEN, algorithm="flat")  # 0:
    else:
        broadcast(comm, TEN, src=0, algorithm="flat")
        comm.barrier()  # 1:


def test_two_collectives_that_are_not_the_same(world: World) -> None:
    # Rank 0 first gathers what the others have; rank 1 waits to be told what rank 0 has.
    said = ["waits for rank 1 to send 40 B, tag 0 in all_reduce", "waits for rank 0 to send 40 B, tag 0 in broadcast"]
    error = world(other_collectives, 2)
    hint = "rank 0 is in all_reduce, rank 1 in broadcast: all ranks must call the same"
    assert all(words in str(error) for words in [*said, hint]) and "line " in str(error)
    assert "deadlock: rank" in str(error) and isinstance(error, Deadlock)


def other_roots(comm: Communicator) -> None:
    broadcast(comm, TEN, src=comm.rank, algorithm="flat")  # 0, 1, 2:


def test_every_rank_takes_itself_for_the_root(world: World) -> None:
    said = [f"waits for rank {peer} to receive 40 B, tag 0 in broadcast" for peer in (1, 0, 0)]
    check(world(other_roots, 3), other_roots, said, circle=[0, 1])


def nobody_is_the_root(comm: Communicator) -> None:
    broadcast(comm, TEN, src=(comm.rank + 1) % comm.size, algorithm="flat")  # 0, 1:


def test_every_rank_takes_another_one_for_the_root(world: World) -> None:
    said = [f"waits for rank {1 - rank} to send 40 B, tag 0 in broadcast" for rank in range(2)]
    check(world(nobody_is_the_root, 2), nobody_is_the_root, said, circle=[0, 1])


def from_one_who_is_gone(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.recv(TEN, 0)  # 1:


def test_a_receive_from_a_rank_that_has_returned(world: World) -> None:
    check(world(from_one_who_is_gone, 2), from_one_who_is_gone, ["has returned", "waits for rank 0 to send 40 B, tag 0"])


def round_the_wrong_way(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.sendrecv(TEN, right, torch.empty(10), right)  # 0, 1, 2:
    comm.sendrecv(TEN, left, torch.empty(10), left)


def test_a_ring_that_receives_from_where_it_sends(world: World) -> None:
    said = [f"waits for rank {(rank + 1) % 3} to send 40 B, tag 0" for rank in range(3)]
    check(world(round_the_wrong_way, 3), round_the_wrong_way, said, circle=[0, 1, 2])


def barrier_against_message(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(TEN, 1)  # 0:
    comm.barrier()  # 1:
    if comm.rank == 1:
        comm.recv(TEN, 0)


def test_a_barrier_on_one_side_and_a_message_on_the_other(world: World) -> None:
    said = ["waits for rank 1 to receive 40 B, tag 0", "waits at a barrier"]
    check(world(barrier_against_message, 2), barrier_against_message, said, circle=[0, 1])


def stuck_behind_a_circle(comm: Communicator) -> None:
    if comm.rank == 2:
        comm.recv(TEN, 0)  # 2:
    else:
        comm.recv(TEN, 1 - comm.rank)  # 0, 1:
        comm.send(TEN, 2)


def test_a_rank_that_waits_for_a_circle_is_not_part_of_it(world: World) -> None:
    said = [f"waits for rank {peer} to send 40 B, tag 0" for peer in (1, 0, 0)]
    check(world(stuck_behind_a_circle, 3), stuck_behind_a_circle, said, circle=[0, 1])


def one_side_of_a_split(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.split(color=0)  # 0:
    else:
        comm.barrier()  # 1:


def test_a_split_that_only_one_rank_calls(world: World) -> None:
    said = ["waits for the others to call split", "waits at a barrier"]
    check(world(one_side_of_a_split, 2), one_side_of_a_split, said, circle=[0, 1])


def in_a_group_of_their_own(comm: Communicator) -> None:
    group = comm.split(color=comm.rank % 2)
    assert group is not None
    group.recv(TEN, 1 - group.rank)  # 0, 1, 2, 3:


def test_ranks_of_a_group_are_told_by_their_number_in_the_run(world: World) -> None:
    said = [f"waits for rank {(rank + 2) % 4} to send 40 B, tag 0" for rank in range(4)]
    error = world(in_a_group_of_their_own, 4)
    circle = [0, 2] if "rank 0 -> rank 2" in str(error) or "rank 2 -> rank 0" in str(error) else [1, 3]
    check(error, in_a_group_of_their_own, said, circle=circle)


# ---- in groups ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["gloo", "shm"] if sys.platform == "linux" else ["gloo"])
def real(request: pytest.FixtureRequest) -> World:
    """A world of processes, by each transport that needs no GPU."""

    def program_on(program: Program, ranks: int) -> RankHung:
        with pytest.raises(RankHung) as caught:
            d2lps.run(program, ranks, timeout=1, backend=request.param)
        return caught.value

    return program_on


def barriers_in_a_circle(comm: Communicator) -> None:
    """Rank r is in the groups (r, r + 1) and (r - 1, r), and all come first to that with their right neighbors."""
    pairs = [comm.split(0 if comm.rank in (k, (k + 1) % 4) else None) for k in range(4)]
    pair = pairs[comm.rank]
    assert pair is not None
    pair.barrier()  # 0, 1, 2, 3:


def test_barriers_of_groups_in_a_circle(real: World) -> None:
    said = [f"waits at a barrier of ranks {pair}" for pair in ("0, 1", "1, 2", "2, 3", "0, 3")]
    check(real(barriers_in_a_circle, 4), barriers_in_a_circle, said, circle=[0, 1, 2, 3])


def other_collectives_in_a_group(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2)
    assert group is not None
    if comm.rank == 1:
        all_reduce(group, TEN, algorithm="flat")  # 1:
    elif comm.rank == 3:
        broadcast(group, TEN, src=0, algorithm="flat")
        group.barrier()  # 3:


def test_two_collectives_of_a_group_that_are_not_the_same(real: World) -> None:
    error = real(other_collectives_in_a_group, 4)
    assert "  rank 1 waits for rank 3 to send 40 B, tag 0 in all_reduce (in other_collectives_in_a_group, line" in str(error)
    assert "  rank 1 is in all_reduce, rank 3 in broadcast: all ranks must call the same" in str(error)
    assert isinstance(error, Deadlock)


def a_group_and_the_world(comm: Communicator) -> None:
    group = comm.split(0 if comm.rank in (1, 2) else None)
    if comm.rank == 1:
        comm.send(TEN, 2)  # 1:
    if comm.rank == 2:
        assert group is not None
        group.recv(TEN, 0)  # 2:


def test_messages_of_a_group_and_of_the_world_never_meet(real: World) -> None:
    said = ["has returned", "waits for rank 2 to receive 40 B, tag 0", "waits for rank 1 to send 40 B, tag 0"]
    hint = "ranks 1 and 2 use different communicators: their messages never meet"
    check(real(a_group_and_the_world, 3), a_group_and_the_world, said, circle=[1, 2], hint=hint)


# ---- what only the simulator can tell ----------------------------------------------------------------------------------


def test_a_program_that_deadlocks_under_rendezvous_passes_when_messages_are_buffered() -> None:
    def exchange(comm: Communicator, elements: int) -> float:
        comm.send(torch.full((elements,), float(comm.rank)), 1 - comm.rank)
        comm.recv(into := torch.empty(elements), 1 - comm.rank)
        return into[-1].item()

    cluster, model = star(2, 1e9), Model(eager=4096)
    assert simulate(exchange, cluster, 1024, model=model) == [1.0, 0.0]
    with pytest.raises(Deadlock):  # until a message grows by one element
        simulate(exchange, cluster, 1025, model=model)
    with pytest.raises(Deadlock):
        simulate(exchange, cluster, 1024)


def test_the_time_of_the_standstill_is_told() -> None:
    def work(comm: Communicator) -> None:
        comm.sleep(0.25)
        comm.recv(TEN, 1 - comm.rank)

    with pytest.raises(Deadlock, match=r"at 0\.25 s of virtual time nothing can happen any more"):
        simulate(work, star(2, 1e9))


class Watched(Group):
    """Rank 0 waits in vain; rank 1 runs, and then does what is given: leaves a note, or an outcome."""

    def __init__(self, then: Callable[["Watched"], None]) -> None:
        self.job, self.pending, self.outcomes, self.dead = SimpleNamespace(timeout=1.0, ranks=3), {0: None, 1: None}, {}, {}
        self.board, self.notes, self.then = self, {0: Status(0, "recv", peer=2, since=IN_VAIN)}, then

    def read(self, rank: int) -> Status | None:
        return self.notes.get(rank)

    def collect(self, patience: float) -> None:
        if patience:
            self.then(self)

    def _hung(self, late: Mapping[int, Status]) -> RankHung:
        return RankHung(f"late: {sorted(late)}")


def test_a_moment_is_left_to_those_who_may_be_about_to_wait_in_vain() -> None:
    with pytest.raises(RankHung, match=r"late: \[0, 1\]"):
        Watched(lambda group: group.notes.update({1: Status(1, "recv", peer=2, since=IN_VAIN)})).check_waits()
    with pytest.raises(RankHung, match=r"late: \[0\]"):  # it runs on, and not all wait for that
        Watched(lambda group: time.sleep(0.05)).check_waits()


FAILED = Failure(0.0, b"", "ValueError: no", [])


@pytest.mark.parametrize("ends", [{"outcomes": {1: FAILED}}, {"dead": {1: 9}}], ids=["fails", "dies"])
def test_who_fails_in_that_moment_explains_more_than_who_waits(ends: dict[str, Any]) -> None:
    Watched(lambda group: vars(group).update(ends, pending={0: None})).check_waits()  # whoever watches raises that next
