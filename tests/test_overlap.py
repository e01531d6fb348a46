"""Gradients in buckets beside the backward pass, and what is sent first: against formulas, one process, and torch's DDP."""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from described import Described, Layer
from hypothesis import given
from hypothesis import strategies as st
from launching import nothing_left
from test_strategies import Tied
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import d2lps
import d2lps.backend
from d2lps import Communicator
from d2lps.collectives import all_reduce
from d2lps.comm import Event
from d2lps.parallel import DataParallel, Scheduler, buckets, flatten
from d2lps.topology import star

Runner = Callable[..., d2lps.Run]


def simulated(function: Callable[..., Any], ranks: int, *args: Any, bandwidth: float = 1e9, latency: float = 1e-6) -> d2lps.Run:
    return d2lps.simulate(function, star(ranks, bandwidth, latency), *args)


@pytest.fixture(params=[d2lps.run, simulated], ids=["processes", "simulated"])
def world(request: pytest.FixtureRequest) -> Runner:
    return request.param


# ---- buckets ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 150), st.integers(1, 150), st.booleans())
def test_buckets_are_those_of_torch(lengths: list[int], cap: int, first: int, mixed: bool) -> None:
    kinds = [torch.float64 if mixed and number % 3 == 0 else torch.float32 for number in range(len(lengths))]
    tensors = [torch.empty(length, dtype=kind) for length, kind in zip(lengths, kinds, strict=True)]
    numbers = list(reversed(range(len(tensors))))
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors[::-1], [first, cap], [], numbers)
    ours = buckets(tensors, cap, first)
    assert sorted(ours) == sorted(theirs)
    if not mixed:  # else torch has those that did not get full in the order of a hash table
        assert ours == theirs


@pytest.mark.parametrize("options", [{"cap": 0}, {"first": -1}, {"cap": 1.5}, {"cap": True}])
def test_a_cap_that_is_none_is_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} is not a whole number from 1 up"):
        buckets([torch.empty(3)], **options)


def test_views_are_the_flat_tensor() -> None:
    shapes: list[tuple[int, ...]] = [(2, 3), (), (0,), (4,)]
    flat, views = flatten([torch.empty(shape) for shape in shapes])
    for number, view in enumerate(views):
        view.fill_(number)
    assert [tuple(view.shape) for view in views] == shapes
    assert flat.tolist() == [0] * 6 + [1] + [3] * 4


# ---- networks ---------------------------------------------------------------------------------------------------------


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 6))


def net(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def batch(seed: int) -> Tensor:
    return torch.randn(60, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_accumulation_divides_the_bytes_of_an_example(world: Runner) -> None:
    def work(comm: Communicator, examples: int, accumulated: int) -> None:
        model = DataParallel(comm, net(plain))
        with model.no_sync():
            for _ in range(accumulated - 1):
                model(torch.ones(examples, 4, dtype=torch.float64)).sum().backward()
        model(torch.ones(examples, 4, dtype=torch.float64)).sum().backward()

    def gradients(run: d2lps.Run) -> int:
        """The bytes that a rank sends in lanes, as not the first broadcasts are."""
        assert run.trace is not None
        messages = run.trace.messages
        return int(messages["nbytes"][(messages["src"] == 0) & (messages["src_lane"] > 0)].sum())

    traced = {"trace": True} if world is d2lps.run else {}
    sent = {case: gradients(world(work, 2, *case, **traced)) for case in ((8, 1), (8, 4), (32, 1))}
    nbytes = sum(parameter.nbytes for parameter in net(plain).parameters())
    assert sent == dict.fromkeys(sent, nbytes)  # by a ring of two, for 8, 32 and 32 examples


# ---- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_are_views_of_the_buckets(world: Runner) -> None:
    def work(comm: Communicator) -> list[bool]:
        model, same = DataParallel(comm, net(plain), bucket_cap=1000), []
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(batch(comm.rank)).sum().backward()
            held = [flat.untyped_storage().data_ptr() for flat in model._flat]
            same.append(all(p.grad is not None and p.grad.untyped_storage().data_ptr() in held for p in model.parameters()))
        return same

    # The first pass settles the order of the buckets: its gradients lie in those of before.
    assert world(work, 2) == [[False, True, True]] * 2


@pytest.mark.parametrize("what", ["a larger layer", "a layer more", "another cap"])
def test_ranks_whose_models_differ_are_told_at_once(world: Runner, what: str) -> None:
    def work(comm: Communicator) -> None:
        other = comm.rank == 1
        layers = [nn.Linear(3, 4 if other and what == "a larger layer" else 3)] * (2 if other and what == "a layer more" else 1)
        layers = [nn.Linear(layer.in_features, layer.out_features) for layer in layers]
        DataParallel(comm, nn.Sequential(*layers), 7 if other and what == "another cap" else 8)

    with pytest.raises(d2lps.Mismatch, match=r"rank 1 calls DataParallel\(bucket_cap="):
        world(work, 3)


def test_a_module_whose_wrapper_is_gone_says_so() -> None:
    def work(comm: Communicator) -> str:
        module = net(plain)
        DataParallel(comm, module)
        gc.collect()
        with pytest.raises(RuntimeError) as caught:
            module(batch(0)).sum().backward()
        return str(caught.value)

    assert all(told.startswith("the DataParallel of this module is gone") for told in simulated(work, 2))


class Borrowing(nn.Module):
    """It uses another module's weight without calling that, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.borrowed = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.called(x), self.borrowed.weight, self.borrowed.bias)


def test_a_step_for_which_no_forward_pass_has_asked_is_refused(world: Runner) -> None:
    def work(comm: Communicator) -> str:
        model = DataParallel(comm, Borrowing(), optimizer=partial(torch.optim.SGD, lr=0.1))
        for _ in range(2):  # after the first backward pass all take their steps
            model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 3)).sum().backward()
        return str(caught.value)

    said = "no forward pass has come to the modules of borrowed.weight, borrowed.bias, which so have not taken their last steps"
    assert world(work, 2) == [said] * 2


def test_what_goes_wrong_in_the_lane_comes_out_of_wait_and_of_finish(world: Runner) -> None:
    def refuse(comm: Communicator, piece: Tensor, number: int) -> None:
        if number:
            raise ValueError(f"tensor {number} is refused")

    def work(comm: Communicator, finishes: bool) -> None:
        scheduler = Scheduler(comm, [torch.ones(4), torch.ones(4), torch.ones(4)], piece=8, reduce=refuse)
        for number in range(3):
            scheduler.ready(number)
        scheduler.finish() if finishes else scheduler.wait(2)  # which the lane never comes to

    for finishes in (False, True):
        with pytest.raises(ValueError, match="tensor 1 is refused"):
            world(work, 2, finishes)


def test_a_rank_that_fails_in_its_backward_pass_ends_the_run(nothing_left: object) -> None:
    def work(comm: Communicator) -> None:
        first, *others = plain()
        model = DataParallel(comm, nn.Sequential(first, *others), bucket_cap=1)
        hidden = first(batch(0).float()) if comm.rank else model.module[0](batch(0).float())
        if comm.rank == 1:
            hidden.register_hook(lambda gradient: {}["in the backward pass"])
        nn.Sequential(*others)(hidden).sum().backward()

    for run in (d2lps.run, simulated):
        with pytest.raises(KeyError, match="in the backward pass"):
            run(work, 3)


# ---- DDP --------------------------------------------------------------------------------------------------------------


def beside_ddp(function: Callable[[Communicator, Any], Any], ranks: int) -> list[Any]:
    """On processes that have gloo as well, for torch's DDP."""

    def inside(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        d2lps.backend.group(comm)
        try:
            return function(comm, dist.new_group(backend="gloo"))
        finally:
            dist.destroy_process_group()

    return list(d2lps.run(inside, ranks))


def test_buckets_are_in_ddps_order_once_a_backward_pass_has_shown_it() -> None:
    def work(comm: Communicator, gloo: Any) -> list[Any]:
        found = []
        for make, caps in ((plain, (None, 0.001, 0.0001)), (Tied, (None, 0.0002, 0.00001))):
            for cap in caps:
                theirs = DistributedDataParallel(net(make), process_group=gloo, **({} if cap is None else {"bucket_cap_mb": cap}))
                ours = DataParallel(comm, net(make), None if cap is None else max(1, int(cap * 2**20)))
                for model in (theirs, ours) * 3:  # DDP makes its buckets anew in the second forward pass, and tells in the third
                    model(batch(comm.rank)).sum().backward()
                told = theirs._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
                found.append((ours.buckets, [[int(number) for number in bucket.split()] for bucket in told.split(",")]))
        return found

    for cases in beside_ddp(work, 2):
        assert all(ours == theirs for ours, theirs in cases)
        assert [len(ours) for ours, _ in cases] == [1, 3, 5, 1, 3, 6]


def test_in_ddp_the_forward_pass_decides_what_is_averaged_and_here_the_backward_pass() -> None:
    def work(comm: Communicator, gloo: Any) -> dict[str, tuple[bool, ...]]:
        makers = {"DDP": partial(DistributedDataParallel, process_group=gloo), "ours": partial(DataParallel, comm)}
        found: dict[str, list[bool]] = {name: [] for name in makers}
        for forward_inside in (False, True):
            for backward_inside in (False, True):
                for name, make in makers.items():
                    model = make(net(plain))
                    model(batch(comm.rank)).sum().backward()  # after which DDP knows its buckets
                    model.zero_grad()
                    with model.no_sync() if forward_inside else torch.enable_grad():
                        loss = model(batch(comm.rank)).sum()
                    with model.no_sync() if backward_inside else torch.enable_grad():
                        loss.backward()
                    one = next(model.parameters()).grad
                    both = [torch.zeros_like(one) for _ in range(comm.size)]
                    dist.all_gather(both, one.contiguous(), group=gloo)
                    found[name].append(torch.equal(*both))
        return {name: tuple(averaged) for name, averaged in found.items()}

    # forward and backward pass outside; the second inside; the first inside; both inside of no_sync
    assert beside_ddp(work, 2) == [{"DDP": (True, True, False, False), "ours": (True, False, True, False)}] * 2


# ---- what overlap gains -----------------------------------------------------------------------------------------------

BYTES, COMPUTE = 10_000_000, 0.010  # of a model of eight alike layers


def backward_pass(comm: Communicator, layers: Sequence[Layer], cap: int) -> float:
    """The seconds of the second one: in the first, the ranks agree on the order."""
    model, start = DataParallel(comm, Described(comm, layers), cap), 0.0
    for _ in range(2):
        loss, start = model(torch.ones(1, device=comm.device)).sum(), comm.now()
        loss.backward()
    return comm.now() - start


def seconds(bucket: int, layers: int = 8, latency: float = 0.0, ranks: int = 2) -> float:
    each = Layer(0.0, COMPUTE / layers, BYTES // layers)
    return d2lps.simulate(backward_pass, star(ranks, 1e9, latency), [each] * layers, bucket, device="meta", trace=False)[0]


@pytest.mark.parametrize(("number", "expected"), [(1, 0.020), (2, 0.015), (8, 0.01125)])
def test_what_overlap_gains_is_the_formula(number: int, expected: float) -> None:
    """10 ms of computing and 10 ms of sending, in b buckets: all of the one, and of the other what comes after the last."""
    assert expected == COMPUTE + COMPUTE / number
    assert seconds(BYTES // number) == pytest.approx(expected, rel=1e-9)


def test_the_best_bucket_is_neither_the_smallest_nor_the_largest() -> None:
    """Each bucket costs latencies, and what is sent after the last of them is not hidden."""
    layers, latency = 40, 5e-5
    times = {number: seconds(BYTES // number, layers, latency) for number in (1, 2, 4, 8, 20, 40)}
    best = min(times, key=lambda number: times[number])
    assert best == 8
    assert times[1] > 1.4 * times[best] and times[40] > 1.2 * times[best]
    falls = [later < earlier for earlier, later in pairwise(times.values())]
    assert falls == sorted(falls, reverse=True)  # first less and less, then more and more


def a_step(comm: Communicator, layers: Sequence[Layer], options: dict[str, Any]) -> float:
    """From the end of the second backward pass to that of the third."""
    sgd = partial(torch.optim.SGD, lr=0.0)
    model, ends = DataParallel(comm, Described(comm, layers), 1, optimizer=sgd, **options), []
    for _ in range(3):
        model(torch.ones(1, device=comm.device)).sum().backward()
        ends.append(comm.now())
    model.synchronize()
    return ends[2] - ends[1]


def test_what_is_needed_first_goes_first_and_a_model_with_a_heavy_end_trains_faster() -> None:
    """As VGG-16: nearly all operations are at its beginning, and nearly all parameters at its end."""
    layers = [Layer(0.0076, 0.0152, 4_500_000)] * 13
    layers += [Layer(0.0, 0.0, nbytes) for nbytes in (411_000_000, 67_000_000, 16_000_000)]
    computing = sum(layer.forward + layer.backward for layer in layers)
    sending = sum(layer.nbytes for layer in layers) * 1.5 / 3e9  # by a ring of four
    assert sending == pytest.approx(computing, rel=0.1)

    def step(**options: Any) -> float:
        return d2lps.simulate(a_step, star(4, 3e9, 5e-6), layers, options, device="meta", trace=False)[0]

    whole, cut = step(order="fifo"), step(order="fifo", piece=16_000_000)
    urgent, unlimited = step(order="priority", piece=16_000_000), step(order="priority")
    assert max(computing, sending) < urgent < 0.9 * min(whole, cut)
    assert urgent < unlimited  # a tensor that is not cut can't be overtaken


# ---- in what order ----------------------------------------------------------------------------------------------------


def sent(comm: Communicator, order: str, late: float = 0.0) -> tuple[list[tuple[int, int]], list[float]]:
    """Three tensors of 3, 1 and 2 pieces that get ready one after another: what is sent when, and the sums."""
    turns: list[tuple[int, int]] = []
    tensors = [torch.full((length,), float(comm.rank)) for length in (6, 2, 4)]

    def reduce(beside: Communicator, piece: Tensor, number: int) -> None:
        turns.append((number, piece.storage_offset() // 2))
        all_reduce(beside, piece)
        beside.sleep(0.01)

    scheduler = Scheduler(comm, tensors, order, piece=8, reduce=reduce)
    for number in range(3):
        comm.sleep(0.005 + (late if comm.rank == comm.size - 1 else 0.0))
        scheduler.ready(number)
    for number in (2, 0, 1):
        scheduler.wait(number)
    scheduler.finish()
    return turns, [tensor.unique().item() for tensor in tensors]


def test_of_what_is_ready_the_urgent_is_sent_first() -> None:
    fifo = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert simulated(sent, 2, "fifo")[0][0] == fifo
    assert simulated(sent, 2, "priority")[0][0] == [(0, 0), (2, 0), (2, 1), (1, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_all_ranks_send_in_one_order_though_one_is_late(ranks: int, order: str) -> None:
    turns, sums = zip(*simulated(sent, ranks, order, 0.02), strict=True)
    assert sums == ([ranks * (ranks - 1) / 2] * 3,) * ranks
    assert all(turn == turns[0] for turn in turns)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_so_they_do_on_processes(backend: str) -> None:
    turns, sums = zip(*d2lps.run(sent, 3, "priority", 0.01, backend=backend), strict=True)
    assert sums == ([3.0] * 3,) * 3
    assert sorted(turns[0]) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert turns[0] == turns[1] == turns[2]


@pytest.mark.parametrize("options", [{"piece": 0}, {"piece": True}, {"order": "lifo"}])
def test_a_schedule_that_is_none_is_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        simulated(lambda comm: Scheduler(comm, [torch.zeros(3)], **options), 2)


def test_tensors_that_lie_in_no_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors\[1\], float32\[3, 2\], does not lie in one run"):
        simulated(lambda comm: Scheduler(comm, [torch.zeros(3), torch.zeros(2, 3).T]), 2)


def test_messages_move_while_the_rank_computes() -> None:
    """Each waits for the other, so that no clock is needed: the layer for its neighbor's gradient, that for the layer."""

    def work(comm: Communicator) -> None:
        begun, tensor = Event(), torch.ones(1000)

        def reduce(beside: Communicator, piece: Tensor, number: int) -> None:
            beside.wait(begun)
            all_reduce(beside, piece)

        scheduler = Scheduler(comm, [tensor], reduce=reduce)
        scheduler.ready(0)
        with comm.compute("layer 0"):
            comm.signal(begun)
            scheduler.wait(0)
        scheduler.finish()

    trace = d2lps.run(work, 3, trace=True).trace
    assert trace is not None
    bars = trace.bars()
    for rank in range(3):
        (start,), (end,) = (bars["computing"][edge][bars["computing"]["rank"] == rank] for edge in ("start", "end"))
        sent, received = (trace.messages[end_of] == rank for end_of in ("src", "dst"))
        assert np.all(trace.messages["src_lane"][sent] == 1)
        # What it has sent may arrive after it has gone on: its neighbor may be late.
        assert np.all(trace.messages["start"][sent] > start) and np.all(trace.messages["end"][received] < end)
        assert sent.sum() == received.sum() == 4


def test_a_timeline_has_computing_and_messages_in_lanes_of_their_own() -> None:
    def work(comm: Communicator) -> None:
        model = DataParallel(comm, Described(comm, [Layer(0.001, 0.002, 4000)] * 3), 1)
        model(torch.ones(1)).sum().backward()

    for run in (simulated(work, 2), d2lps.run(work, 2, trace=True)):
        assert run.trace is not None
        blocks = run.trace.bars()["computing"]
        mine = blocks["rank"] == 0
        assert set(blocks["lane"][mine]) == {0}
        assert list(blocks["label"][mine]) == [f"forward {k}" for k in range(3)] + [f"backward {k}" for k in (2, 1, 0)]
        assert (run.trace.messages["src_lane"] == 1).sum() == 2 * 2 * 3  # of two ranks, both ways round the ring, for each layer
