"""Tensor parallelism against one process, and its collectives against DTensor's, which torch's CommDebugMode counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import d2lps
from d2lps import Communicator
from d2lps.parallel import Transformer, sum_partial, tensor_parallel, vocab_cross_entropy
from d2lps.parallel.shard import cut, shard_of
from d2lps.topology import star

SMALL = Transformer(layers=2, hidden=48, heads=24, vocab=96, sequence=24)
KINDS = {
    "plain": SMALL,
    "tied": replace(SMALL, tied=True),
    "gated": replace(SMALL, gated=True, ffn=72),
    "shared heads": replace(SMALL, kv_heads=2),
    "all at once": replace(SMALL, kv_heads=8, gated=True, tied=True, ffn=72),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def simulated(function: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> d2lps.Run:
    return d2lps.simulate(function, star(ranks, 1e9, 1e-6), *args, **options)


def text(sizes: Transformer) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(sizes.vocab, (3, sizes.sequence + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1], drawn[:, 1:]


def alone(sizes: Transformer, dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
    """The loss, and the gradients by name, of one process."""
    model = sizes.module(seed=1, dtype=dtype)
    tokens, targets = text(sizes)
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def step(comm: Communicator, sizes: Transformer, dtype: torch.dtype, sequence: bool, algorithm: str = "ring") -> tuple[float, float]:
    """The loss of this rank, and how far its gradients are from one process's, as a part of the largest."""
    model = tensor_parallel(comm, sizes.module(seed=1, dtype=dtype), sequence, algorithm=algorithm)
    tokens, targets = text(sizes)
    loss = vocab_cross_entropy(comm, model(tokens), targets, algorithm)
    loss.backward()
    sum_partial(model)
    _, expected = alone(sizes, dtype)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    return loss.item(), max(away(parameter, expected[name]) for name, parameter in model.named_parameters()) / largest


def away(parameter: Tensor, whole: Tensor) -> float:
    shard = shard_of(parameter)
    mine = whole if shard is None else cut(shard.comm, whole, shard.dim)
    assert parameter.grad is not None and parameter.grad.shape == mine.shape
    return (parameter.grad - mine).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_as_one_process(kind: str, ranks: int, sequence: bool) -> None:
    sizes = KINDS[kind] if ranks != 3 else replace(KINDS[kind], kv_heads={None: None, 2: 1, 8: 12}[KINDS[kind].kv_heads])
    for loss, error in simulated(step, ranks, sizes, torch.float64, sequence):
        assert loss == pytest.approx(alone(sizes, torch.float64)[0], rel=1e-12)
        assert error < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_on_processes(sequence: bool, dtype: torch.dtype) -> None:
    for ranks in (2, 4):
        errors = [error for _, error in d2lps.run(step, ranks, KINDS["all at once"], dtype, sequence)]
        assert max(errors) < TOLERANCE[dtype]
