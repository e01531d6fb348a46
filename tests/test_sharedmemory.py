"""Ranks on shared memory: the same results as everywhere, less waiting, and nothing left when one of them dies.

What every world must do is tested in test_run.py, test_collectives.py and test_deadlocks.py; here is what only this one does.
D2LPS_SOAK=1 kills a thousand ranks.
"""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import errno
import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import environment, nothing_left, script
from oracles import ALGORITHMS, Call, complaints, ours, perform, rooms_for

import d2lps
from d2lps import Communicator, Mismatch, RankDied, RankHung, ReduceOp, sharedmemory
from d2lps.collectives import all_reduce, broadcast

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
run = functools.partial(d2lps.run, backend="shm", timeout=20)

SOAK = bool(os.environ.get("D2LPS_SOAK"))
RANKS = [1, 2, 3, 5, 8]
SIZES = [0, 1, 7, 1000, 16_384, 16_385, 100_003, 1_000_000, 1_100_003]  # elements: some fit into a slot, some are read
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.uint8, torch.int32, torch.int64]
OPS = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def given(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's input: the same in every run, and different from rank to rank."""
    numbers = torch.randint(-8, 9, (size,), generator=torch.Generator().manual_seed(100 * rank + size))
    return (numbers.abs() if dtype == torch.uint8 else numbers).to(dtype) / (3 if dtype.is_floating_point else 1)


def in_order(ranks: int, size: int, dtype: torch.dtype, kernel: Any = torch.add) -> torch.Tensor:
    """What ranks 0, 1, 2, ... add up to, in this order and rounded each time."""
    return functools.reduce(kernel, [given(rank, size, dtype) for rank in range(ranks)]).to(dtype)


# ---- all-reduce -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("place", ["shared", "ordinary", "mixed"])
def test_sums_are_those_of_the_ranks_in_order_to_the_bit(ranks: int, place: str) -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        results = []
        for size in SIZES:
            tensor = torch.empty(size) if place == "ordinary" else comm.empty(size)  # which all must call
            tensor = torch.empty(size) if place == "mixed" and comm.rank % 2 else tensor
            tensor.copy_(given(comm.rank, size))
            all_reduce(comm, tensor, algorithm="native")
            results.append(tensor.clone())
        return results

    for results in run(work, ranks):
        for size, result in zip(SIZES, results, strict=True):
            assert torch.equal(result, in_order(ranks, size, torch.float32)), size


@pytest.mark.parametrize("size", [33, 70_001])
@pytest.mark.parametrize("place", ["shared", "ordinary", "read"])
def test_every_dtype_and_operation(size: int, place: str) -> None:
    kernels = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}

    def calls() -> list[tuple[str, torch.dtype]]:
        return [(op, dtype) for op in kernels for dtype in DTYPES if not (dtype.is_complex and op in ("MIN", "MAX"))]

    def work(comm: Communicator) -> list[torch.Tensor]:
        results = []
        if place == "read":
            sharedmemory.all_reduce.BIG = 0
        for op, dtype in calls():
            tensor = comm.empty(size, dtype) if place == "shared" else torch.empty(size, dtype=dtype)
            tensor.copy_(given(comm.rank, size, dtype))
            all_reduce(comm, tensor, getattr(ReduceOp, op), algorithm="native")
            results.append(tensor.clone())
        return results

    for results in run(work, 3):
        for (op, dtype), result in zip(calls(), results, strict=True):
            assert torch.equal(result, in_order(3, size, dtype, kernels[op])), (op, dtype)


def refusing(comm: Communicator) -> None:
    """The kernel refuses rank 1, and no other."""
    if comm.rank == 1:

        def refuse(*_: Any) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        sharedmemory.all_reduce.read = refuse


def debarred(comm: Communicator) -> None:
    """Who has given up root's rights cannot be read any more, not even by processes of the same user."""
    os.setresgid(65_534, 65_534, 65_534)
    os.setresuid(65_534, 65_534, 65_534)


def pinned(comm: Communicator) -> None:
    """What a GPU's driver owns cannot be read by other processes."""
    torch.Tensor.is_pinned = lambda tensor: True
    sharedmemory.all_reduce.read = None  # not even tried


@pytest.mark.parametrize(
    "hinder, reason", [(refusing, "Operation not permitted"), (debarred, "Operation not permitted"), (pinned, None)]
)
def test_where_memory_cannot_be_read_a_copy_is_laid_out(hinder: Callable[[Communicator], None], reason: str | None) -> None:
    if hinder is debarred and os.getuid():
        pytest.skip("only root can become somebody else")

    def work(comm: Communicator) -> tuple[str | None, bool]:
        hinder(comm)
        good = True
        for size in (2_000_003, 5_000_000):  # pieces
            tensor = given(comm.rank, size)
            all_reduce(comm, tensor, algorithm="native")
            good &= torch.equal(tensor, in_order(comm.size, size, torch.float32))
        return comm.meeting.unreadable, good

    assert run(work, 3) == [(reason, True)] * 3


def test_big_tensors_are_read_where_they_lie() -> None:
    def work(comm: Communicator) -> tuple[str | None, int]:
        tensor = torch.ones(2_000_000)
        all_reduce(comm, tensor, algorithm="native")
        return comm.meeting.unreadable, sum(tensor.unique().tolist())

    for reason, total in run(work, 3):
        if reason:
            pytest.skip(f"not on this machine: {reason}")
        assert total == 3


def test_calls_that_do_not_fit_are_named_on_every_rank() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(Mismatch) as caught:
            all_reduce(comm, torch.ones(3 if comm.rank == 2 else 4), algorithm="native")
        comm.barrier()  # all is well afterwards
        return str(caught.value)

    said = "the ranks disagree: rank 2 calls all_reduce(float32[3], op=SUM); ranks 0, 1 call all_reduce(float32[4], op=SUM)"
    assert run(work, 3) == [said] * 3


def test_any_order_of_calls_in_any_groups() -> None:
    """Steps, slots and statements are used in turn: nothing that is read late may have been overwritten."""

    def work(comm: Communicator, seed: int) -> int:
        groups = [comm, comm.split(comm.rank % 2), comm.split(0, key=-comm.rank)]
        chance, errors = random.Random(seed), 0
        for _ in range(150):
            group, size = groups[chance.randrange(3)], chance.choice([1, 100, 20_000, 600_000, 1_200_000])
            shared, pause = chance.random() < 0.5, chance.randrange(4)
            tensor = (group.empty(size) if shared else torch.empty(size)).fill_(1.0 + comm.rank)
            if pause == comm.rank:
                time.sleep(0.001)
            all_reduce(group, tensor, algorithm=chance.choice(["native", "native", "ring"]))
            errors += not bool((tensor == sum(1.0 + member for member in group.members)).all())
            if chance.random() < 0.1:
                group.barrier()
        return errors

    assert run(work, 4, 1) == [0] * 4


# ---- the other collectives, on tensors in both kinds of memory ------------------------------------------------------


def on_shared(comm: Communicator, call: Call, mine: list[torch.Tensor], out: list[torch.Tensor]) -> None:
    """Makes the call on parts of one shared tensor, since all ranks must ask for as much."""
    sizes = [tensor.numel() for tensor in mine + out]
    shared = comm.empty(2 * comm.size * call.n, call.dtype)[: sum(sizes)].split(sizes)
    for place, tensor in zip(shared, mine + out, strict=True):
        place.copy_(tensor)
    ours(comm, call, [*shared[: len(mine)]], [*shared[len(mine) :]])
    for place, tensor in zip(shared, mine + out, strict=True):
        tensor.copy_(place)


@pytest.mark.parametrize(("ranks", "size"), [*product(RANKS, [5, 70_001]), (2, 400_000)])
def test_every_collective_on_shared_tensors(ranks: int, size: int) -> None:
    wanted = [Call(name, known[-1], dtype=torch.int64, root=ranks - 1, n=size) for name, known in ALGORITHMS.items()]
    wanted += [Call("all_reduce", "native", op, dtype, n=size) for op, dtype in (("AVG", torch.float32), ("BOR", torch.int64))]
    assert not complaints(wanted, run(perform, ranks, wanted, rooms_for(wanted, ranks), on_shared))


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_messages_of_every_size_crossing_one_another(shared: bool) -> None:
    sizes = [0, 1, 100, 1 << 18, (1 << 18) + 1, 3_000_000]  # bytes / 4: from nothing to many pieces

    def work(comm: Communicator) -> bool:
        other, good = 1 - comm.rank, True
        outgoing = [comm.empty(size) if shared else torch.empty(size) for size in sizes]
        rooms = [torch.full((size,), -1.0) for size in sizes]
        for number, tensor in enumerate(outgoing):
            tensor.copy_(torch.arange(tensor.numel()) + 10 * comm.rank + number)
        works = [comm.isend(tensor, other, tag=number) for number, tensor in enumerate(outgoing)]
        works += [comm.irecv(rooms[number], other, tag=number) for number in reversed(range(len(sizes)))]
        random.Random(comm.rank).shuffle(works)
        for transfer in works:
            transfer.wait()
        for number, room in enumerate(rooms):
            good &= torch.equal(room, torch.arange(room.numel()) + 10.0 * other + number)
        return good

    assert run(work, 2) == [True, True]


def test_more_messages_than_a_ring_holds() -> None:
    def work(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            works = [comm.isend(torch.tensor([float(i)]), 1) for i in range(100)]
            for transfer in works:
                transfer.wait()
            return []
        time.sleep(0.1)
        received = []
        for _ in range(100):
            comm.recv(into := torch.zeros(1), 0)
            received.append(into.item())
        return received

    assert run(work, 2)[1] == [float(i) for i in range(100)]


def test_a_shared_tensor_lives_until_it_is_taken_though_nobody_waits_for_its_send() -> None:
    size = 1_000_000

    def work(comm: Communicator) -> Any:
        def used() -> int:
            return os.fstat(comm.arena.space.descriptor).st_blocks * 512

        tensor, other = comm.empty(size).fill_(7.0 + comm.rank), comm.empty(size)
        if comm.rank == 0:
            comm.isend(tensor, 1)
            del tensor
            again = comm.arena.empty(size, torch.float32).fill_(-1.0)  # where the first lay, had it gone back
            comm.barrier()
            comm.recv(again, 1)
            return again[0].item(), used() < 18 * size  # its own is no more: four are left
        comm.barrier()
        comm.recv(other, 0)
        comm.send(tensor, 0)
        return bool((other == 7.0).all())

    assert run(work, 2) == [(8.0, True), True]


def test_a_send_completes_while_its_receiver_waits_for_something_else() -> None:
    def work(comm: Communicator) -> float:
        into = torch.zeros(1_000_000)
        if comm.rank == 0:
            arriving = comm.irecv(into, 1)
            comm.barrier()
            arriving.wait()
        else:
            comm.send(torch.ones(1_000_000), 0)  # in pieces, for which the receiver must come again and again
            comm.barrier()
        return into.sum().item()

    assert run(work, 2)[0] == 1_000_000.0


def test_messages_from_several_threads() -> None:
    def work(comm: Communicator) -> bool:
        def talk(tag: int) -> bool:
            good, other = True, 1 - comm.rank
            for k in range(50):
                size = [3, 300_000][k % 2]
                comm.sendrecv(torch.full((size,), float(100 * tag + k)), other, into := torch.zeros(size), other, tag)
                good &= bool((into == 100 * tag + k).all())
            return good

        with ThreadPoolExecutor(3) as pool:
            return all(pool.map(talk, range(3)))

    assert run(work, 2) == [True, True]


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_who_waits_does_not_burn_a_core() -> None:
    def work(comm: Communicator) -> float:
        comm.barrier()
        start = time.process_time()
        if comm.rank == 0:
            time.sleep(1.0)
        comm.barrier()
        return time.process_time() - start

    assert max(run(work, 6)) < 0.1


def test_a_rank_that_stays_away_from_the_worlds_own_all_reduce_is_told() -> None:
    def one_stays_away(comm: Communicator) -> None:
        if comm.rank:
            all_reduce(comm, torch.ones(100_000), algorithm="native")
        while comm.rank == 0:
            pass

    with pytest.raises(RankHung, match="rank 2 waits in the world's own all-reduce in all_reduce"):
        run(one_stays_away, 3, timeout=0.5)


# ---- deaths ---------------------------------------------------------------------------------------------------------


def unwatched(work: Callable[..., None], ranks: int, *args: Any) -> list[Any]:
    """The ranks as bare processes: no launcher ends them when one dies."""
    context, memory = multiprocessing.get_context("fork"), sharedmemory.create(ranks)
    processes = [context.Process(target=lambda r=r: work(sharedmemory.join(memory, ranks, r), *args)) for r in range(ranks)]
    for process in processes:
        process.start()
    os.close(memory)
    return processes


@pytest.mark.parametrize("seed", range(1_000 if SOAK else 6))
def test_a_rank_that_dies_somewhere_wakes_the_others(seed: int) -> None:
    said, ready = multiprocessing.get_context("fork").SimpleQueue(), multiprocessing.get_context("fork").Barrier(5)

    def work(comm: Communicator) -> None:
        torch.set_num_threads(1)
        ready.wait(20)
        try:
            for k in range(1_000_000):
                tensor = torch.ones([1, 5_000, 200_000, 5_000, 1_500_000, 200_000][k % 6])
                all_reduce(comm, tensor, algorithm=["native", "ring"][k % 2])
        except RankDied as error:
            said.put((comm.rank, str(error)))

    chance = random.Random(seed)
    victim, processes = chance.randrange(4), unwatched(work, 4)
    ready.wait(20)
    time.sleep(chance.uniform(0.01, 0.3))
    processes[victim].kill()
    others = {0, 1, 2, 3} - {victim}
    for rank in others:
        processes[rank].join(30)
    assert [processes[rank].exitcode for rank in others] == [0, 0, 0]  # nobody waits for ever
    wanted = {(rank, f"rank {victim} has died, while rank {rank} was waiting") for rank in others}
    assert {said.get() for _ in others} == wanted
    processes[victim].join()


def test_a_death_behind_a_rank_that_lives_is_noticed() -> None:
    said = multiprocessing.get_context("fork").SimpleQueue()

    def work(comm: Communicator) -> None:
        if comm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if comm.rank < 2:
                comm.split(0)  # where ranks 2 and 3 never come, the one because it waits for the other
            comm.recv(torch.zeros(1), 3)
        except RankDied:
            said.put(comm.rank)

    for process in unwatched(work, 4):
        process.join(3)
    assert sorted(said.get() for _ in range(3)) == [0, 1, 2]


# ---- leaving is not dying ---------------------------------------------------------------------------------------------


def ended(ranks: int, work: Callable[[Communicator], object]) -> list[str]:
    """What each bare process says at the end of `work`, "" if it says nothing."""
    said = multiprocessing.get_context("fork").SimpleQueue()

    def live(comm: Communicator) -> None:
        try:
            said.put((comm.rank, str(work(comm))))
        except RankDied as error:
            said.put((comm.rank, str(error)))

    processes = unwatched(live, ranks)
    for process in processes:
        process.join(20)
    words = dict(said.get() for _ in iter(said.empty, True))
    return [words.get(rank, "") for rank in range(ranks)]


@pytest.mark.parametrize("how", ["leaves", "exits", "is killed"])
def test_a_rank_that_is_gone_is_no_matter_for_those_who_do_not_wait_for_it(how: str) -> None:
    def work(comm: Communicator) -> float:
        if comm.rank == 2:
            comm.leave() if how == "leaves" else os._exit(0) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
            return 2.0
        time.sleep(0.3 * comm.rank)  # the other one waits for long, and looks for those who are gone
        comm.sendrecv(torch.tensor([float(comm.rank)]), 1 - comm.rank, into := torch.zeros(1), 1 - comm.rank)
        return into.item()

    assert ended(3, work) == ["1.0", "0.0", "2.0" if how == "leaves" else ""]


@pytest.mark.parametrize("late", range(4))
def test_a_rank_may_leave_as_soon_as_its_own_part_is_done(late: int) -> None:
    def work(comm: Communicator) -> float:
        tensor = torch.ones(1000)
        all_reduce(comm, tensor, algorithm="native")
        comm.barrier()
        time.sleep(0.3 * (comm.rank == late))
        broadcast(comm, tensor, src=(late + 1) % 4, algorithm="flat")
        comm.leave()
        return tensor.mean().item()

    assert ended(4, work) == ["4.0"] * 4


@pytest.mark.parametrize("waits", ["message", "meeting"])
def test_who_needs_one_that_has_left_is_told_so(waits: str) -> None:
    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            comm.leave()
            return "left"
        comm.recv(torch.zeros(1), 1) if waits == "message" else comm.barrier()
        return "never"

    assert ended(3, work) == ["rank 1 has left, while rank 0 was waiting", "left", "rank 1 has left, while rank 2 was waiting"]


LEAVING = """
    import os, sys, time
    import torch
    from d2lps import sharedmemory

    rank, how = int(sys.argv[1]), sys.argv[3]
    comm = sharedmemory.join(int(sys.argv[2]), 2, rank)
    if rank == 1:
        comm.send(torch.ones(1), 0)
        if os.fork() == 0:
            sys.exit()  # who is forked is not the rank
        if how == "raises":
            raise ValueError("on purpose")
        if how == "exits":
            sys.exit(0)
    else:
        comm.recv(into := torch.zeros(1), 1)
        print(into.item())
        try:
            comm.recv(into, 1)
        except RuntimeError as error:
            print(error)
"""


@pytest.mark.parametrize("how", ["returns", "exits", "raises"])
def test_a_process_that_ends_by_itself_has_left(how: str, tmp_path: Path) -> None:
    memory = sharedmemory.create(2)
    command = script(tmp_path / "leaving.py", LEAVING)
    start = functools.partial(subprocess.Popen, env=environment(), pass_fds=[memory], stdout=subprocess.PIPE, text=True)
    ranks = [start([*command, str(rank), str(memory), how], stderr=subprocess.DEVNULL) for rank in range(2)]
    os.close(memory)
    said, _ = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert said == "1.0\nrank 1 has left, while rank 0 was waiting\n"


@pytest.mark.parametrize("what", ["message", "meeting", "own group"])
def test_who_waits_for_a_rank_that_has_returned_is_told_at_once(what: str) -> None:
    def work(comm: Communicator) -> None:
        group = comm.split(0) if what == "own group" else comm
        assert group is not None
        if comm.rank:
            comm.recv(torch.zeros(1), 0) if what == "message" else group.barrier()

    with pytest.raises(RankHung, match=r"rank \d waits for one that has returned\n  rank 0 has returned\n") as caught:
        run(work, 3, timeout=1000)
    assert type(caught.value) is RankHung


@pytest.mark.parametrize("seed", range(3))
def test_a_run_in_which_a_rank_is_killed_says_so_and_leaves_nothing(seed: int, nothing_left: Any) -> None:
    victim = seed

    def work(comm: Communicator) -> None:
        if comm.rank == victim:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.05 + 0.07 * seed)
        shared = comm.empty(1_000_000)
        while True:
            all_reduce(comm, shared, algorithm="native")

    with pytest.raises(RankDied, match=f"rank {victim} of 3 was killed by SIGKILL"):
        run(work, 3, timeout=1000)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, 50_000, 2_000_000])
def test_sums_within_inference_mode_leave_those_outside_alone(elements: int) -> None:
    def work(comm: Communicator) -> list[float]:
        def added() -> float:
            tensor = torch.ones(elements)
            for _ in range(4):
                all_reduce(comm, tensor, algorithm="native")
            return tensor[-1].item()

        with torch.inference_mode():
            within = added()
        return [within, added()]

    assert d2lps.run(work, 2, backend="shm") == [[16.0, 16.0]] * 2


def test_thousands_of_calls_leave_no_memory_and_no_descriptors(nothing_left: Any) -> None:
    def used() -> tuple[int, int]:
        """Pages that this process has in shared memory, in KiB, and its descriptors."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]), len(os.listdir("/proc/self/fd"))

    def work(comm: Communicator) -> tuple[int, int]:
        def calls(number: int) -> None:
            for k in range(number):
                all_reduce(comm, comm.empty([10, 30_000][k % 2]).fill_(1.0), algorithm="native")
                all_reduce(comm, torch.ones(20_000 * (k % 2) + 10), algorithm=["native", "ring"][k % 2])
                if k % 20 == 0:
                    pair = comm.split(comm.rank % 2)
                    assert pair is not None
                    pair.barrier()

        calls(200)
        memory, descriptors = used()
        calls(10_000 if SOAK else 2_500)
        after = used()
        return after[0] - memory, after[1] - descriptors

    for grown, opened in run(work, 4):
        assert grown < 4_000 and opened == 0, (grown, opened)


def test_a_started_sum_leaves_no_memory_behind() -> None:
    """The copies that ordinary tensors are added up in are used again, whatever group asks for the next."""

    def work(comm: Communicator) -> int:
        for _ in range(20):
            comm.start(lambda beside: beside.native_all_reduce(torch.ones(40_000), ReduceOp.SUM)).wait()
        comm.barrier()
        return os.fstat(comm.arena.space.descriptor).st_blocks * 512

    assert max(run(work, 3)) < 20e6  # three copies of 4 MB, and where the groups met


def test_messages_that_have_met_leave_nothing_in_the_mailbox() -> None:
    """Whatever is started beside the rest has a group, and so places in the mailbox, of its own."""

    def work(comm: Communicator) -> int:
        for _ in range(20):
            comm.start(all_reduce, torch.ones(4)).wait()
        comm.barrier()
        return len(comm.mailbox._expected) + len(comm.mailbox._arrived)

    assert run(work, 3) == [0] * 3


def test_a_shared_tensor_goes_back_with_its_last_view() -> None:
    def work(comm: Communicator) -> list[int]:
        def taken() -> int:
            return os.fstat(comm.arena.space.descriptor).st_blocks * 512 // 1_000_000

        seen = [taken()]
        tensor = comm.empty(25_000_000)
        view = tensor.view(5_000, 5_000)[7:, 3:]
        comm.barrier()
        del tensor
        seen.append(taken())
        comm.barrier()
        del view
        comm.barrier()
        seen.append(taken())
        return seen

    before, with_tensors, after = run(work, 2)[0]
    assert with_tensors >= before + 200 and after == before


def test_too_little_memory_is_an_error_with_the_bytes() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(MemoryError) as caught:
            comm.empty(10**12)
        comm.barrier()
        return str(caught.value)

    for said in run(work, 2):
        assert said.startswith("8,000,000,000,000 bytes of shared memory are needed for 2 ranks; ")


def test_a_full_machine_is_an_error_before_the_crash() -> None:
    def work(comm: Communicator) -> str:
        def refuse(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = refuse
        with pytest.raises(MemoryError) as caught:
            comm.empty(1_000)
        return str(caught.value)

    assert run(work, 1) == ["4,096 bytes of shared memory are needed: No space left on device"]


def test_where_it_is_not_there_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="backend='shm' is not there: memfd_create and futex are Linux's, and this is darwin"):
        run(lambda comm: None, 2)
