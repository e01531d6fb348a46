"""The gradient noise scale: unbiased to the digit over all draws, right for a known noise, and against all examples at once."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import d2lps
from d2lps import Communicator
from d2lps.parallel import DataParallel, NoiseScale, Zero
from d2lps.parallel.data.noise import estimate, squares
from d2lps.topology import star


def of_ranks(gradients: Tensor, batch: int) -> tuple[float, float]:
    """gradients: a row for each rank."""
    return estimate(squares([gradients]) / len(gradients), squares([gradients.mean(0)]), batch, len(gradients))


def test_over_all_draws_the_estimates_are_the_truth() -> None:
    """Four examples, three ranks of one each: 64 draws, whose means are |G|^2 and the variance of the population exactly."""
    examples = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = torch.tensor([of_ranks(examples[list(draw)], 1) for draw in product(range(4), repeat=3)], dtype=torch.float64)
    gradient, noise = draws.mean(0).tolist()
    assert gradient == pytest.approx(squares([examples.mean(0)]), rel=1e-12)
    assert noise == pytest.approx(float(examples.var(0, correction=0).sum()), rel=1e-12)


@given(st.integers(2, 9), st.integers(1, 64), st.integers(0, 1000))
def test_noise_is_the_ranks_variance_times_the_batch(ranks: int, batch: int, seed: int) -> None:
    gradients = torch.randn(ranks, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradient, noise = of_ranks(gradients, batch)
    assert noise == pytest.approx(batch * float(gradients.var(0).sum()))
    assert gradient + noise / (batch * ranks) == pytest.approx(squares([gradients.mean(0)]))


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """And the gradient of each example, of a fixed linear model: the score's error times the input."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float64), torch.tensor(y)
    wrong = layer()(x).softmax(1).detach() - nn.functional.one_hot(y, 10)
    return x, y, torch.cat([torch.einsum("no,ni->noi", wrong, x).flatten(1), wrong], 1)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 10, dtype=torch.float64)


def watched(comm: Communicator, steps: int, smooth: float) -> tuple[float, float, float]:
    x, y, _ = digits()
    model = DataParallel(comm, layer())
    scale = NoiseScale(comm, model.parameters(), batch=4, smooth=smooth)
    for step in range(steps):
        model.zero_grad()
        part = slice(40 * step + 4 * comm.rank, 40 * step + 4 * comm.rank + 4)
        cross_entropy(model(x[part]), y[part]).backward()
        scale.update()
    return scale.gradient, scale.noise, scale.scale


@pytest.mark.parametrize("world", [d2lps.run, lambda work, ranks, *args: d2lps.simulate(work, star(ranks, 1e9, 1e-6), *args)])
def test_beside_data_parallel_it_sees_the_gradients_of_each_rank(world: Any) -> None:
    """Though DataParallel leaves their mean alone. The running means are those of exponential weights that sum to one."""
    each = digits()[2]
    seen = [of_ranks(each[40 * step : 40 * step + 16].unflatten(0, (4, 4)).mean(1), 4) for step in range(5)]
    weights = [0.8 ** (4 - step) for step in range(5)]
    gradient, noise = (sum(w * s[k] for w, s in zip(weights, seen, strict=True)) / sum(weights) for k in (0, 1))
    assert list(world(watched, 4, 5, 0.8)) == [pytest.approx((gradient, noise, noise / gradient), rel=1e-9)] * 4


def test_wrong_calls_say_what() -> None:
    with pytest.raises(ValueError, match="ranks=1"):
        estimate(1.0, 1.0, 8, 1)

    def work(comm: Communicator) -> None:
        weight = nn.Parameter(torch.ones(1))
        with pytest.raises(ValueError, match=r"smooth=1\.0"):
            NoiseScale(comm, [weight], 4, smooth=1.0)
        scale = NoiseScale(comm, [weight], 4)
        with pytest.raises(RuntimeError, match="no backward pass"):
            scale.update()
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="second backward pass"):
            weight.sum().backward()

    d2lps.simulate(work, star(2, 1e9, 1e-6))


def test_a_gradient_that_is_cleared_before_the_update_is_named() -> None:
    def work(comm: Communicator) -> None:
        zero = Zero(comm, module := nn.Linear(2, 3), torch.optim.SGD, 1)
        scale = NoiseScale(comm, module.parameters(), 4)
        module(torch.ones(4, 2)).sum().backward()
        zero.reduce()
        with pytest.raises(RuntimeError, match=r"parameter [01], float32\[3.*\], has no gradient any more"):
            scale.update()

    d2lps.simulate(work, star(2, 1e9, 1e-6))


def test_what_is_unfrozen_counts_and_what_is_frozen_does_not() -> None:
    """From the second step on, as one that was made then; of a frozen one a gradient is left over."""

    def work(comm: Communicator, first: int, last: int) -> float:
        """Of the last step, by who listens from the first on."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        net = DataParallel(comm, model)
        model[0].requires_grad_(False)
        for step in range(last + 1):
            if step == 2:
                model[0].requires_grad_(True)
            if step == 4:
                model[1].requires_grad_(False)
            if step == first:
                noise = NoiseScale(comm, model.parameters(), batch=4, smooth=0.0)
            (model[0] if step == 4 else model).zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            net(x).square().sum(1).mean().backward()
            if step >= first:
                noise.update()
        return noise.scale

    for step in (1, 3, 4):
        all_along, made_then = (d2lps.simulate(work, star(3, 1e9), first, step)[0] for first in (0, step))
        assert all_along == pytest.approx(made_then)
