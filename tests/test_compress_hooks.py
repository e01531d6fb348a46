"""Unchanged DDP with our codecs, beside torch's own hooks."""

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
    model.register_comm_hook(state, hook)
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(comm.rank))
    for _ in range(steps):
        model.zero_grad()
        model(data).pow(2).mean().backward()
        with torch.no_grad():  # torch.optim's first step imports torch's compiler, which takes each process seconds
            for each in net.parameters():
                each -= 0.5 * each.grad
    weights = torch.cat([each.detach().flatten() for each in net.parameters()])
    buckets = len(state.feedback.turns) if hasattr(state, "feedback") else 0
    # torch's PowerSGD waits in gloo's own thread, which at times has the last reference: that thread would wait for itself.
    ALIVE.append(group)
    if "torch" not in which:
        dist.destroy_process_group()
    return [weights, buckets]


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
