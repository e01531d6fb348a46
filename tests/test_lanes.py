"""What a rank starts beside itself, what it computes and holds meanwhile, in a simulation and on processes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import d2lps
from d2lps import Communicator, OutOfMemory, RankDied, RankHung
from d2lps.collectives import all_reduce
from d2lps.comm import Event
from d2lps.simulator import Cut, Kill, Narrow, Slow, simulate
from d2lps.topology import Device, Topology, star
from d2lps.trace import Trace

CHIP = Device(flops=1e12, memory=1e9, memory_bandwidth=1e11, efficiency=0.5, launch=1e-3)


@pytest.fixture(params=["simulated", "shm", "gloo"])
def world(request: pytest.FixtureRequest) -> str:
    """Where a run takes place, as `go` knows it."""
    return str(request.param)


def go(world: str, work: Callable[..., Any], ranks: int, **options: Any) -> d2lps.Run:
    if world == "simulated":
        return simulate(work, star(ranks, 1e6), **options)
    return d2lps.run(work, ranks, backend=world, trace=True, **options)


def compute(comm: Communicator) -> float:
    """Of a CHIP's time 3 ms: one to launch, two for the arithmetic. When was it over?"""
    with comm.compute("forward", flops=1e9):
        pass
    return comm.now()


def chips(ranks: int, bandwidth: float = 1e6) -> Topology:
    return star(ranks, bandwidth, device=CHIP)


# ---- start ------------------------------------------------------------------------------------------------------------


def several_at_once(comm: Communicator) -> list[list[float]]:
    """None begins before all have a lane: else one that is over by then gives its lane to the next."""
    begin = Event()

    def together(comm: Communicator, tensor: torch.Tensor) -> None:
        comm.wait(begin)
        all_reduce(comm, tensor)

    tensors = [torch.full((5,), float(comm.rank + k)) for k in range(4)]
    works = [comm.start(together, tensor) for tensor in tensors]
    comm.signal(begin)
    mine = torch.ones(3)
    all_reduce(comm, mine)
    for work in reversed(works):
        work.wait()
    return [tensor.tolist() for tensor in (*tensors, mine)]


def test_what_is_started_goes_on_beside_its_rank(world: str) -> None:
    run = go(world, several_at_once, 3)
    assert run == [[[3.0 + 3 * k] * 5 for k in range(4)] + [[3.0] * 3]] * 3
    m = run.trace.messages
    assert set(m["src_lane"].tolist()) == {0, 1, 2, 3, 4} and (m["src_lane"] == m["dst_lane"]).all()
    assert run.trace.unmatched == 0 and len(m["src"]) == 5 * 12
    assert run.trace.rounds == 4  # five rings at the same time, of 4 steps each


def test_a_lane_that_is_free_is_used_again(world: str) -> None:
    def work(comm: Communicator) -> None:
        for _ in range(3):
            comm.start(all_reduce, torch.ones(2)).wait()

    run = go(world, work, 2)
    assert set(run.trace.messages["src_lane"].tolist()) == {1}
    assert run.trace.rounds == 3 * 2  # each began when the one before had ended


def test_all_who_wait_for_one_work_wait_until_it_is_complete(world: str) -> None:
    def work(comm: Communicator) -> list[bool]:
        complete: list[bool] = []
        seen: list[bool] = []

        def slow(beside: Communicator) -> None:
            beside.sleep(0.3)
            complete.append(True)

        def waits(beside: Communicator) -> None:
            first.wait()
            seen.append(bool(complete))

        first = comm.start(slow)
        others = [comm.start(waits), comm.start(waits)]
        comm.sleep(0.1)  # they wait by now
        for started in (first, *others):
            started.wait()
            seen.append(bool(complete))
        return seen

    assert go(world, work, 1) == [[True] * 5]


@pytest.mark.parametrize("world", ["shm", "gloo"])
def test_two_lanes_may_wait_for_one_message(world: str) -> None:
    def work(comm: Communicator) -> list[float]:
        seen: list[float] = []
        message = comm.irecv(into := torch.zeros(1), 1) if comm.rank == 0 else None

        def waits(beside: Communicator) -> None:
            if message is not None:
                message.wait()
                seen.append(into.item())

        works = [comm.start(waits), comm.start(waits)]
        if comm.rank == 1:
            comm.sleep(0.3)
            comm.send(torch.ones(1), 0)
        for started in works:
            started.wait()
        return seen

    run = go(world, work, 2)
    assert run[0] == [1.0, 1.0]
    assert run.trace.unmatched == 0 and len(run.trace.messages["src"]) == 1


def fails_on_one(comm: Communicator) -> None:
    if comm.rank == 1:
        raise LookupError("in the lane")


def test_an_error_comes_out_where_it_is_waited_for(world: str) -> None:
    def work(comm: Communicator) -> str:
        started = comm.start(fails_on_one)
        try:
            started.wait()
        except LookupError as error:
            return str(error)
        return "fine"

    assert go(world, work, 2) == ["fine", "in the lane"]


def test_an_error_that_nobody_has_waited_for_is_not_lost(world: str) -> None:
    with pytest.raises(LookupError, match="in the lane"):
        go(world, lambda comm: (comm.start(fails_on_one), comm.rank)[1], 2)


def test_what_was_started_is_complete_when_its_rank_returns(world: str) -> None:
    def work(comm: Communicator) -> list[float]:
        tensor = torch.ones(4)
        comm.start(all_reduce, tensor)
        seen: list[float] = []
        comm.start(lambda beside: (all_reduce(beside, tensor2 := torch.ones(1)), seen.append(tensor2.item())))
        return seen

    run = go(world, work, 3)
    assert len(run.trace.messages["src"]) == 24
    if world == "simulated":
        assert run == [[3.0]] * 3


def test_groups_and_starts_within_what_was_started(world: str) -> None:
    def pairs(comm: Communicator, tensor: torch.Tensor) -> None:
        half = comm.split(comm.rank // 2)
        assert half is not None
        half.start(all_reduce, tensor).wait()

    def work(comm: Communicator) -> float:
        tensor = torch.tensor([float(comm.rank)])
        works = [comm.start(pairs, tensor), comm.start(lambda beside: beside.barrier())]
        for each in works:
            each.wait()
        return tensor.item()

    assert go(world, work, 4) == [1.0, 1.0, 5.0, 5.0]


def test_start_wants_a_function() -> None:
    with pytest.raises(TypeError, match="not 3"):
        simulate(lambda comm: comm.start(3), star(1, 1e6))


def test_a_collective_passes_under_what_is_computed() -> None:
    """4 ms of computing over 4 ms of all-reduce: one after the other without start, side by side with it."""

    def work(comm: Communicator, beside: bool) -> None:
        gradient = torch.ones(1000, device=comm.device)  # a ring of two: 2 x 2,000 B at 1 MB/s
        started = comm.start(all_reduce, gradient) if beside else None
        if not beside:
            all_reduce(comm, gradient)
        with comm.compute("backward", flops=1.5e9):  # 1 ms to launch, 3 ms at half of 1 TFLOP/s
            pass
        if started:
            started.wait()

    for device in ("cpu", "meta"):
        times = [simulate(work, chips(2), beside, device=device).time for beside in (False, True)]
        assert times == pytest.approx([8e-3, 4e-3])
    spans = simulate(work, chips(2), True).trace.spans
    assert spans["end"].tolist() == pytest.approx([4e-3, 4e-3])


def test_a_backward_pass_starts_collectives_from_its_hooks() -> None:
    def work(comm: Communicator) -> tuple[float, list[float]]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(30, 30, bias=False) for _ in range(3)]
        works = []
        for layer in layers:
            layer.weight.register_post_accumulate_grad_hook(lambda p: works.append(comm.start(all_reduce, p.grad)))
        loss = torch.nn.Sequential(*layers)(torch.ones(2, 30) * (comm.rank + 1)).sum()
        with comm.compute("backward"):
            loss.backward()
        for each in works:
            each.wait()
        return comm.now(), [layer.weight.grad.sum().item() for layer in layers]

    run = simulate(work, chips(2))
    trace = run.trace
    begun, starts = trace.spans["start"][0], trace.messages["start"]
    assert starts.min() < max(trace.spans["end"]) < run.time  # the first left while the pass still went on
    assert begun == 0.0 and len(set(trace.messages["src_lane"].tolist())) >= 2
    alone = simulate(work, chips(1))[0][1]
    assert run[0][1] == run[1][1] == pytest.approx([3 * grad for grad in alone], rel=1e-5)  # inputs of 1 and of 2


@pytest.mark.parametrize("use", [lambda comm: comm.barrier(), lambda comm: all_reduce(comm, torch.ones(3))])
def test_ones_communicator_is_not_for_what_one_has_started(world: str, use: Callable[[Communicator], None]) -> None:
    def work(comm: Communicator) -> None:
        started = comm.start(lambda beside: use(comm))
        all_reduce(comm, torch.ones(3))
        started.wait()

    with pytest.raises(RuntimeError, match="belongs to another of its rank's lanes"):
        go(world, work, 2)


def test_what_is_started_ends_with_what_it_has_started(world: str) -> None:
    def work(comm: Communicator) -> float:
        tensor = torch.ones(1)
        comm.start(lambda beside: beside.start(all_reduce, tensor)).wait()
        return tensor.item()

    assert go(world, work, 3) == [3.0] * 3


def test_a_deadlock_of_lanes_is_explained() -> None:
    def work(comm: Communicator) -> None:
        comm.start(lambda beside: beside.recv(torch.ones(1), 1 - beside.rank)).wait()

    with pytest.raises(RankHung, match="waits for what it has started") as caught:
        simulate(work, star(2, 1e6))
    assert "to send 4 B" in str(caught.value)


# ---- messages that are tested for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["simulated", "shm"])
def test_a_message_is_complete_when_it_is_delivered(world: str) -> None:
    def work(comm: Communicator) -> tuple[bool, bool, list[float]]:
        tensor = torch.full((2,), float(comm.rank))
        if comm.rank == 0:
            comm.barrier()
            comm.send(tensor, 1)
            return True, True, []
        waiting = comm.irecv(tensor, 0)
        before = waiting.test()
        comm.barrier()
        while not waiting.test():
            comm.sleep(1e-4)
        return before, waiting.is_completed(), tensor.tolist()

    assert go(world, work, 2)[1] == (False, True, [0.0, 0.0])


def test_a_send_is_complete_at_the_time_at_which_it_is_delivered() -> None:
    def work(comm: Communicator) -> tuple[bool, bool]:
        tensor = torch.ones(250)  # 1,000 B: a millisecond
        posted = comm.isend(tensor, 1) if comm.rank == 0 else comm.irecv(tensor, 0)
        comm.sleep(0.5e-3)
        early = posted.test()
        comm.sleep(0.6e-3)
        return early, posted.is_completed()

    run = simulate(work, star(2, 1e6))
    assert run == [(False, True)] * 2
    assert run.trace.messages["end"].tolist() == pytest.approx([1e-3])


@pytest.mark.parametrize("asked", ["tested", "looked at the clock"])
def test_who_only_looks_hangs_by_name(asked: str) -> None:
    def work(comm: Communicator) -> None:
        started = comm.start(lambda beside: beside.sleep(1.0))
        while comm.now() < 1.0 if asked == "looked at the clock" else not started.test():
            pass

    with pytest.raises(RankHung, match=f"rank 0 has {asked} 10*,000(,000)? times at 0 s"):
        simulate(work, star(1, 1e9))


def test_who_waits_for_a_message_of_another_lane_is_refused_and_wakes_nobody() -> None:
    def work(comm: Communicator) -> float:
        tensor = torch.ones(1)
        if comm.rank == 1:
            comm.start(lambda beside: None)
            comm.sleep(0.5)
            comm.send(tensor, 0)
            return comm.now()
        coming = comm.irecv(tensor, 1)

        def lane(beside: Communicator) -> None:
            for mistake in (coming.wait, lambda: comm.sleep(0.25)):
                with pytest.raises(RuntimeError, match="rank 0: this communicator belongs to another of its rank's lanes"):
                    mistake()

        started = comm.start(lane)
        comm.sleep(10.0)
        assert started.test()
        return comm.now()

    assert simulate(work, star(2, 1e9))[0] == 10.0


# ---- spans ------------------------------------------------------------------------------------------------------------


def spans(trace: Trace, rank: int) -> list[tuple[str, str, float]]:
    table = trace.spans
    rows = zip(*(table[name].tolist() for name in ("rank", "kind", "label", "start", "end")), strict=True)
    return [(trace.kinds[k], trace.labels[label], round(end - start, 9)) for r, k, label, start, end in rows if r == rank]


def test_what_is_computed_slept_and_held_is_in_the_trace() -> None:
    def work(comm: Communicator) -> None:
        comm.sleep(0.25)
        with comm.allocate(1000, "weights"), comm.compute("forward", flops=1e9, bytes=4e8):
            pass  # 2 ms of arithmetic, 4 ms of memory, 1 ms to launch

    told = [("sleep", "", 0.25), ("memory", "weights", 0.005), ("compute", "forward", 0.005)]  # what is held, from its beginning
    assert spans(simulate(work, chips(1)).trace, 0) == told
    real = spans(d2lps.run(work, 1, trace=True).trace, 0)
    assert [span[:2] for span in real] == [span[:2] for span in told] and real[0][2] >= 0.25


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_torch_does_is_counted_where_no_number_is_given(device: str) -> None:
    def work(comm: Communicator) -> None:
        a, b = torch.ones(100, 200, device=comm.device), torch.ones(200, 300, device=comm.device)
        with comm.compute("product"):
            a @ b
        with comm.compute("nothing"):
            a.view(200, 100).t()

    run = simulate(work, chips(1), device=device)
    flops, nbytes = 2 * 100 * 200 * 300, 4 * (100 * 200 + 200 * 300 + 100 * 300)
    assert run.trace.spans["flops"].tolist() == [flops, 0] and run.trace.spans["nbytes"].tolist() == [nbytes, 0]
    assert run.time == pytest.approx(1e-3 + flops / 0.5e12)


def test_what_others_compute_meanwhile_is_not_counted() -> None:
    def work(comm: Communicator) -> float:
        x = torch.ones(1000 * (comm.rank + 1))
        with comm.compute("mine"):
            x.add_(1)
            all_reduce(comm, torch.ones(4))  # the other rank goes on here
            x.add_(1)
        return comm.now()

    table = simulate(work, chips(2)).trace.spans
    assert table["nbytes"].tolist()[1] - table["nbytes"].tolist()[0] == 2 * 2 * 4000


def test_two_lanes_share_what_computes() -> None:
    def work(comm: Communicator) -> None:
        other = comm.start(compute)
        compute(comm)
        other.wait()

    assert simulate(work, chips(1)).time == pytest.approx(2 * 3e-3)


def test_a_node_that_is_not_described_computes_nothing() -> None:
    with pytest.raises(ValueError, match="'gpu0' has no device"):
        simulate(compute, star(1, 1e6))


@pytest.mark.parametrize("world", ["simulated", "shm"])
def test_more_than_the_device_has_cannot_be_held(world: str) -> None:
    def work(comm: Communicator) -> str:
        with comm.allocate(600_000_000, "weights"):
            try:
                with comm.allocate(1 << 60, "activations"):
                    return "held"
            except OutOfMemory as error:
                told = str(error)
        with comm.allocate(700_000_000, "again"):
            return told

    run = simulate(work, chips(1)) if world == "simulated" else d2lps.run(work, 1)
    assert "'activations' needs 1,152,921,504,606,846,976 B" in run[0] and "weights 600,000,000 B" in run[0]


@pytest.mark.parametrize("nbytes", [-1, math.nan, math.inf, True, "3"])
def test_what_is_no_number_of_bytes_is_not_held(nbytes: Any) -> None:
    def work(comm: Communicator) -> None:
        with comm.allocate(nbytes, "x"):
            pass

    with pytest.raises(ValueError, match="nbytes="):
        simulate(work, chips(1))


def test_ranks_of_one_node_share_its_memory() -> None:
    def work(comm: Communicator) -> None:
        with comm.allocate(600_000_000, f"weights of rank {comm.rank}"):
            comm.sleep(1)

    with pytest.raises(OutOfMemory, match="held there: weights of rank 0 600,000,000 B"):
        simulate(work, chips(1), ranks=["gpu0", "gpu0"])


# ---- what happens to the cluster --------------------------------------------------------------------------------------


def pass_on(comm: Communicator) -> float:
    tensor = torch.ones(250, device=comm.device)  # 1,000 B: a millisecond
    comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0)
    return comm.now()


@pytest.mark.parametrize(
    ("faults", "seconds"),
    [
        ([], 1e-3),
        ([Narrow(("gpu0", "switch"), 2)], 2e-3),
        ([Narrow(("switch", "gpu0"), 2, at=0.5e-3)], 1.5e-3),
        ([Narrow(("gpu1", "switch"), 4, at=0.5e-3, until=0.9e-3)], 1.3e-3),
        ([Cut(("gpu0", "switch"), at=0.5e-3, until=2.5e-3)], 3e-3),
        ([Cut(("gpu0", "switch"), at=0, until=2e-3)], 3e-3),
        ([Slow("gpu0", 3)], 1e-3),
        ([Narrow(("gpu0", "switch"), 2, at=5)], 1e-3),
        ([Narrow(["gpu0", "switch"], 2)], 2e-3),  # a link may be a list
        ([Cut(["switch", "gpu0"], 0, 2e-3)], 3e-3),
        ([Cut(("gpu0", "switch"), 0, 2e-3), Cut(("gpu0", "switch"), 1e-3, 4e-3)], 5e-3),  # what is wrong with a link adds up
        ([Narrow(("gpu0", "switch"), 2), Cut(("gpu0", "switch"), 1e-3, 3e-3)], 4e-3),
        ([Narrow(("gpu0", "switch"), 3), Narrow(("gpu0", "switch"), 2)], 6e-3),
    ],
)
def test_links_that_become_narrow_or_are_cut(faults: list[Any], seconds: float) -> None:
    assert simulate(pass_on, star(2, 1e6), faults=faults) == [pytest.approx(seconds)] * 2


def test_a_link_that_stays_cut_is_named() -> None:
    with pytest.raises(RankHung, match=r"nothing can happen any more \(cut: \('gpu0', 'switch'\)"):
        simulate(pass_on, star(2, 1e6), faults=[Cut(("gpu0", "switch"), at=0.5e-3)])


def test_a_slow_node_computes_longer() -> None:
    assert simulate(compute, chips(2), faults=[Slow("gpu1", 3)]) == pytest.approx([3e-3, 9e-3])
    assert simulate(compute, chips(1), faults=[Slow("gpu0", 3, at=1e-3, until=4e-3)]) == [pytest.approx(5e-3)]


def test_who_waits_for_a_rank_that_dies_hears_of_it_and_nobody_else() -> None:
    def work(comm: Communicator) -> str:
        tensor = torch.ones(250)
        try:
            if comm.rank == 0:
                comm.recv(tensor, 1)
            elif comm.rank == 1:
                comm.sleep(1)
            elif comm.rank == 2:
                comm.sleep(2)
                comm.send(tensor, 1)
            elif comm.rank > 3:
                other = comm.rank ^ 1
                for _ in range(2000):
                    comm.sendrecv(tensor, other, torch.ones(250), other)
        except RankDied as error:
            return f"{error} ({comm.now():g})"
        return "fine"

    run = simulate(work, star(6, 1e6), ranks=6, faults=[Kill("gpu1", 0.5)])
    died = "rank 1 has died: 'gpu1' was killed at 0.5 s of virtual time"
    assert run == [f"{died} (0.5)", None, f"{died} (2)", "fine", "fine", "fine"]


@pytest.mark.parametrize("flops", [1e9, None])
def test_what_a_rank_computes_as_it_dies_is_in_the_trace(flops: float | None) -> None:
    def work(comm: Communicator) -> None:
        with comm.compute("forward", flops=flops):
            tensor = torch.ones(2, 1000, 1000, device=comm.device)
            for _ in range(10 if flops is None else 0):
                tensor = tensor @ tensor

    run = simulate(work, chips(2), device="meta", faults=[Kill("gpu1", 1e-3)])
    assert spans(run.trace, 1) == [("compute", "forward", 1e-3)] and spans(run.trace, 0)[0][2] > 1e-3


def test_a_meeting_with_the_dead() -> None:
    def work(comm: Communicator) -> str:
        comm.sleep(0.1 * comm.rank)
        try:
            comm.barrier()
        except RankDied as error:
            return str(error)[:15]
        return "fine"

    assert simulate(work, star(3, 1e6), faults=[Kill("gpu2", 0.15)]) == ["rank 2 has died", "rank 2 has died", None]


def test_a_rank_that_died_begins_anew() -> None:
    def work(comm: Communicator) -> float:
        comm.sleep(1)
        tensor = torch.tensor([float(comm.rank)])
        if comm.rank == 0:
            comm.sleep(2)
            comm.recv(tensor, 1)
        else:
            comm.send(tensor, 0)
        return tensor.item() + comm.now()

    run = simulate(work, star(2, 8e9), faults=[Kill("gpu1", at=0.5, until=0.75)])
    assert run == pytest.approx([1 + 3, 1 + 3])


def test_what_a_dead_rank_has_sent_does_not_arrive_and_ends_no_other_wait() -> None:
    """1 ms a message. Rank 1 dies when half of its own is through; rank 2 sends at 10 ms."""

    def work(comm: Communicator, then: str) -> tuple[float, float]:
        tensor, other = torch.full((250,), float(comm.rank)), torch.zeros(250)
        if comm.rank == 1:
            comm.send(tensor, 0)
        if comm.rank == 2:
            comm.sleep(10e-3)
            if then == "recv":
                comm.send(tensor, 0)
        if comm.rank == 0:
            with pytest.raises(RankDied):
                comm.exchange([], [(torch.zeros(250), 1), (torch.zeros(250), 3)] if then == "sleep" else [(torch.zeros(250), 1)])
            if then == "recv":
                comm.recv(other, 2)
            elif then == "sleep":
                comm.sleep(5e-3)
            else:
                compute(comm)
        if comm.rank == 3 and then == "sleep":
            comm.send(tensor, 0)
        return comm.now(), other.sum().item()

    wanted = {"recv": (11e-3, 500.0), "sleep": (5.5e-3, 0.0), "compute": (3.5e-3, 0.0)}
    for then, seen in wanted.items():
        assert simulate(work, chips(4), then, faults=[Kill("gpu1", 0.5e-3)])[0] == pytest.approx(seen), then


def test_an_exchange_that_is_refused_ends_no_other_wait() -> None:
    """Rank 2's message comes at 6 ms: long after rank 0 has given up the exchange that it was to be part of."""

    def work(comm: Communicator) -> float:
        if comm.rank == 2:
            comm.sleep(5e-3)
            comm.send(torch.ones(250), 0)
        if comm.rank == 0:
            comm.sleep(2e-3)
            with pytest.raises(RankDied):
                comm.exchange([], [(torch.zeros(250), 2), (torch.zeros(250), 1)])
            comm.sleep(10e-3)
        return comm.now()

    assert simulate(work, star(3, 1e6), faults=[Kill("gpu1", 1e-3)])[0] == pytest.approx(12e-3)


def test_a_message_that_was_posted_before_its_sender_died_is_not_delivered() -> None:
    def work(comm: Communicator) -> float:
        tensor = torch.ones(250)
        if comm.rank == 1:
            comm.send(tensor, 0)
        if comm.rank == 0:
            posted = comm.irecv(tensor := torch.zeros(250), 1)
            comm.sleep(5e-3)
            with pytest.raises(RankDied):
                posted.wait()
        return tensor.sum().item()

    assert simulate(work, star(2, 1e6), faults=[Kill("gpu1", 0.5e-3)]) == [0.0, None]


def test_the_dead_leave_links_and_devices_to_others() -> None:
    def work(comm: Communicator) -> float:
        if comm.rank == 0:
            with pytest.raises(RankDied):
                comm.exchange([], [(torch.zeros(250), 1), (torch.zeros(250), 2)])
            return comm.now()
        comm.send(torch.ones(250), 0)
        return comm.now()

    assert simulate(work, star(3, 1e6), faults=[Kill("gpu1", 1e-3)])[2] == pytest.approx(1.5e-3)  # half of it at half of the rate
    assert simulate(compute, chips(1), faults=[Kill("gpu0", 1e-3, until=2e-3)]) == [pytest.approx(5e-3)]


@pytest.mark.parametrize("way_out", [BaseException, Exception])
def test_nobody_survives_his_own_death(way_out: type[BaseException]) -> None:
    def work(comm: Communicator) -> str:
        for _ in range(100):
            try:
                comm.sleep(1e-3)
            except way_out:
                continue
        return "alive"

    assert simulate(work, star(2, 1e6), faults=[Kill("gpu1", 5e-3)]) == ["alive", None]


def test_a_killed_rank_is_not_said_to_have_returned() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(torch.ones(1), 2)
        comm.sleep(1)
        if comm.rank == 2:
            comm.recv(torch.ones(1), 0)

    with pytest.raises(RankHung, match="rank 1 was killed"):
        simulate(work, star(3, 1e6), faults=[Kill("gpu1", 0.5)])


def test_a_collective_in_a_block_that_is_counted_costs_the_same_with_and_without_contents() -> None:
    def work(comm: Communicator) -> float:
        x = torch.ones(4000, device=comm.device)
        with comm.compute("x"):
            all_reduce(comm, x)
            comm.sendrecv(x, comm.rank ^ 1, torch.empty(4000, device=comm.device), comm.rank ^ 1)
        return comm.now()

    assert list(simulate(work, chips(2))) == list(simulate(work, chips(2), device="meta"))


def test_what_is_started_keeps_the_readers_names() -> None:
    def work(comm: Communicator) -> None:
        gradient = torch.ones(4)
        comm.start(all_reduce, gradient).wait()

    for run in (simulate(work, star(2, 1e6)), d2lps.run(work, 2, trace=True)):
        assert {buffer.name for buffer in run.trace.buffers if not buffer.scratch} == {"gradient"}


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        (Kill("gpu7", 1), ValueError, "no rank lives on 'gpu7'"),
        (Slow("switch", 2), ValueError, "no rank lives on 'switch'"),
        (Slow("gpu0", 0), ValueError, "factor=0"),
        (Narrow(("gpu0", "gpu1"), 2), ValueError, "no link"),
        (Cut(("gpu0", "switch"), at=-1), ValueError, "at must be"),
        (Cut(("gpu0", "switch"), at=2, until=1), ValueError, "until a later one"),
        ("gpu0", TypeError, "not 'gpu0'"),
    ],
)
def test_what_can_not_happen_is_refused(fault: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        simulate(pass_on, star(2, 1e6), faults=[fault])


# ---- explanations know of groups --------------------------------------------------------------------------------------
