"""ZeRO's three stages and clipping, against one process, torch's FSDP2 and ZeroRedundancyOptimizer, and formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import d2lps
from d2lps import Communicator
from d2lps.parallel import Transformer, Zero, clip_by_global_norm
from d2lps.topology import star

TIED = Transformer(layers=2, hidden=8, heads=2, vocab=11, sequence=8, tied=True)
TOKENS = torch.randint(0, 11, (24, 9), generator=torch.Generator().manual_seed(3))
ADAM = partial(torch.optim.Adam, lr=1e-2)


def simulated(function: Callable[..., Any], ranks: int, *args: Any) -> d2lps.Run:
    return d2lps.simulate(function, star(ranks, 1e9, 1e-6), *args)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@cache
def alone(max_norm: float | None = None) -> tuple[list[float], list[float], list[Tensor]]:
    """One process: its losses, the norms of its gradients, its weights after three steps."""
    model = TIED.module(0, torch.float64)
    optimizer, losses, norms = ADAM(model.parameters()), [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, TOKENS)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, [p.detach() for p in model.parameters()]


def together(comm: Communicator, stage: int, max_norm: float | None = None, parts: int = 1, **options: Any) -> Any:
    model = TIED.module(comm.rank, torch.float64)  # other weights on each rank, until rank 0's are everyone's
    zero = Zero(comm, model, ADAM, stage, **options)
    losses, norms = [], []
    for _ in range(3):
        for mine in TOKENS.chunk(comm.size)[comm.rank].chunk(parts):
            loss = loss_of(model, mine)
            (loss / parts).backward()
            losses.append(loss.item() / parts)
        if max_norm is not None:
            zero.reduce()
            norms.append(clip_by_global_norm(zero.shards, max_norm).item())
        zero.step()
    with zero.gathered():
        return losses, norms, [p.detach().clone() for p in model.parameters()]


def agrees(run: d2lps.Run, max_norm: float | None = None) -> None:
    _, norms, weights = alone(max_norm)
    for _, told, mine in run:
        assert told == pytest.approx(norms, rel=1e-10) or max_norm is None
        for one, other in zip(weights, mine, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_it_trains_as_one_process(ranks: int, stage: int, overlap: bool) -> None:
    agrees(simulated(partial(together, overlap=overlap), ranks, stage))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_processes(stage: int) -> None:
    agrees(d2lps.run(partial(together, overlap=True, group=2), 4, stage, 0.5), 0.5)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_sharded_within_and_replicated_between(stage: int, group: int) -> None:
    agrees(simulated(partial(together, group=group, parts=3), 4, stage, 0.5), 0.5)
