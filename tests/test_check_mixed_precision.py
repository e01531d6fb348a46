"""The checks of *Mixed precision*: wrong answers are refused in words."""

import math

import pytest
import torch
from solutions import refused, solution

from d2lps import ReduceOp
from d2lps.collectives import all_reduce
from d2lps_book.check import mixed_precision as check


def nothing(*given):
    return given[:0] or None


# ---- stands_still -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.bfloat16, 7), (torch.float16, 10)])
@pytest.mark.parametrize("value", [1.0, 2.0, 3.0, 0.75, 1.25, 0.0625, 5.5])
def test_sums_do_stand_still_there(dtype, mantissa, value):
    total, step = torch.zeros((), dtype=dtype), torch.tensor(value, dtype=dtype)
    while (after := total + step) != total:
        total = after
    assert total.item() == solution("ex-precision-still")["stands_still"](value, mantissa)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(lambda value, mantissa: 2 ** (mantissa + 1), "2 again and again"),
     (lambda value, mantissa: 2 ** (mantissa + 1) * value, "3 again and again"),
     (lambda value, mantissa: 2.0 ** (mantissa + 1 + math.floor(math.log2(value))), "stops at 1,024"),
     (lambda value, mantissa: 2.0 ** (mantissa + 1 + math.floor(math.log2(value) + 1)), "stops at 256"),
     (lambda value, mantissa: 2.0 ** (mantissa + math.ceil(math.log2(value))), "half a step"),
     (lambda value, mantissa: 256 * 2.0 ** math.ceil(math.log2(value)), "with 10 bits"), (nothing, "None")],
)  # fmt: skip
def test_stands_still_refuses(wrong, words):
    refused(check.stands_still(wrong), words)


# ---- bytes_of_seven_billion ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [((27.5625, 27.5625, 27.5625, 126), "autocast: not 27.5625"), ((28, 14, 14, 126), "2(p - 1)/p"),
     ((55.125, 27.5625, 55.125, 126), "what does it travel as"), ((55.125, 27.5625, 27.5625, 112), "kept: not 112"),
     ((56, 28, 28, 126), "autocast: not 56"), ((55, 27.6, 27.6, 126), "Give three digits"), (55.125, "4 numbers")],
)  # fmt: skip
def test_bytes_refuses(answer, words):
    refused(check.bytes_of_seven_billion(answer), words)


# ---- all_finite ---------------------------------------------------------------------------------------------------------


def alone(comm, shard):
    return bool(shard.isfinite().all())


def by_the_sum(comm, shard):
    total = shard.sum(dtype=shard.dtype).reshape(1)
    all_reduce(comm, total)
    return bool(total.isfinite())


def by_a_wide_sum(comm, shard):
    total = shard.double().sum().reshape(1)
    all_reduce(comm, total)
    return bool(total.isfinite())


def by_the_largest(comm, shard):
    largest = shard.max().reshape(1) if len(shard) else torch.zeros(1, dtype=shard.dtype)
    all_reduce(comm, largest, ReduceOp.MAX)
    return bool(largest.isfinite())


def by_all_of_it(comm, shard):
    whole = torch.zeros(64)
    whole[: len(shard)] = (~shard.isfinite()).float()
    all_reduce(comm, whole)
    return whole.sum().item() == 0


def tensor_of_one(comm, shard):
    bad = (~shard.isfinite()).any().int().reshape(1)
    all_reduce(comm, bad)
    return bad == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(alone, "has it heard"), (by_the_sum, "which is finite"), (by_a_wide_sum, "at most 1.79769e+308, which is finite"),
     (by_the_largest, "-inf on rank"), (by_all_of_it, "bytes are sent"),
     (tensor_of_one, "a bool is wanted"), (lambda comm, shard: True, "inf on rank 0")],
)  # fmt: skip
def test_all_finite_refuses(wrong, words):
    refused(check.all_finite(wrong), words)


# ---- gradient_of_step ---------------------------------------------------------------------------------------------------


def step(wide=True, together=True, unscale_first=True, mean=True):
    """The solution, with some of its lines as they were."""

    def gradient_of_step(comm, micro_batches, scale, max_norm):
        total = torch.zeros_like(micro_batches[0], dtype=torch.float32 if wide else torch.bfloat16)
        for gradient in micro_batches:
            total += gradient
        good = total.isfinite().all()
        all_reduce(comm, total)
        good = total.isfinite().all() if together else good
        if unscale_first:
            total = total / scale / (comm.size if mean else 1)
        total *= min(1.0, max_norm / total.norm())
        if not good:
            return None
        return total if unscale_first else total.float() / scale / comm.size

    return gradient_of_step


def leaves_before_the_sum(comm, micro_batches, scale, max_norm):
    if not all(micro.isfinite().all() for micro in micro_batches):
        return None
    return step()(comm, micro_batches, scale, max_norm)


def sends_every_micro_batch(comm, micro_batches, scale, max_norm):
    whole = [micro.float() for micro in micro_batches]
    for gradient in whole:
        all_reduce(comm, gradient)
    total = sum(whole) / scale / comm.size
    return total * min(1.0, max_norm / total.norm()) if total.isfinite().all() else None


def clips_before_the_sum(comm, micro_batches, scale, max_norm):
    mine = sum(micro.float() for micro in micro_batches) / scale
    mine = torch.full_like(mine, torch.inf) if not mine.isfinite().all() else mine * min(1.0, max_norm / mine.norm())
    all_reduce(comm, mine)
    return mine / comm.size if mine.isfinite().all() else None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(step(wide=False), "added up"), (step(together=False), "overflow on rank"),
     (step(unscale_first=False), "norm that you clipped"), (step(mean=False), "mean one over the ranks"),
     (step(False, False, False), "added up"), (leaves_before_the_sum, "wait"), (clips_before_the_sum, "norm that you clipped"),
     (lambda comm, micro, scale, norm: sum(micro).float() / scale, "added up"),
     (lambda comm, micro, *more: step()(comm, [torch.stack(micro).float().mean(0)], *more), "the mean is over ranks, of sums"),
     (sends_every_micro_batch, "one all-reduce"),
     (nothing, "nothing has overflowed")],
)  # fmt: skip
def test_gradient_of_step_refuses(wrong, words):
    refused(check.gradient_of_step(wrong), words)


# ---- to_e4m3 ------------------------------------------------------------------------------------------------------------


def cast(scale_of, clamp=True, divide=True):
    def to_e4m3(x):
        scale = scale_of(x)
        scaled = x / scale if divide else x * scale
        return (scaled.clamp(-448, 448) if clamp else scaled).to(torch.float8_e4m3fn), scale

    return to_e4m3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(cast(lambda x: torch.tensor(1.0)), "off by"), (cast(lambda x: x.abs().max() / 448), "zeros"),
     (cast(lambda x: x.max().relu() / 448 + 1e-38), "minus its square: off by"),
     (cast(lambda x: x.abs().max() + 1e-38), "off by"),
     (cast(lambda x: x.abs().max() / 57344 + 1e-38), "off by"),
     (cast(lambda x: 448 / x.abs().max().clamp(min=1e-38), divide=False), "is `scale` what codes are to be multiplied by"),
     (cast(lambda x: x.abs().clamp(min=1e-38)), "a normal tensor: 1000 scales, and one is wanted"),
     (lambda x: x.to(torch.float8_e4m3fn), "a pair is wanted"),
     (lambda x: (x.to(torch.float8_e5m2), torch.tensor(1.0)), "no float8_e4m3fn"),
     (lambda x: (lambda c, s: (c.flatten(), s))(*solution("ex-precision-fp8")["to_e4m3"](x)), "shape")],
)  # fmt: skip
def test_to_e4m3_refuses(wrong, words):
    refused(check.to_e4m3(wrong), words)


# ---- by_chance ----------------------------------------------------------------------------------------------------------


def bits_of(x):
    return x.view(torch.int32)


def cut(x, noise):
    return ((bits_of(x) + noise) & -(2**16)).view(torch.float32).bfloat16()


def noisy(most):
    return lambda x, dice: cut(x, torch.randint(most, x.shape, generator=dice, dtype=torch.int32))


def half_and_half(x, dice):
    up = torch.randint(2, x.shape, generator=dice, dtype=torch.int32) * (2**16 - 1)
    return cut(x, up)


def away_from_exact(x, dice):
    return cut(x, torch.randint(1, 2**16 + 1, x.shape, generator=dice, dtype=torch.int32))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(lambda x, dice: x.bfloat16(), "the mean"), (half_and_half, "the mean"), (noisy(2**15), "the mean"),
     (noisy(2**17), "becomes"), (lambda x, dice: noisy(2**16)(x, dice).float(), "not BF16"), (away_from_exact, "1: becomes"),
     (lambda x, dice: cut(x, torch.randint(2**16, x.shape, generator=dice)), "have the bits become int64"),
     (away_from_exact, "but is a number of BF16 itself"),
     (lambda x, dice: noisy(2**16)(x, torch.Generator().manual_seed(7)), "the same seed")],
)  # fmt: skip
def test_by_chance_refuses(wrong, words):
    refused(check.by_chance(wrong), words)
