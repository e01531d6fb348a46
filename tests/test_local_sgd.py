"""Local SGD and DiLoCo, on collectives and on the store, against one process that plays all workers with torch alone."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flat

import d2lps
from d2lps import Communicator, Deadlock, Mismatch, kvstore
from d2lps.collectives import all_reduce
from d2lps.comm import ReduceOp
from d2lps.kvstore.core.optimizers import make_optimizer
from d2lps.parallel import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.topology import star

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEPS = 14


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def batches(rank: int, steps: int = STEPS) -> Iterator[torch.Tensor]:
    own = torch.Generator().manual_seed(100 + rank)
    yield from (torch.randn(6, 5, generator=own) for _ in range(steps))


def descend(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    (net(batch) - batch.flip(1)).square().mean().backward()
    optimizer.step()


def alone(workers: int, every: int, fragments: int = 1, delay: int = 0, keep: float = 0.0, outer: Any = NESTEROV) -> torch.Tensor:
    """The shared weights at the end: what torchft.local_sgd does, told step by step."""
    nets = [network() for _ in range(workers)]
    optimizers, data = [adam(net) for net in nets], [batches(rank) for rank in range(workers)]
    shared, period, sent = flat(nets[0].parameters()).detach(), every // fragments, torch.empty(0)
    parts = shared.tensor_split(fragments)
    movers = [torch.optim.SGD([part], **outer) for part in parts]
    for step in range(1, STEPS + 1):
        for net, optimizer, own in zip(nets, optimizers, data, strict=True):
            descend(net, optimizer, next(own))
        weights = torch.stack([flat(net.parameters()).detach() for net in nets])
        if (step + delay) % period == 0:
            sent = shared - weights.mean(0)
        if step % period == 0:
            number = (step // period - 1) % fragments
            parts[number].grad = sent.tensor_split(fragments)[number]
            movers[number].step()
            for net, mine in zip(nets, weights, strict=True):
                part = mine.tensor_split(fragments)[number]
                part.copy_(keep * part + (1 - keep) * parts[number])
                nn.utils.vector_to_parameters(mine, net.parameters())
    return shared


def together(comm: Communicator, every: int, **options: Any) -> torch.Tensor:
    net = network()
    optimizer, diloco = adam(net), DiLoCo(comm, net.parameters(), every, **options)
    for batch in batches(comm.rank):
        descend(net, optimizer, batch)
        diloco.step()
    return diloco.shared


def served(kv: Any, every: int, **options: Any) -> torch.Tensor:
    net = network()
    optimizer, diloco = adam(net), DiLoCoWorker(kv, net.parameters(), every, **options)
    for batch in batches(kv.rank):
        descend(net, optimizer, batch)
        diloco.step()
    return diloco.start


def near(found: Any, wanted: torch.Tensor) -> None:
    for mine in found:
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)


# ---- the same as elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_diloco_is_what_one_process_gets(workers: int, every: int) -> None:
    wanted = alone(workers, every)
    near(d2lps.simulate(together, star(workers, 1e9), every), wanted)
    near(kvstore.simulate(served, star(workers + 2, 1e9), workers, 2, every, split=20), wanted)


@pytest.mark.parametrize(("workers", "every"), [(2, 3), (3, 7)])
def test_and_so_do_real_processes(workers: int, every: int) -> None:
    wanted = alone(workers, every)
    near(d2lps.run(together, workers, every), wanted)
    near(kvstore.run(served, workers, 1, every), wanted)


STREAMS = [(6, 2, 0, 0.0), (6, 6, 0, 0.0), (4, 1, 3, 0.0), (6, 2, 1, 0.5), (6, 2, 2, 1.0), (12, 4, 1, 0.25)]


@pytest.mark.parametrize(("every", "fragments", "delay", "keep"), STREAMS)
def test_fragments_in_turn_and_late(every: int, fragments: int, delay: int, keep: float) -> None:
    options = {"fragments": fragments, "delay": delay, "keep": keep}
    near(d2lps.simulate(lambda comm: together(comm, every, **options), star(3, 1e9)), alone(3, every, **options))


def test_fragments_late_on_real_processes() -> None:
    options = {"fragments": 2, "delay": 2, "keep": 0.5}
    near(d2lps.run(lambda comm: together(comm, 6, **options), 3), alone(3, 6, **options))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_each_step_with_rate_1_is_the_mean_of_the_weights(algorithm: str) -> None:
    def averaged(comm: Communicator, every: int) -> torch.Tensor:
        net = network()
        optimizer, local = adam(net), LocalSGD(comm, net.parameters(), every, algorithm)
        for batch in batches(comm.rank):
            descend(net, optimizer, batch)
            local.step()
        return flat(net.parameters()).detach()

    for every in (1, 7):
        wanted = alone(3, every, outer={"lr": 1.0})
        near(d2lps.simulate(lambda comm, h=every: together(comm, h, outer={"lr": 1.0}, algorithm=algorithm), star(3, 1e9)), wanted)
        near(d2lps.simulate(averaged, star(3, 1e9), every), wanted)
