"""The checks of *Mixed precision*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refusing, solution

from d2lps.collectives import all_reduce


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.bfloat16, 7), (torch.float16, 10)])
@pytest.mark.parametrize("value", [1.0, 2.0, 3.0, 0.75, 1.25, 0.0625, 5.5])
def test_sums_do_stand_still_there(dtype, mantissa, value):
    total, step = torch.zeros((), dtype=dtype), torch.tensor(value, dtype=dtype)
    while (after := total + step) != total:
        total = after
    assert total.item() == solution("ex-precision-still")["stands_still"](value, mantissa)


def nothing(*given):
    return given[:0] or None


def clips_before_the_sum(comm, micro_batches, scale, max_norm):
    mine = sum(micro.float() for micro in micro_batches) / scale
    mine = torch.full_like(mine, torch.inf) if not mine.isfinite().all() else mine * min(1.0, max_norm / mine.norm())
    all_reduce(comm, mine)
    return mine / comm.size if mine.isfinite().all() else None


STILL = "2.0 ** (mantissa + 1 + math.ceil(math.log2(value))) -> "
COUNT, FINITE = "count = torch.tensor([bad], device=comm.device) -> count = ", "count.item() == 0 -> bool(count.isfinite())"
NARROW = "dtype=torch.float32 -> dtype=torch.bfloat16"
ALONE = ("all_reduce(comm, total) -> good = total.isfinite().all(); all_reduce(comm, total)",
         "not total.isfinite().all() -> not good")  # fmt: skip
CLIPPED_FIRST = ("total /= scale * comm.size -> pass", "max_norm / total.norm()) -> max_norm / total.norm()) / scale / comm.size")
BEGIN = "total = torch.zeros_like -> "
SCALE = "largest / 448 if largest > 0 else torch.tensor(1.0) -> "

test_refused = refusing({
    "ex-precision-still stands_still": [
        (f"{STILL}2 ** (mantissa + 1)", "2 again and again"),
        (f"{STILL}2 ** (mantissa + 1) * value", "3 again and again"),
        (f"{STILL}2.0 ** (mantissa + 1 + math.floor(math.log2(value)))", "stops at 1,024"),
        (f"{STILL}2.0 ** (mantissa + 1 + math.floor(math.log2(value) + 1))", "stops at 256"),
        (f"{STILL}2.0 ** (mantissa + math.ceil(math.log2(value)))", "half a step"),
        (f"{STILL}256 * 2.0 ** math.ceil(math.log2(value))", "with 10 bits"),
        (nothing, "None"),
    ],
    "ex-precision-bytes bytes_of_seven_billion": [
        ("(27.5625, 27.5625, 27.5625, 126)", "autocast: not 27.5625"), ("(28, 14, 14, 126)", "2(p - 1)/p"),
        ("(55.125, 27.5625, 55.125, 126)", "what does it travel as"), ("(55.125, 27.5625, 27.5625, 112)", "kept: not 112"),
        ("(56, 28, 28, 126)", "autocast: not 56"), ("(55, 27.6, 27.6, 126)", "Give three digits"), ("55.125", "4 numbers"),
    ],
    "ex-precision-skip all_finite": [
        ("all_reduce(comm, count) -> pass", "has it heard"),
        ((f"{COUNT}shard.sum(dtype=shard.dtype).reshape(1)", FINITE), "which is finite"),
        ((f"{COUNT}shard.double().sum().reshape(1)", FINITE), "at most 1.79769e+308, which is finite"),
        ((f"{COUNT}shard.max().reshape(1) if len(shard) else torch.zeros(1, dtype=shard.dtype)", FINITE,
          "all_reduce(comm, count) -> all_reduce(comm, count, d2lps.ReduceOp.MAX)"), "-inf on rank"),
        ((f"{COUNT}torch.zeros(64); count[: len(shard)] = (~shard.isfinite()).float()", "count.item() -> count.sum().item()"),
         "bytes are sent"),
        ("count.item() == 0 -> count == 0", "a bool is wanted"),
        (lambda comm, shard: True, "inf on rank 0"),
    ],
    "ex-precision-bugs gradient_of_step": [
        (NARROW, "added up"),
        (ALONE, "overflow on rank"),
        (CLIPPED_FIRST, "norm that you clipped"),
        ((NARROW, *ALONE, *CLIPPED_FIRST), "added up"),
        ("total /= scale * comm.size -> total /= scale", "mean one over the ranks"),
        (f"{BEGIN}if not all(micro.isfinite().all() for micro in micro_batches): return None\n    total = torch.zeros_like",
         "wait"),
        (f"{BEGIN}micro_batches = [torch.stack(micro_batches).float().mean(0)]; total = torch.zeros_like",
         "the mean is over ranks, of sums"),
        (("total += gradient -> all_reduce(comm, gradient := gradient.float()); total += gradient",
          "all_reduce(comm, total) -> pass"), "one all-reduce"),
        (clips_before_the_sum, "norm that you clipped"),
        (lambda comm, micro, scale, norm: sum(micro).float() / scale, "added up"),
        (nothing, "nothing has overflowed"),
    ],
    "ex-precision-fp8 to_e4m3": [
        (f"{SCALE}torch.tensor(1.0)", "off by"),
        (f"{SCALE}largest / 448", "zeros"),
        (f"{SCALE}x.max().relu() / 448 + 1e-38", "minus its square: off by"),
        (f"{SCALE}largest + 1e-38", "off by"),
        (f"{SCALE}largest / 57344 + 1e-38", "off by"),
        ((f"{SCALE}448 / largest.clamp(min=1e-38)", "(x / scale) -> (x * scale)"),
         "is `scale` what codes are to be multiplied by"),
        (f"{SCALE}x.abs().clamp(min=1e-38)", "a normal tensor: 1000 scales, and one is wanted"),
        (lambda x: x.to(torch.float8_e4m3fn), "a pair is wanted"),
        ("float8_e4m3fn -> float8_e5m2", "no float8_e4m3fn"),
        ("float8_e4m3fn) -> float8_e4m3fn).flatten()", "shape"),
    ],
    "ex-precision-chance by_chance": [
        (lambda x, dice: x.bfloat16(), "the mean"),
        ("torch.randint(2**16, -> (2**16 - 1) * torch.randint(2,", "the mean"),
        ("randint(2**16, -> randint(2**15,", "the mean"),
        ("randint(2**16, -> randint(2**17,", "becomes"),
        ("randint(2**16, -> randint(1, 2**16 + 1,", "1: becomes", "but is a number of BF16 itself"),
        ("bits.view(torch.float32).bfloat16() -> bits.view(torch.float32)", "not BF16"),
        ("dtype=torch.int32) -> dtype=torch.int64)", "have the bits become int64"),
        ("generator=dice -> generator=torch.Generator().manual_seed(7)", "the same seed"),
    ],
})  # fmt: skip
