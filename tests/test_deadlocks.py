"""A gallery of programs that hang: both worlds say the same of them, the simulator at once, the real one in time.

Under each program stands what the explainer must say: each rank with what it waits for, and its line (marked `# 0:`,
`# 1:` in the program by the rank that stops there); then the circle of waits, if there is one, and a hint.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    with pytest.raises(RankHung) as caught:
        simulate(program, star(ranks, 1e9, 1e-6))  # without a timeout
    assert "s of virtual time nothing can happen any more" in str(caught.value)
    return caught.value


def on_real_processes(backend: str, program: Program, ranks: int) -> RankHung:
    start = time.monotonic()
    with pytest.raises(RankHung) as caught:
        d2lps.run(program, ranks, timeout=1, backend=backend)
    waited = time.monotonic() - start
    assert waited >= 1.0 or "waits for one that has returned" in str(caught.value)  # which nobody need wait for
    return caught.value


# Processes by each transport that needs no GPU.
BACKENDS = ["shm", "gloo"] if sys.platform == "linux" else ["gloo"]
REAL = [partial(on_real_processes, backend) for backend in BACKENDS]


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


@dataclass
class Case:
    """A program, on so many ranks. said[r] is what must be said of rank r; its line is looked up in the program."""

    program: Program
    said: Sequence[str]
    circle: Sequence[int] = ()
    hint: str = ""

    def check(self, world: World) -> None:
        error = world(self.program, len(self.said))
        text, places, name = str(error), lines_of(self.program), self.program.__name__
        for rank, words in enumerate(self.said):
            where = f" (in {name}, {places[rank]})" if rank in places else ""
            assert f"  rank {rank} {words}{where}\n" in text + "\n", f"not said of rank {rank}: {words}{where}\n{text}"
        assert isinstance(error, Deadlock) == bool(self.circle), text
        named = [int(rank) for rank in re.findall(r"rank (\d+)", text.partition(", each waits for the next")[0])]
        turned = [[*self.circle[k:], *self.circle[:k], self.circle[k]] for k in range(len(self.circle))]  # from any of its ranks
        assert not self.circle or named in turned, text
        assert self.hint in text


# ---- the gallery --------------------------------------------------------------------------------------------------------


def two_send_first(comm: Communicator) -> None:
    comm.send(TEN, 1 - comm.rank)  # 0, 1:
    comm.recv(TEN, 1 - comm.rank)


def three_receive_first(comm: Communicator) -> None:
    if comm.rank < 3:
        comm.recv(TEN, (comm.rank - 1) % 3)  # 0, 1, 2:
    comm.barrier()  # 3:


def other_tags(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(TEN, 1, tag=7)  # 0:
    else:
        comm.recv(TEN, 0, tag=8)  # 1:


def only_some_call(comm: Communicator) -> None:
    if comm.rank != 2:
        broadcast(comm, TEN, src=2, algorithm="flat")  # 0, 1:


def other_collectives(comm: Communicator) -> None:
    if comm.rank == 0:  # first gathers what the others have; rank 1 waits to be told what rank 0 has
        all_reduce(comm, TEN, algorithm="flat")  # 0:
    else:
        broadcast(comm, TEN, src=0, algorithm="flat")  # 1:


def other_roots(comm: Communicator) -> None:
    broadcast(comm, TEN, src=comm.rank, algorithm="flat")  # 0, 1, 2:


def from_one_who_is_gone(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.recv(TEN, 0)  # 1:


def round_the_wrong_way(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.sendrecv(TEN, right, torch.empty(10), right)  # 0, 1, 2:
    comm.sendrecv(TEN, left, torch.empty(10), left)


def barrier_against_message(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(TEN, 1)  # 0:
    comm.barrier()  # 1:
    if comm.rank == 1:
        comm.recv(TEN, 0)


def stuck_behind_a_circle(comm: Communicator) -> None:
    if comm.rank == 2:
        comm.recv(TEN, 0)  # 2:
    else:
        comm.recv(TEN, 1 - comm.rank)  # 0, 1:
        comm.send(TEN, 2)


def one_side_of_a_split(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.split(color=0)  # 0:
    else:
        comm.barrier()  # 1:


def in_a_group_of_their_own(comm: Communicator) -> None:
    group = comm.split(color=comm.rank % 2)
    assert group is not None
    if comm.rank % 2 == 0:
        group.recv(TEN, 1 - group.rank)  # 0, 2:


def in_a_group_from_one_who_is_gone(comm: Communicator) -> None:
    group = comm.split(color=comm.rank % 2)
    if comm.rank == 3 and group is not None:
        group.recv(TEN, 0)  # 3:


def barriers_in_a_circle(comm: Communicator) -> None:
    """Rank r is in the groups (r, r + 1) and (r - 1, r), and all come first to that with their right neighbors."""
    pairs = [comm.split(0 if comm.rank in (k, (k + 1) % 4) else None) for k in range(4)]
    pair = pairs[comm.rank]
    assert pair is not None
    pair.barrier()  # 0, 1, 2, 3:


def other_collectives_in_a_group(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2)
    assert group is not None
    if comm.rank == 1:
        all_reduce(group, TEN, algorithm="flat")  # 1:
    elif comm.rank == 3:
        broadcast(group, TEN, src=0, algorithm="flat")  # 3:


def a_group_and_the_world(comm: Communicator) -> None:
    group = comm.split(0 if comm.rank in (1, 2) else None)
    if comm.rank == 1:
        comm.send(TEN, 2)  # 1:
    if comm.rank == 2:
        assert group is not None
        group.recv(TEN, 0)  # 2:


def sends(peer: int, call: str = "", tag: int = 0) -> str:
    return f"waits for rank {peer} to send 40 B, tag {tag}{call}"


def takes(peer: int, call: str = "", tag: int = 0) -> str:
    return f"waits for rank {peer} to receive 40 B, tag {tag}{call}"


GONE = "has returned"
CALLS = "all ranks must call the same"
GALLERY = [
    Case(two_send_first, [takes(1), takes(0)], [0, 1]),
    Case(three_receive_first, [sends(2), sends(0), sends(1), "waits at a barrier"], [2, 1, 0]),
    Case(
        other_tags, [takes(1, tag=7), sends(0, tag=8)], [0, 1],
        hint="rank 0 sends with tag 7, rank 1 receives with tag 8: they never meet",
    ),
    Case(only_some_call, [sends(2, " in broadcast"), sends(2, " in broadcast"), GONE]),
    Case(
        other_collectives, [sends(1, " in all_reduce"), sends(0, " in broadcast")], [0, 1],
        hint=f"rank 0 is in all_reduce, rank 1 in broadcast: {CALLS}",
    ),
    Case(other_roots, [takes(peer, " in broadcast") for peer in (1, 0, 0)], [0, 1]),
    Case(from_one_who_is_gone, [GONE, sends(0)]),
    Case(round_the_wrong_way, [sends(1), sends(2), sends(0)], [0, 1, 2]),
    Case(barrier_against_message, [takes(1), "waits at a barrier"], [0, 1]),
    Case(stuck_behind_a_circle, [sends(1), sends(0), sends(0)], [0, 1]),
    Case(one_side_of_a_split, ["waits for the others to call split", "waits at a barrier"], [0, 1]),
    Case(in_a_group_of_their_own, [sends(2), GONE, sends(0), GONE], [0, 2]),  # told by their numbers in the run
    Case(in_a_group_from_one_who_is_gone, [GONE, GONE, GONE, sends(1)]),
    Case(
        barriers_in_a_circle, [f"waits at a barrier of ranks {pair}" for pair in ("0, 1", "1, 2", "2, 3", "0, 3")], [0, 1, 2, 3]
    ),
    Case(
        other_collectives_in_a_group, [GONE, sends(3, " in all_reduce"), GONE, sends(1, " in broadcast")], [1, 3],
        hint=f"rank 1 is in all_reduce, rank 3 in broadcast: {CALLS}",
    ),
    Case(
        a_group_and_the_world, [GONE, takes(2), sends(1)], [1, 2],
        hint="ranks 1 and 2 use different communicators: their messages never meet",
    ),
]  # fmt: skip


@pytest.mark.parametrize("world", [in_the_simulator, *REAL], ids=["simulated", *BACKENDS])
@pytest.mark.parametrize("case", GALLERY, ids=lambda case: case.program.__name__)
def test_a_program_that_hangs_is_explained_in_every_world(case: Case, world: World) -> None:
    case.check(world)


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
