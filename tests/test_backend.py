"""The PyTorch backend: every call of torch.distributed gives what it gives on gloo, and a failure is told to all."""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import functools
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from launching import environment, nothing_left, output_of, script, until
from oracles import ALGORITHMS, ALL_REDUCE, REDUCING, TORCH, Call, complaints, perform, rooms_for, torchs

import d2lps
import d2lps.backend
from d2lps import Communicator, RankHung, ReduceOp
from d2lps.backend import choice, transports
from d2lps.backend.tasks import TaskQueue
from d2lps.sharedmemory.space import Space
from d2lps.topology import star

TRANSPORTS = ["shm", "gloo"] if sys.platform == "linux" else ["gloo"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8]
Function = Callable[..., Any]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """By which of them messages go."""
    return str(request.param)


def job(function: Function, ranks: int, *args: Any, transport: str = "auto", timeout: float = 20.0) -> list[Any]:
    """`function(comm, *args)` on every rank of a run, in which ours is torch's default group."""
    return d2lps.run(_inside, ranks, function, transport, timeout, args, timeout=60).results


def _inside(comm: Communicator, function: Function, transport: str, timeout: float, args: tuple[Any, ...]) -> Any:
    d2lps.backend.use(transport=transport)
    os.environ.update(GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo")
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=timeout)
    store = d2lps.backend.processgroup.store_of(comm)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("d2lps", store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    try:
        return function(comm, *args)
    finally:
        dist.destroy_process_group()


# ---- every call against numpy, or gloo --------------------------------------------------------------------------------


def calls(ranks: int) -> list[Call]:
    """Every collective, of every dtype, and where something is added up by every op."""
    moved = [("SUM", dtype, 7) for dtype in DTYPES] + [("SUM", torch.float32, 1), ("SUM", torch.float32, 40_001)]
    summed = moved + [(op, dtype, 7) for op in ("PRODUCT", "MIN", "MAX") for dtype in DTYPES]
    return [
        Call(name, "", op, dtype, root=ranks - 1, n=n)
        for name in ALGORITHMS
        for op, dtype, n in (summed if name in REDUCING else moved)
    ]


def given(rank: int, size: int, dtype: torch.dtype, of: int = 0) -> torch.Tensor:
    """Small whole numbers, of which no sum is rounded: the same result in whatever order they are added."""
    return (torch.arange(size) * (rank + 2) + rank + of).remainder(5).to(dtype)


def all_to_all(group: Any, rank: int, ranks: int, n: int, dtype: torch.dtype, wait: Function) -> list[torch.Tensor]:
    """In one tensor: equal parts, and rows of which rank r sends r + k + 1 to rank k."""
    equal = torch.zeros(n * ranks, dtype=dtype)
    wait(dist.all_to_all_single(equal, given(rank, n * ranks, dtype), group=group, async_op=True))
    sizes = [rank + other + 1 for other in range(ranks)]
    uneven = torch.zeros(sum(sizes), 3, dtype=dtype)
    rows = given(rank, 3 * sum(sizes), dtype).view(-1, 3)
    wait(dist.all_to_all_single(uneven, rows, sizes, sizes, group, async_op=True))
    return [equal, uneven]


def coalesced(group: Any, rank: int, ranks: int, n: int, dtype: torch.dtype, wait: Function) -> list[torch.Tensor]:
    tensors = [given(rank, size, dtype) for size in (n, 1, 2 * n)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    wait(manager)
    return tensors


def messages(group: Any, rank: int, ranks: int, n: int, dtype: torch.dtype, wait: Function) -> list[torch.Tensor]:
    """Round a ring, two at once, received in the other order; beside a collective that goes on meanwhile."""
    if ranks == 1:
        return []
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    total = given(rank, n, dtype)
    summing = dist.all_reduce(total, group=group, async_op=True)
    works = [dist.isend(given(rank, n, dtype, tag), group=group, tag=tag, group_dst=right) for tag in (5, 0)]
    room = [torch.zeros(n, dtype=dtype) for _ in range(2)]
    works += [dist.irecv(into, group=group, tag=tag, group_src=left) for into, tag in zip(room, (0, 5), strict=True)]
    for work in [*reversed(works), summing]:
        wait(work)
    return [*room, total]


CALLS: list[Function] = [all_to_all, coalesced, messages]


def finish(work: Any) -> None:
    assert work.wait() in (True, None)


def finish_future(work: Any) -> None:
    """As hooks do it: the future's value is what the call has written to."""
    try:
        work.get_future().wait()
    except (AttributeError, NotImplementedError):
        work.wait()


def perform_all(comm: Communicator, members: list[list[int]], wait: Function) -> list[Any]:
    """In each of these groups: what came of all calls, and what differs from gloo; None where this rank is no member."""
    found: list[Any] = []
    for ranks in members:
        ours, gloo = dist.new_group(ranks, backend="d2lps"), dist.new_group(ranks, backend="gloo")
        part = comm.split(0 if comm.rank in ranks else None)
        if part is None:
            found.append(None)
            continue
        wanted, different = calls(part.size), []
        outcomes = perform(part, wanted, rooms_for(wanted, part.size), functools.partial(torchs, group=ours, wait=wait))
        for call in CALLS:
            for n, dtype in [*((7, dtype) for dtype in DTYPES), (1, torch.float32), (40_001, torch.float32)]:
                got = call(ours, part.rank, part.size, n, dtype, wait)
                expected = call(gloo, part.rank, part.size, n, dtype, lambda work: work.wait())
                if [each.tolist() for each in got] != [each.tolist() for each in expected]:
                    different.append(f"{call.__name__} {n} {dtype} {ranks}: {got} instead of {expected}")
        found.append((outcomes, different))
    comm.barrier()  # rank 0 has the store, at which a group without it may still be forming
    return found


@pytest.mark.parametrize(
    ("members", "wait"), [*(([[*range(ranks)]], finish) for ranks in (1, 2, 3, 5)), ([[0, 2, 3], [1, 2]], finish_future)]
)
def test_every_call_gives_what_it_should_in_every_group(members: list[list[int]], wait: Function, transport: str) -> None:
    found = job(perform_all, 1 + max(map(max, members)), members, wait, transport=transport)
    for number, ranks in enumerate(members):
        outcomes, different = zip(*(found[rank][number] for rank in ranks), strict=True)
        assert not complaints(calls(len(ranks)), outcomes)
        assert [*different] == [[]] * len(ranks)


# ---- what gloo has not ------------------------------------------------------------------------------------------------


def more(comm: Communicator) -> list[Any]:
    """Averages, sums of what is multiplied before, booleans, parts of different sizes, objects, complex numbers, columns."""
    rank, ranks = comm.rank, comm.size
    dist.all_reduce(mean := torch.tensor([float(rank)]), ReduceOp.AVG)
    dist.all_reduce(half := torch.tensor([float(rank)]), dist._make_nccl_premul_sum(0.5))
    dist.reduce(one_half := torch.tensor([float(rank)]), 1, dist._make_nccl_premul_sum(0.5))
    dist.reduce_scatter_tensor(part := torch.zeros(2), given(rank, 2 * ranks, torch.float32), ReduceOp.AVG)
    dist.all_reduce(either := torch.tensor([rank == 1, False, True]), ReduceOp.MAX)
    room = [torch.zeros(size + 1) for size in range(ranks)]
    dist.all_gather(room, torch.full((rank + 1,), float(rank)))
    dist.all_reduce(z := torch.tensor([1j * rank]))
    dist.all_reduce((square := torch.ones(2, 2))[:, 0])  # of which gloo adds up what lies side by side
    everything: list[Any] = [None] * ranks
    dist.all_gather_object(everything, {"rank": rank})
    dist.broadcast_object_list(said := ["a", 1] if rank == 0 else [None, None])
    dist.scatter_object_list(mine := [None], [f"for {each}" for each in range(ranks)] if rank == 0 else None)
    values = [
        mean.item(),
        half.item(),
        one_half.item(),
        part.tolist(),
        either.tolist(),
        [each.tolist() for each in room],
        z.item(),
        square.tolist(),
    ]
    return [*values, everything, said, mine]


def test_what_gloo_has_not(transport: str) -> None:
    inputs = torch.stack([given(rank, 6, torch.float32) for rank in range(3)]).mean(0).view(3, 2)
    for rank, values in enumerate(job(more, 3, transport=transport)):
        mean, half, one_half, part, either, room, z, square, everything, said, mine = values
        assert one_half == (1.5 if rank == 1 else rank)
        assert (mean, half, either, z, square) == (1.0, 1.5, [True, False, True], 3j, [[3.0, 1.0], [3.0, 1.0]])
        assert part == pytest.approx(inputs[rank].tolist())
        assert room == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        assert everything == [{"rank": each} for each in range(3)]
        assert (said, mine) == (["a", 1], [f"for {rank}"])


def into_a_column(comm: Communicator) -> list[list[float]]:
    """What a message has left in a column when its work first says that it is complete."""
    into = torch.zeros(3, 2)
    if comm.rank == 0:
        work = dist.irecv(into[:, 0], 1)
        assert work is not None
        while not work.is_completed():
            time.sleep(0.001)
        return into.tolist()
    dist.send(torch.tensor([1.0, 2.0, 3.0]), 0)
    return []


def test_what_has_come_is_there_when_the_work_is_completed(transport: str) -> None:
    assert job(into_a_column, 2, transport=transport)[0] == [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]


def misfits(comm: Communicator) -> list[str]:
    """What a work of a message that does not fit says: that it is completed, and then what is wrong."""
    work = (dist.irecv if comm.rank else dist.isend)(torch.zeros(3 + comm.rank), 1 - comm.rank)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    return [told(work.wait), told(lambda: dist.all_reduce(torch.ones(1)))]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_what_is_wrong_with_a_message_is_told_by_its_wait() -> None:
    for wait, later in job(misfits, 2, transport="shm"):
        assert wait.startswith("Mismatch: message from rank 0 to rank 1, tag 0: the sender sends float32[3]")
        assert later.startswith("RankFailed: all_reduce: this process group is of no more use since")


# ---- order ------------------------------------------------------------------------------------------------------------


def test_tasks_are_done_in_order_wherever_it_is() -> None:
    tasks, done = TaskQueue("test"), []

    def slow(number: int) -> None:
        time.sleep(0.001)
        done.append(number)

    for number in range(30):
        tasks.submit(functools.partial(slow, number), at_once=number % 3 == 0)
    tasks.stop()
    assert done == list(range(30))
    tasks.submit(functools.partial(slow, 30), at_once=True)
    assert done[-1] == 30


def in_two_groups(comm: Communicator) -> list[float]:
    """Ranks that call on two groups in different orders: what is asynchronous of one does not hold up the other."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((1000,), float(comm.rank)) for _ in groups]
    works = {}
    for number in (0, 1) if comm.rank % 2 else (1, 0):
        works[number] = [dist.all_reduce(tensors[number], group=groups[number], async_op=True) for _ in range(20)]
    for work in [*works[0], *works[1]]:
        work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_groups_do_not_wait_for_one_another(transport: str) -> None:
    expected = float(sum(range(3)) * 3**19)
    assert job(in_two_groups, 3, transport=transport) == [[pytest.approx(expected)] * 2] * 3


# ---- callbacks --------------------------------------------------------------------------------------------------------


def held_up(comm: Communicator, follow: Function) -> Any:
    """What `follow(future, later)` gives: an all-reduce's future, and another one asked for later. None ends before the call."""
    begin = threading.Event()

    def gated(comm: Communicator, tensor: torch.Tensor) -> None:
        begin.wait()
        d2lps.collectives.all_reduce(comm, tensor)

    d2lps.backend.use(all_reduce=gated)
    future = dist.all_reduce(torch.full((3,), 1.0 + comm.rank), async_op=True).get_future()
    later = dist.all_reduce(torch.full((5,), 10.0 + comm.rank), async_op=True)
    after = follow(future, later)
    begin.set()
    return after.wait()


def summed(value: float) -> torch.Tensor:
    dist.all_reduce(tensor := torch.tensor([value]))
    return tensor


def in_callbacks(comm: Communicator) -> list[list[float]]:
    """What callbacks found that wait for a new collective, for one by its future, and for one that was asked for after theirs."""

    def nested(future: Any, later: Any) -> Any:
        return future.then(lambda done: summed(done.value()[0][0].item()))

    def nested_future(future: Any, later: Any) -> Any:
        def again(done: Any) -> torch.Tensor:
            work = dist.all_reduce(tensor := done.value()[0].clone(), async_op=True)
            assert work.get_future().then(lambda done: done.value()[0] + 1).wait().tolist() == (tensor + 1).tolist()
            return tensor

        return future.then(again)

    def waited(future: Any, later: Any) -> Any:
        return future.then(lambda done: later.wait() and later.result()[0])

    def waited_future(future: Any, later: Any) -> Any:
        other = later.get_future()
        return future.then(lambda done: other.wait()[0])

    return [held_up(comm, follow).tolist() for follow in (nested, nested_future, waited, waited_future)]


def test_a_callback_may_wait_for_other_collectives(transport: str) -> None:
    expected = [[18.0], [18.0] * 3, [33.0] * 5, [33.0] * 5]
    assert job(in_callbacks, 3, transport=transport) == [expected] * 3


def in_their_order(comm: Communicator) -> list[float]:
    """Callbacks of several all-reduces that call others: the ranks' threads meet whichever of them are late."""
    totals = []
    for number in range(20):
        works = [dist.all_reduce(torch.full((100,), float(number + k)), async_op=True) for k in range(3)]
        if comm.rank == number % comm.size:
            works[-1].wait()  # on this rank the callbacks come when all is done
        futures = [work.get_future().then(lambda done: summed(done.value()[0][0].item())) for work in works]
        totals += [future.wait().item() for future in futures]
    return totals


def test_what_callbacks_call_has_one_order_on_all_ranks(transport: str) -> None:
    expected = [9.0 * (number + k) for number in range(20) for k in range(3)]
    assert job(in_their_order, 3, transport=transport) == [expected] * 3


def never_done(comm: Communicator) -> list[str]:
    """A callback that waits for what torch has no way to get done before it."""

    def follow(future: Any, later: Any) -> Any:
        chained = later.get_future().then(lambda done: done.value())
        return future.then(lambda done: chained.wait())

    return [told(lambda: held_up(comm, follow)), told(lambda: summed(1.0))]


def test_a_callback_that_waits_for_ever_ends_with_the_timeout(transport: str) -> None:
    for inside, after in job(never_done, 2, transport=transport, timeout=1.0):
        assert "this process group is of no more use since" in inside
        assert "a callback that follows all_reduce has done nothing for more than timeout=1 s" in inside
        assert after.startswith("RankFailed: all_reduce: this process group is of no more use since")


# ---- choosing ---------------------------------------------------------------------------------------------------------


def all_algorithms(comm: Communicator) -> list[list[float]]:
    results = []
    for name in [*ALL_REDUCE, my_sum, my_op, None]:
        d2lps.backend.use(all_reduce=name)
        dist.all_reduce(tensor := torch.arange(5.0) + comm.rank)
        dist.all_reduce(mean := torch.arange(5.0) + comm.rank, ReduceOp.AVG)
        dist.all_reduce(most := torch.arange(5.0) + comm.rank, ReduceOp.MAX)
        results.append(tensor.tolist() + mean.tolist() + most.tolist())
    d2lps.backend.use(broadcast="flat", all_gather="bruck", reduce_scatter="pairwise", all_to_all="direct")
    dist.all_gather_into_tensor(output := torch.zeros(3), torch.tensor([float(comm.rank)]))
    return [*results, output.tolist()]


def my_sum(comm: Communicator, tensor: torch.Tensor) -> None:
    """A reader's, who may take the tensor to be flat, and an op for a sum."""
    assert tensor.dim() == 1
    everyone = [torch.empty_like(tensor) for _ in range(comm.size)]
    d2lps.collectives.all_gather(comm, everyone, tensor.clone())
    tensor.copy_(sum(everyone))


def my_op(comm: Communicator, tensor: torch.Tensor, op: ReduceOp) -> None:
    d2lps.collectives.all_reduce(comm, tensor, op, algorithm="tree")


def test_every_algorithm_and_the_readers_own(transport: str) -> None:
    expected = [3.0, 6.0, 9.0, 12.0, 15.0, 1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for results in job(all_algorithms, 3, transport=transport):
        assert results[:-1] == [expected] * 13
        assert results[-1] == [0.0, 1.0, 2.0]


def test_what_cannot_be_chosen_is_named() -> None:
    with pytest.raises(TypeError, match="there is no collective 'all_sum'; choose from"):
        d2lps.backend.use(all_sum="ring")
    with pytest.raises(TypeError, match="only all_reduce takes a function"):
        d2lps.backend.use(broadcast=my_sum)
    with pytest.raises(ValueError, match="transport='mpi' is unknown"):
        d2lps.backend.use(transport="mpi")
    assert [choice.takes_op(each) for each in (my_sum, my_op, lambda c, t, chunks=2: None)] == [False, True, False]


# ---- errors -----------------------------------------------------------------------------------------------------------


def told(call: Function) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def coalesced_dtypes(whole: torch.Tensor) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(whole)
        dist.all_reduce(torch.ones(2))


def refused(comm: Communicator) -> list[str]:
    """What is wrong, or not there, on all ranks alike; afterwards the group is as good as before."""
    whole = torch.ones(4, dtype=torch.int64)

    def asynchronous() -> None:
        work = dist.all_reduce(whole, ReduceOp.AVG, async_op=True)
        work.get_future().wait()

    d2lps.backend.use(all_reduce="square")
    said = [told(lambda: dist.all_reduce(whole))]
    d2lps.backend.use(all_reduce=None)
    said += [told(lambda: dist.all_reduce(whole, ReduceOp.AVG)), told(asynchronous)]
    said += [told(lambda: dist.recv(whole)), told(lambda: dist.all_reduce(torch.ones(3, 3).to_sparse_csr()))]
    said += [told(lambda: dist.all_reduce(torch.ones(3, device="meta"))), told(lambda: dist.send(whole, comm.rank))]
    said += [told(lambda: dist.group.WORLD.split_group([0]))]
    said += [told(lambda: coalesced_dtypes(whole))]
    dist.all_reduce(whole)
    return [*said, str(whole.tolist())]


def test_what_is_not_supported_is_named_and_does_no_harm(transport: str) -> None:
    expected = [
        "ValueError: algorithm='square' is unknown: choose one of",
        "ValueError: op=AVG of torch.int64 tensors: an average of integers is not an integer",
        "ValueError: .*an average of integers is not an integer",
        "NotImplementedError: d2lps: recv from any source",
        "NotImplementedError: d2lps: all_reduce of a tensor of layout torch.sparse_csr",
        "NotImplementedError: d2lps: all_reduce of a tensor on meta",
        "ValueError: .*",
        "NotImplementedError: d2lps: split_group",
        "ValueError: all_reduce_coalesced: the tensors must all have one dtype, not torch.int64, torch.float32",
        re.escape("[2, 2, 2, 2]"),
    ]
    for said in job(refused, 2, transport=transport):
        for text, pattern in zip(said, expected, strict=True):
            assert re.match(pattern, text, re.DOTALL), text


def failing(comm: Communicator, how: str) -> list[Any]:
    """Rank 1 drops out of the third all-reduce, in one way or another; the others note what they heard."""

    def mine(comm: Communicator, tensor: torch.Tensor) -> None:
        d2lps.collectives.all_reduce(comm, tensor)
        if comm.rank == 1 and tensor[0] > 20:
            raise IndexError("on purpose")

    d2lps.backend.use(all_reduce=mine if how == "error" else "ring")
    tensor = torch.ones(100)
    try:
        for number in range(4):
            if comm.rank == 1 and number == 2 and how == "late":
                time.sleep(2.5)
            dist.all_reduce(tensor, async_op=True).wait()
    except Exception as error:
        again = told(lambda: dist.all_reduce(tensor))
        return [type(error).__name__, str(error), again]
    return []


def test_an_error_on_one_rank_is_felt_by_all(transport: str) -> None:
    zero, one, two = job(failing, 3, "error", transport=transport)
    assert one[:2] == ["IndexError", "on purpose"]
    for kind, text, again in (zero, two):  # not RankHung: long before the timeout
        assert kind == "RankFailed" and "all_reduce of ranks [0, 1, 2]" in text, text
        assert again.startswith("RankFailed: all_reduce: this process group is of no more use since")


def after_a_refusal(comm: Communicator) -> list[float]:
    """What comes of a message, and of arguments by name, after another message was refused on rank 0."""
    if comm.rank == 0:
        free, Space.free = Space.free, lambda self, most: 0  # the machine is full for a moment
        try:
            with pytest.raises(MemoryError):
                dist.isend(torch.ones(400_000), 1)
        finally:
            Space.free = free
    tensor, both, group = torch.full((1,), 5.0 + comm.rank), torch.zeros(2), dist.group.WORLD
    (dist.recv if comm.rank else dist.send)(tensor, 1 - comm.rank)
    group._allgather_base(output=both, input=tensor + comm.rank).wait()  # type: ignore[union-attr]
    return both.tolist()


def whole(comm: Communicator) -> torch.Tensor:
    return torch.full((6,), float(comm.rank))


def rooms(comm: Communicator) -> list[torch.Tensor]:
    return list(torch.zeros(3, 2))


def mine(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.sendrecv(tensor, 1 - comm.rank, tensor, 1 - comm.rank)


# By torch's names, of 3 ranks on those that see it.
REFUSED: dict[str, Callable[[Communicator], Any]] = {
    "tensor_list[0], float32[2], and tensor_list[1]": lambda comm: dist.all_gather([x := torch.zeros(2), x, x], x.clone()),
    "gather_list[0], float32[2], and gather_list[2]": lambda comm: (
        dist.gather(torch.ones(2), [x := torch.zeros(2), x.clone(), x]) if comm.rank == 0 else None
    ),
    "tensor, float32[2], and scatter_list[2]": lambda comm: (
        dist.scatter((x := rooms(comm))[2], x) if comm.rank == 0 else None
    ),
    "output_tensor_list[1], float32[2], and input_tensor_list[1]": lambda comm: (
        dist.all_to_all(x := rooms(comm), x) if comm.rank == 0 else None
    ),
    "output, float32[6], and input, float32[6]": lambda comm: dist.all_to_all_single(x := whole(comm), x),
    "output, float32[6], and input, float32[3, 2]": lambda comm: dist.all_to_all_single(x := whole(comm), x.view(3, 2)),
    "output_tensor, float32[6], and input_tensor, float32[2]": lambda comm: (
        dist.all_gather_into_tensor(x := whole(comm), x[1:3])
    ),
    "output, float32[2], and input_list[0], float32[2]": lambda comm: (
        dist.reduce_scatter((x := whole(comm))[1:3], list(x.split(2)))
    ),
    "output, float32[2], and input, float32[6]": lambda comm: dist.reduce_scatter_tensor((x := whole(comm))[1:3], x),
    "tensors[0], float32[6], and tensors[1], float32[2]": lambda comm: (
        dist.group.WORLD.allreduce_coalesced([x := whole(comm), x[:2]]).wait()  # type: ignore[union-attr]
    ),
    "of shape [3] was expanded": lambda comm: dist.broadcast(torch.zeros(1).expand(3), 0),
    "op=SUM of torch.uint16 tensors": lambda comm: dist.all_reduce(torch.ones(2).to(torch.uint16)),
    "op=SUM of torch.bool tensors": lambda comm: dist.reduce(torch.ones(2) > 0, 1),
    "op=MIN of torch.float8_e5m2 tensors": lambda comm: (
        dist.reduce_scatter_tensor(*(torch.ones(n).to(torch.float8_e5m2) for n in (2, 6)), op=dist.ReduceOp.MIN)
    ),
}


def refused_memory(comm: Communicator) -> tuple[list[str], list[float], list[float]]:
    """What each is answered with; then an all-gather and a reduce-scatter in place, which are right."""
    answers = [told(functools.partial(call, comm)) for call in REFUSED.values()]
    x, y = whole(comm), whole(comm)
    dist.all_gather_into_tensor(x, x[2 * comm.rank :][:2])
    dist.reduce_scatter_tensor(y[2 * comm.rank :][:2], y)
    return answers, x.tolist(), y[2 * comm.rank :][:2].tolist()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_memory_that_meets_and_sums_that_are_none_are_refused_and_the_group_goes_on(transport: str) -> None:
    found = job(refused_memory, 3, transport=transport)
    assert [there[1:] for there in found] == [([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [3.0, 3.0])] * 3
    for words, answers in zip(REFUSED, zip(*(answers for answers, *_ in found), strict=True), strict=True):
        heard = [answer for answer in answers if answer != "nothing"]
        assert heard and all(answer.startswith("ValueError: ") and words in answer for answer in heard), (words, answers)


def by_ones_own(comm: Communicator) -> str:
    """A function that all-reduces is looked at as every other: it isn't the library's."""
    d2lps.backend.use(all_reduce=mine)
    return told(lambda: dist.all_reduce(torch.ones(4)))


def test_a_function_of_ones_own_may_not_receive_into_what_it_sends() -> None:
    assert all(said.startswith("ValueError: into, float32[4], and tensor, float32[4], share") for said in job(by_ones_own, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_what_is_refused_before_it_is_sent_harms_no_group() -> None:
    assert job(after_a_refusal, 2) == [[5.0, 6.0]] * 2


def test_a_wait_ends_after_the_groups_timeout(transport: str) -> None:
    zero, _, two = job(failing, 3, "late", transport=transport, timeout=1.0)
    assert {zero[0], two[0]} <= {"RankHung", "RankFailed"} and "RankHung" in (zero[0], two[0])


KILLED = """
    import os, sys
    import torch, torch.distributed as dist
    import d2lps.backend
    from d2lps import RankDied, RankFailed
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("d2lps", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    tensor = torch.ones(1000)
    try:
        for number in range(100):
            if rank == 2 and number == 20:
                os.kill(os.getpid(), 9)
            dist.all_reduce(tensor)
    except (RankDied, RankFailed) as error:
        open(f"{folder}/heard.{rank}", "w").write(str(error))  # and not RankHung, after half an hour
    dist.destroy_process_group()
"""


# So a group's thread goes on there until the process ends, which, when another rank has died, it does with SIGABRT.
untold = pytest.mark.skipif(TORCH < (2, 7), reason="torch 2.6 tells only NCCL's groups that they are destroyed")


@untold
@pytest.mark.timeout(240)  # to start takes long on a busy machine
def test_a_killed_rank_is_noticed_and_nothing_is_left(transport: str, tmp_path: Path, nothing_left: Any) -> None:
    command = script(tmp_path / "killed.py", KILLED)
    surroundings = environment(D2LPS_TRANSPORT=transport, OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=surroundings) for rank in range(3)]
    assert [process.wait(200) for process in ranks] == [0, 0, -signal.SIGKILL]
    for rank in range(2):
        assert "all_reduce of ranks [0, 1, 2]" in (tmp_path / f"heard.{rank}").read_text()
    assert nothing_left(3)


# ---- nothing left -----------------------------------------------------------------------------------------------------


def many_groups(comm: Communicator) -> int:
    """How many open files and threads a rank has more, when several times some groups have come and gone."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    for number in range(3):
        for _ in range(5):
            group = dist.new_group([0, 1])
            if comm.rank < 2:
                dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait()
                dist.send(torch.ones(3), 1, group) if comm.rank == 0 else dist.recv(torch.ones(3), 0, group)
                dist.destroy_process_group(group)
            del group
        if number == 0:
            before = count()
    until(lambda: count() <= before)  # threads need a moment to end
    return count() - before


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@untold
def test_destroyed_groups_leave_nothing_behind(transport: str) -> None:
    assert max(job(many_groups, 3, transport=transport)) <= 0


def thrice(rank: int, folder: str) -> None:
    """Groups that come one after another at the same store."""
    store = dist.FileStore(f"{folder}/store", 2)
    for number in range(3):
        dist.init_process_group("d2lps", store=store, rank=rank, world_size=2)
        dist.all_reduce(tensor := torch.tensor([number + rank]))
        assert tensor.item() == 2 * number + 1
        dist.destroy_process_group()


def maps_after_groups(comm: Communicator) -> list[int]:
    """How often a rank maps the memory of groups when each of three is gone, by the number of elements that it added up."""
    gc.disable()  # who lets go of the last reference lets go of the memory
    found = []
    for elements in (10, 100_000, 2_000_000):
        group = dist.new_group()
        for _ in range(3):
            dist.all_reduce(torch.ones(elements), group=group)
        dist.destroy_process_group(group)
        del group
        found.append(Path("/proc/self/maps").read_text().count("memfd:d2lps"))
    return found


@untold
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_destroyed_group_lets_go_of_its_memory() -> None:
    for one, other, third in job(maps_after_groups, 2):
        assert one == other == third


def test_a_group_may_follow_another(tmp_path: Path) -> None:
    mp.spawn(thrice, (str(tmp_path),), nprocs=2)


# ---- how ranks come to share memory -------------------------------------------------------------------------------------


def test_one_rank_that_cannot_is_reason_enough_for_all() -> None:
    def vote(comm: Communicator) -> list[str]:
        store = dist.group.WORLD.get_group_store()
        first = transports.agreed(dist.PrefixStore("a", store), comm.rank, 3, "")
        second = transports.agreed(dist.PrefixStore("b", store), comm.rank, 3, "too far" if comm.rank == 1 else "")
        dist.barrier()  # the store is in rank 0, and gone with it; to make a group takes care of that, these votes alone do not
        return [first, second]

    assert job(vote, 3) == [["", "too far"]] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_shared_memory_is_found_or_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(comm: Communicator) -> bool:
        return dist.group.WORLD.transports.memory is not None

    def apart(comm: Communicator) -> list[Any]:
        transports._machine = lambda: f"machine {comm.rank}"  # as if they lived on three
        group = dist.new_group()
        dist.all_reduce(tensor := torch.ones(1), group=group)
        d2lps.backend.use(transport="shm")
        results = [group.transports.memory, tensor.item(), told(lambda: dist.new_group())]
        dist.barrier()
        return results

    assert job(found, 3) == [True] * 3
    assert job(found, 2, transport="gloo") == [False] * 2
    for memory, total, said in job(apart, 3):
        assert (memory, total) == (None, 3.0)
        assert re.match(r"RuntimeError: transport='shm' is not there: rank [12]: it is on another machine than", said)


# ---- within a run: no wait is longer than the run's timeout -------------------------------------------------------------


def skips_a_batch(comm: Communicator, group: Any) -> None:
    for _ in range(comm.rank + 1):
        dist.all_reduce(torch.ones(2), group=group)


def skips_one_that_is_queued(comm: Communicator, group: Any) -> None:
    for work in [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(comm.rank + 1)]:
        work.wait()


def makes_no_group(comm: Communicator, group: Any) -> None:
    if comm.rank > 0:
        d2lps.backend.group(comm)


def sends_nothing(comm: Communicator, group: Any) -> None:
    if comm.rank > 0:
        dist.recv(torch.ones(2), 0, group=group)


def ends_an_epoch_early(comm: Communicator, group: Any) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    for _ in range(3 if comm.rank else 2):
        model(torch.ones(2)).sum().backward()


def hooks_fewer_steps(comm: Communicator, group: Any) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    model.register_comm_hook(*d2lps.backend.ddp_hook(d2lps.compress.half(), group))
    for _ in range(3 if comm.rank else 2):
        model(torch.ones(2)).sum().backward()


ONE_IS_MISSING = {
    skips_a_batch: "waits .* in all_reduce", skips_one_that_is_queued: "waits .* in all_reduce",
    makes_no_group: "waits for the others to make a process group", sends_nothing: "waits for rank 0 to send 8 B, tag 0",
    ends_an_epoch_early: "waits .* in all_reduce", hooks_fewer_steps: "waits .* in all_reduce",
}  # fmt: skip


def in_a_group_of_the_run(comm: Communicator, function: Function, transport: str) -> Any:
    d2lps.backend.use(transport=transport)
    return function(comm, d2lps.backend.group(comm))


SITUATIONS = [*itertools.product([*ONE_IS_MISSING][:4], [*zip(TRANSPORTS, TRANSPORTS, strict=True), ("gloo", "auto")])]
SITUATIONS += [(ends_an_epoch_early, ("auto", "auto")), (hooks_fewer_steps, ("gloo", "auto"))]  # DDP's import takes its time


@pytest.mark.parametrize(("function", "where"), SITUATIONS)
def test_a_wait_in_a_group_of_a_run_is_bounded_by_the_runs_timeout(function: Function, where: tuple[str, str]) -> None:
    backend, transport = where
    with pytest.raises(RankHung) as caught:
        d2lps.run(in_a_group_of_the_run, 3, function, transport, backend=backend, timeout=1.5)
    first, zero, *others = str(caught.value).splitlines()
    assert re.fullmatch(r"rank [12] has waited for more than timeout=1.5 s|deadlock: .*", first)
    assert zero == "  rank 0 has returned"
    assert re.search(rf"  rank [12] {ONE_IS_MISSING[function]}", "\n".join(others))


def test_a_hang_in_a_smaller_group_names_the_runs_ranks_and_lines() -> None:
    def work(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2)
        assert part is not None
        d2lps.backend.group(part)
        if comm.rank == 3:
            dist.all_reduce(torch.ones(2))

    with pytest.raises(RankHung) as caught:
        d2lps.run(work, 4, backend="shm", timeout=1.5)
    waits = r"  rank 3 waits in the world's own all-reduce of ranks 1, 3 in all_reduce \(in work, line \d+: dist.all_reduce\("
    assert re.search(waits, str(caught.value))
    assert "rank 1 has returned" in str(caught.value)


def bounds(comm: Communicator) -> list[float]:
    mine = dist.new_group(backend="d2lps", timeout=timedelta(seconds=2))
    return [group.transports.timeout for group in (d2lps.backend.group(comm), dist.new_group(backend="d2lps"), mine)]


def test_a_groups_own_timeout_counts_where_it_is_shorter_than_the_runs() -> None:
    def work(comm: Communicator) -> tuple[list[float], str]:
        d2lps.backend.group(comm)
        mine = dist.new_group(backend="d2lps", timeout=timedelta(seconds=0.5))
        if comm.rank == 0:
            comm.barrier()
            return bounds(comm), ""
        said = told(lambda: dist.all_reduce(torch.ones(2), group=mine))
        comm.barrier()
        return bounds(comm), said

    zero, one = d2lps.run(work, 2, timeout=40)
    assert zero[0] == one[0] == [40, 40, 2]
    assert one[1].startswith("RankHung: all_reduce of ranks [0, 1]: ")


# ---- under torchrun -----------------------------------------------------------------------------------------------------

TRAINING = """
    import os, sys, torch, torch.distributed as dist
    import d2lps.backend
    for transport in sys.argv[1:] * 2:
        os.environ["D2LPS_TRANSPORT"] = transport
        dist.init_process_group("d2lps")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
        dist.barrier()
        shares = dist.group.WORLD.transports.memory is not None
        line = f"{dist.get_rank()} {model.module.weight.grad.tolist()} {dist.get_backend()} {shares}\\n"
        os.write(1, line.encode())  # in one piece
        dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    text = output_of([*command, *script(tmp_path / "train.py", TRAINING)[1:], *TRANSPORTS], D2LPS_ALL_REDUCE="tree")
    for rank, transport in itertools.product(range(3), TRANSPORTS):
        assert text.count(f"{rank} [[2.0, 2.0, 2.0]] d2lps {transport == 'shm'}") == 2, text


def test_in_a_simulation_there_is_no_group() -> None:
    """torch waits for the others, and keeps the one thread that they would come on."""
    with pytest.raises(TypeError, match="no simulated rank can: take a run of processes"):
        d2lps.simulate(d2lps.backend.group, star(2, 1e9))
