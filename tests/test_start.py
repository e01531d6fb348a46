"""`comm.start` in the worlds of real processes: functions that go on beside their rank, each with messages of its own."""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launching import nothing_left

import d2lps
from d2lps import Communicator, RankHung
from d2lps.collectives import all_reduce, broadcast
from d2lps.comm import Event
from d2lps.topology import star

Runner = Callable[..., d2lps.Run]


@pytest.fixture(params=["gloo", "shm"] if sys.platform == "linux" else ["gloo"])
def run(request: pytest.FixtureRequest) -> Runner:
    return functools.partial(d2lps.run, backend=request.param)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_several_at_a_time_and_the_ranks_own_do_not_disturb_one_another(run: Runner, ranks: int, algorithm: str) -> None:
    sizes = [1, 1000, 100_000, 700_000]

    def work(comm: Communicator) -> list[list[float]]:
        tensors = [torch.full((size,), float(comm.rank + k)) for k, size in enumerate(sizes * 2)]
        works = [comm.start(all_reduce, tensor, d2lps.ReduceOp.SUM, algorithm) for tensor in tensors]
        own = torch.full((200_000,), 1.0)
        for _ in range(3):
            all_reduce(comm, own, algorithm=algorithm)
        for work in reversed(works):  # in whatever order
            work.wait()
            work.wait()
        return [tensor.unique().tolist() for tensor in [*tensors, own]]

    total = ranks * (ranks - 1) / 2
    assert run(work, ranks) == [[[total + ranks * k] for k in range(8)] + [[float(ranks**3)]]] * ranks


def test_a_rank_that_hangs_in_what_it_has_started_is_named(run: Runner, nothing_left: object) -> None:
    def work(comm: Communicator) -> None:
        def hang(beside: Communicator) -> None:
            if beside.rank == 0:
                beside.recv(torch.zeros(10), 1)

        comm.start(hang).wait()
        comm.barrier()

    with pytest.raises(RankHung) as caught:
        run(work, 2, timeout=1)
    where = f"(in hang, line {work.__code__.co_firstlineno + 3}: beside.recv(torch.zeros(10), 1))"
    assert f"  rank 0 waits for rank 1 to send 40 B, tag 0 {where}" in str(caught.value)
    assert "  rank 1 waits at a barrier (in work" in str(caught.value)


def test_a_start_that_only_some_ranks_call_is_named(run: Runner) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank:
            comm.start(broadcast, torch.zeros(1)).wait()
        while comm.rank == 0:
            pass

    where = rf"\(in work, line {work.__code__.co_firstlineno + 2}: comm.start\(broadcast, torch.zeros\(1\)\)"
    with pytest.raises(RankHung, match=rf"rank [12] waits for the others to call start {where}"):
        run(work, 3, timeout=1)


def simulated(function: Callable[..., Any], ranks: int, **options: Any) -> d2lps.Run:
    return d2lps.simulate(function, d2lps.topology.star(ranks, 1e9, 1e-6))


@pytest.mark.parametrize("world", [d2lps.run, simulated])
def test_lanes_of_a_rank_wait_for_what_another_signals(world: Runner) -> None:
    def work(comm: Communicator) -> list[str]:
        told, first, second = list[str](), Event(), Event()

        def beside(lane: Communicator) -> None:
            lane.wait(first)
            told.append("first")
            lane.signal(second)

        assert not first.is_set()
        started = comm.start(beside)
        comm.sleep(0.01)
        told.append("slept")
        comm.signal(first)
        comm.wait(second)
        told.append("second")
        comm.wait(first)  # has happened for good
        started.wait()
        return told

    assert world(work, 2) == [["slept", "first", "second"]] * 2


@pytest.mark.parametrize("world", [d2lps.run, simulated])
def test_an_event_that_never_happens_is_named(world: Runner) -> None:
    def work(comm: Communicator) -> None:
        event = Event()
        started = comm.start(lambda lane: lane.wait(event))
        if comm.rank:
            comm.signal(event)
        started.wait()

    with pytest.raises(RankHung, match=r"rank 0 waits for what another of its lanes is to signal \(in <lambda>, line "):
        world(work, 2, timeout=1)


@pytest.mark.parametrize("call", ["signal", "wait"])
def test_what_is_no_event_is_refused(call: str) -> None:
    with pytest.raises(TypeError, match=f"{call} needs an Event, not <d2lps.comm.work.Work"):
        d2lps.simulate(lambda comm: getattr(comm, call)(comm.start(lambda beside: None)), star(2, 1e9))


def test_one_that_never_ends_is_not_waited_for_for_ever(run: Runner) -> None:
    def work(comm: Communicator) -> None:
        def loop(beside: Communicator) -> None:
            while beside.rank == 1:
                pass

        comm.start(loop)

    with pytest.raises(RankHung, match="rank 1 waits for what it has started"):
        run(work, 2, timeout=1)


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_a_split_keeps_no_connection_to_where_ranks_meet() -> None:
    def work(comm: Communicator) -> int:
        before = len(os.listdir("/proc/self/fd"))
        kept = [comm.split(0) for _ in range(10)]
        return (len(os.listdir("/proc/self/fd")) - before) // len(kept)

    at_the_store, elsewhere = d2lps.run(work, 2, backend="gloo")
    assert at_the_store == elsewhere


def test_many_leave_nothing_behind(run: Runner, nothing_left: object) -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        def rounds(number: int) -> None:
            for _ in range(number):
                tensor = torch.ones(100_000)
                works = [comm.start(all_reduce, tensor, d2lps.ReduceOp.SUM, "native"), comm.start(broadcast, torch.ones(10))]
                for work in works:
                    work.wait()

        def held() -> tuple[int, int]:
            import psutil

            me = psutil.Process()
            return me.memory_info().rss // 2**20, me.num_fds()

        rounds(10)
        memory, files = held()
        rounds(60)
        return held()[0] - memory, held()[1] - files

    for grown, opened in run(work, 3):
        assert grown < 30 and opened < 60, (grown, opened)  # of 120: the last few may still be in use elsewhere
    assert threading.active_count() < 20
