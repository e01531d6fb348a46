"""Unchanged DDP with our codecs, beside torch's own hooks."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import d2lps
from d2lps import backend, compress
from d2lps.backend.processgroup import store_of
from d2lps.comm import Communicator
from d2lps.compress.power_sgd import PowerSGD

ONE, SEVERAL = 100.0, 0.01  # MB of a bucket: all of the model, less than a layer


ALIVE: list[Any] = []


class WithTorchsQ(PowerSGD):
    """Begins with what torch's hook draws for the matrices of one bucket, one after another."""

    drawn: torch.Generator

    def first_q(self, like: torch.Tensor, turn: int = 0) -> torch.Tensor:
        return torch.randn(self.factors(like)[1:], generator=self.drawn)


def hook_of(which: str, group: Any) -> Any:
    if which == "torch's fp16":
        return group, default_hooks.fp16_compress_hook
    if which == "torch's PowerSGD":
        state = powerSGD_hook.PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=1)
        return state, powerSGD_hook.powerSGD_hook
    codec: compress.Codec
    if which == "torch's Q":
        WithTorchsQ.drawn = torch.Generator().manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        codec = WithTorchsQ(rank=2, seed=0)
    else:
        codec = {"top_k": lambda: compress.top_k(0.1)}.get(which, getattr(compress, which))()
    return backend.ddp_hook(codec, group, start=2)


def train(comm: Communicator, kind: str, which: str, megabytes: float, steps: int = 6) -> list[Any]:
    """The weights after some steps, and how many buckets there were."""
    if kind == "d2lps":
        group = backend.group(comm)
    else:
        dist.init_process_group(kind, store=store_of(comm), rank=comm.rank, world_size=comm.size)
        group = dist.group.WORLD
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    model = DistributedDataParallel(net, bucket_cap_mb=megabytes, process_group=group)
    state, hook = hook_of(which, group)
    indices = set()

    def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        indices.add(bucket.index())
        return hook(state, bucket)

    model.register_comm_hook(state, counting)
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(comm.rank))
    for _ in range(steps):
        model.zero_grad()
        model(data).pow(2).mean().backward()
        with torch.no_grad():  # torch.optim's first step imports torch's compiler, which takes each process seconds
            for each in net.parameters():
                each -= 0.5 * each.grad
    weights = torch.cat([each.detach().flatten() for each in net.parameters()])
    # torch's PowerSGD waits in gloo's own thread, which at times has the last reference: that thread would wait for itself.
    ALIVE.append(group)
    if "torch" not in which:
        dist.destroy_process_group()
    return [weights, len(indices)]


def of(kind: str, which: str, megabytes: float, ranks: int = 3) -> Any:
    run = d2lps.run(train, ranks, kind, which, megabytes)
    assert all(torch.equal(weights, run[0][0]) for weights, _ in run), "the same on all ranks"
    return run[0]


@pytest.mark.parametrize(("theirs", "ours"), [("torch's fp16", "half"), ("torch's PowerSGD", "torch's Q")])
def test_it_is_as_good_as_torchs_hook(theirs: str, ours: str) -> None:
    (expected, _), found = of("gloo", theirs, ONE), of("gloo", ours, ONE)
    off = 1e-4 if ours == "half" else 1e-5
    torch.testing.assert_close(found[0], expected, rtol=off, atol=off)
    assert found[1] == 1


@pytest.mark.parametrize(
    ("kind", "which"), [("gloo", "power_sgd"), ("d2lps", "power_sgd"), ("d2lps", "half"), ("d2lps", "one_bit"), ("gloo", "top_k")]
)
def test_several_buckets(kind: str, which: str) -> None:
    """In which torch's PowerSGD aborts; a codec that takes gradient by gradient does not care how they are cut."""
    weights, buckets = of(kind, which, SEVERAL)
    assert buckets > 1 and weights.isfinite().all()
    if which in ("power_sgd", "half"):
        torch.testing.assert_close(weights, of(kind, which, ONE)[0], rtol=1e-4, atol=1e-4)


def test_a_start_before_buckets_are_settled_is_refused() -> None:
    with pytest.raises(ValueError, match="start=0 is not a whole number from 1 up"):
        backend.ddp_hook(compress.half(), start=0)


# ---- what is left unsent ----------------------------------------------------------------------------------------------


def passed_on(comm: Communicator, which: str, megabytes: float, passes: int = 5) -> list[Any]:
    """Of each parameter: the averages of all passes, and the gradients that this rank has given, with what is left of them."""
    backend.group(comm)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3, bias=False)).double()
    model = DistributedDataParallel(net, bucket_cap_mb=megabytes, static_graph=True)
    codec = compress.top_k(0.3) if which == "top_k" else getattr(compress, which)()
    state, hook = backend.ddp_hook(codec)
    shapes = []

    def spy(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        shapes.append([tuple(each.shape) for each in bucket.parameters()])
        return hook(state, bucket)

    model.register_comm_hook(state, spy)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64)
    mine = [passes * each for each in torch.autograd.grad(net(x).square().sum(), list(net.parameters()))]
    averages = [torch.zeros_like(each) for each in mine]
    for _ in range(passes):
        model.zero_grad()
        model(x).square().sum().backward()
        for average, each in zip(averages, net.parameters(), strict=True):
            average += each.grad
    for given, each in zip(mine, net.parameters(), strict=True):
        name = state.names[each]
        given -= state.feedback.left[name].view(each.shape)
        if (second := state.feedback.second.get(name)) is not None:
            given.view(-1)[state.feedback.starts[name] :][: len(second)] -= second
    return [averages, mine, shapes]


@pytest.mark.parametrize("megabytes", [ONE, 1e-5])
@pytest.mark.parametrize("which", ["top_k", "one_bit", "power_sgd"])
def test_residuals_follow_their_parameters_when_ddp_cuts_its_buckets_anew(which: str, megabytes: float) -> None:
    """Of a static graph that is after the second pass, of which `start=1` has already compressed one."""
    run = d2lps.run(passed_on, 3, which, megabytes)
    shapes = run[0][2]
    assert shapes[0] != shapes[-1]
    for number, average in enumerate(run[0][0]):
        torch.testing.assert_close(average * 3, sum(rank[1][number] for rank in run), rtol=1e-10, atol=1e-10)


class Refusing(compress.Codec):
    """It encodes when it is asked for the second time."""

    def encode(self, tensor: torch.Tensor, turn: int = 0) -> torch.Tensor:
        if not hasattr(self, "asked"):
            self.asked = True
            raise KeyError("of the codec")
        return tensor.clone()

    def decode(self, sent: torch.Tensor, like: torch.Tensor, turn: int = 0) -> torch.Tensor:
        return sent.clone()


def test_what_goes_wrong_in_a_hook_comes_out_as_it_is_and_ddp_goes_on() -> None:
    def work(comm: Communicator) -> tuple[str, list[float]]:
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=backend.group(comm))
        model.register_comm_hook(*backend.ddp_hook(Refusing()))
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(KeyError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
        return str(caught.value), model.module.weight.grad.flatten().tolist()

    assert d2lps.run(work, 2) == [("'of the codec'", [1.5, 1.5])] * 2


OVERFLOWS = 3  # the step


def scaled(comm: Communicator, codec: compress.Codec, scales: bool) -> tuple[torch.Tensor, float]:
    """Eight steps, in one of which a gradient overflows on rank 1: with a GradScaler, or without that step."""
    backend.group(comm)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Linear(32, 8)
    model, descent = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2, enabled=scales)
    state, hook = backend.ddp_hook(codec, scaler=scaler)
    model.register_comm_hook(state, hook)
    for step in range(8):
        bad = comm.rank == 1 and step == OVERFLOWS
        if not scales and step == OVERFLOWS:
            continue
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        descent.zero_grad()
        scaler.scale(model(x).square().mean() * (1e36 if bad else 1)).backward()
        scaler.step(descent)
        scaler.update()
    return torch.cat([net.weight.detach().flatten(), *map(torch.flatten, state.feedback.left.values())]), scaler.get_scale()


@pytest.mark.parametrize("which", ["half", "top_k", "one_bit", "power_sgd"])
def test_an_overflow_passes_and_residuals_know_of_the_scale(which: str) -> None:
    codec = compress.top_k(0.3) if which == "top_k" else getattr(compress, which)()
    found, expected = (d2lps.run(scaled, 2, codec, scales) for scales in (True, False))
    for (state, scale), (plain, _) in zip(found, expected, strict=True):
        assert scale == 2.0**40 * 2 / 2 * 2 * 2  # it has grown, shrunk by the overflow, and grown twice
        if which == "half":  # which cuts off what is beyond its range, and keeps it: the scale makes a difference
            assert plain.isfinite().all() and state.isfinite().all()
        else:
            torch.testing.assert_close(state, plain, rtol=1e-4, atol=1e-5)


def test_an_overflow_without_a_scaler_is_warned_of() -> None:
    def work(comm: Communicator) -> tuple[bool, list[str]]:
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=backend.group(comm))
        model.register_comm_hook(*backend.ddp_hook(compress.top_k(0.5)))
        finite = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for factor in (1.0, 1.0, math.inf if comm.rank else 1.0):
                model.zero_grad()
                (model(torch.ones(1, 2)).sum() * factor).backward()
                finite.append(bool(model.module.weight.grad.isfinite().all()))
        return finite == [True, True, False], [str(each.message) for each in caught]

    for comes_through, said in d2lps.run(work, 2):
        assert comes_through and "tell ddp_hook(..., scaler=)" in said[-1]
