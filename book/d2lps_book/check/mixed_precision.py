"""Checks of the exercises of *Mixed precision*."""

import math
from typing import Any

import torch
from torch import Tensor

from d2lps.result import Run
from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import parts, refuse

__all__ = ["all_finite", "by_chance", "bytes_of_seven_billion", "gradient_of_step", "stands_still", "to_e4m3"]

_RANKS = (1, 2, 3, 5, 8)


@judged
def stands_still(function: Function) -> str:
    """Check `function(value, mantissa)`: the number at which a sum of equal values stops, rounded after each."""
    for mantissa in (7, 10, 3, 2, 14):
        for value in (1.0, 2.0, 3.0, 0.75, 1.25, 0.0625, 5.5):
            got, wanted = function(value, mantissa), 2.0 ** (mantissa + 1 + math.ceil(math.log2(value)))
            said = f"{value:g} again and again, with {mantissa} bits of mantissa: you say {got}, and it stops at {wanted:,.10g}"
            refuse((got != wanted, f"{said}; how long is half a step there, and which neighbor does the middle go to?"))
    return "it stops where you say, in formats of 2 to 14 bits"


@answered
def bytes_of_seven_billion(answer: Any) -> str:
    """Check the answers: GB that a rank sends under autocast, in BF16, with a wide sum; GB that it keeps."""
    hint = "What all-reduce can't do without is 2(p - 1)/p of the tensor, and p is 64. Give three digits."
    parts("7 billion parameters", answer, ("autocast", 55.125, f"Which dtype has the gradient of an FP32 parameter? {hint}"),
          ("BF16", 27.5625, hint), ("wide", 27.5625, "It is added up in FP32; what does it travel as?"),
          ("kept", 126.0, "Weights 2, masters 4, Adam's two moments 8, and the gradients, in FP32."), within=0.002)  # fmt: skip
    return "autocast sends what FP32 sends, 16 bits send half, and nobody keeps less than in FP32"


@judged
def all_finite(function: Function) -> str:
    """Check `function(comm, shard)`: whether all ranks' shards are finite, on every rank, by one message's worth of bytes."""
    for p in _RANKS:
        for who, bad in [(None, 0.0), *((rank, bad) for rank in {0, p - 1} for bad in (torch.inf, -torch.inf, torch.nan))]:
            for dtype in (torch.float16, torch.float32, torch.float64):
                _one_is_bad(function, p, who, bad, dtype)
    return f"{', '.join(map(str, _RANKS))} ranks: all agree, and hardly anything is sent"


def _one_is_bad(function: Function, p: int, who: int | None, bad: float, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max

    def work(comm: Any) -> Any:
        shard = torch.full((3 + comm.rank if comm.rank % 3 != 2 else 0,), large, dtype=dtype)
        if comm.rank == who:
            shard = torch.cat([shard, torch.tensor([bad, 1.0], dtype=dtype)])
        return function(comm, shard)

    run, case = among(p, work), f"{plural(p, 'rank')}, {'all finite' if who is None else f'{bad} on rank {who}'}"
    hint = f"; all numbers are at most {large:g}, which is finite" if who is None else "; has it heard of the others?"
    for rank, got in enumerate(run):
        refuse((not isinstance(got, bool), f"{case}: rank {rank} returns {got!r}, and a bool is wanted"),
               (got != (who is None), f"{case}: rank {rank} says {got}{hint}"))
    sent = int(run.trace.bytes_sent().sum())
    refuse((sent > 16 * (p - 1), f"{case}: {sent} bytes are sent; an all-reduce of one number does with {16 * (p - 1)}"))


@judged
def gradient_of_step(function: Function) -> str:
    """Check `function(comm, micro_batches, scale, max_norm)`: the unscaled, clipped mean gradient, or None on all ranks alike."""
    for p in _RANKS:
        for scale, max_norm, many in ((1.0, 1e9, 1), (2.0**12, 1e9, 300), (2.0**16, 0.5, 3), (2.0**16, 1e-3, 2)):
            if many * p > 600:
                continue  # said at one rank and two
            given = [[_micro_batch(rank, k, many) * scale for k in range(many)] for rank in range(p)]
            mean = torch.stack([micro.double() for mine in given for micro in mine]).sum(0) / scale / p
            mean = mean * min(1.0, max_norm / mean.norm().item())
            case = f"{plural(p, 'rank')}, {many} micro-batch{'es' * (many > 1)}, scale {scale:g}, max_norm {max_norm:g}"
            run = _stepped(function, given, scale, max_norm)
            sent, most = int(run.trace.bytes_sent().sum()), 2 * (p - 1) * 4 * 50
            for rank, got in enumerate(run):
                refuse((not isinstance(got, Tensor), f"{case}: rank {rank} returns {got!r}, though nothing has overflowed"))
                length, off = got.double().norm().item() / mean.norm().item(), (got.double() - mean).norm() / mean.norm()
                added = "in which dtype are micro-batches added up?" if 0.9 < length < 1.1 else "the mean is over ranks, of sums"
                hint = {1: "is the mean one over the ranks?", 300: added}
                said = f"{case}: rank {rank}'s gradient is {length:.3g} times as long as it should be, off by {float(off):.1%}: "
                refuse((not off < 0.02, said + hint.get(many, "what was in the norm that you clipped?")))
            refuse((sent > most, f"{case}: {sent:,} bytes are sent; one all-reduce in FP32, of the sum, does with {most:,}"))
        for who in {0, p - 1}:
            given = [[torch.full((4,), torch.inf if rank == who else 1.0).bfloat16()] for rank in range(p)]
            for rank, got in enumerate(_stepped(function, given, 2.0, 1e9)):
                said = f"{p} ranks, an overflow on rank {who}: rank {rank} steps, and should do as all do: nothing"
                refuse((got is not None, said))
    return "micro-batches in FP32, one decision for all, and the scale is out before the norm is looked at"


def _micro_batch(rank: int, k: int, many: int) -> Tensor:
    """Of numbers that agree where they are many, so that they stand still in BF16; else of ranks that differ in length, too."""
    noise = torch.randn(50, generator=torch.Generator().manual_seed(1000 * rank + k))
    return (1.0 + 0.1 * noise).bfloat16() if many > 3 else ((rank + 1) * noise).bfloat16()


def _stepped(function: Function, given: list[list[Tensor]], *how: float) -> Run:
    return among(len(given), lambda comm: function(comm, [micro.clone() for micro in given[comm.rank]], *how))


@judged
def to_e4m3(function: Function) -> str:
    """Check `function(x)`: (codes, scale), as near to x as one scale for the whole tensor allows."""
    dice = torch.Generator().manual_seed(0)
    normal = torch.randn(1000, generator=dice)
    for name, x in {"a normal tensor": normal, "a thousand times it": 1000 * normal, "1e-20 of it": 1e-20 * normal,
                    "1e30 of it": 1e30 * normal, "minus its square": -normal.view(10, 100) ** 2, "a -3": torch.tensor([-3.0]),
                    "zeros": torch.zeros(5)}.items():  # fmt: skip
        given = function(x.clone())
        refuse((not isinstance(given, tuple | list) or len(given) != 2, f"{name}: a pair is wanted, (codes, scale)"))
        codes, scale = given
        refuse((getattr(codes, "dtype", None) != torch.float8_e4m3fn, f"{name}: codes are no float8_e4m3fn"),
               (codes.shape != x.shape, f"{name}: codes are of shape {tuple(codes.shape)}, x is {tuple(x.shape)}"),
               ((many := torch.as_tensor(scale).numel()) != 1, f"{name}: {many} scales, and one is wanted for the whole tensor"))
        back, largest = codes.float() * scale, x.abs().max()
        refuse((not bool(back.isfinite().all()), f"{name}: codes * scale has {back[~back.isfinite()][:1].tolist()} in it"))
        off, step = (back - x).abs(), largest / 448 * 2.0**-10
        bad = off > x.abs() * 2.0**-4 * 1.01 + step * 1.01
        share = (off[bad] / x.abs()[bad]).max().item() if bool(bad.any()) else 0.0
        ask = "is `scale` what codes are to be multiplied by?" if share > 2 else "does the largest number get the largest code?"
        refuse((bool(bad.any()), f"{name}: off by {share:,.0%} of an element, and 6% is what E4M3 needs; {ask}"))
    return "numbers of any size, each within a sixteenth of itself, or half of the smallest step"


@judged
def by_chance(function: Function) -> str:
    """Check `function(x, dice)`: a BF16 neighbor of each x, the upper or the lower one, with x for a mean."""
    many = 20_000
    for value in (1.0, 257.0, 256.5, -3.005, 0.1, 1e-30, -1.0009765625):
        x = torch.full((many,), value)
        got = function(x.clone(), torch.Generator().manual_seed(1))
        refuse((getattr(got, "dtype", got) != torch.bfloat16, f"{value:g}: the result is {getattr(got, 'dtype', got)}, not BF16"))
        refuse((got.shape != x.shape, f"{value:g}: {many:,} numbers have become {got.numel():,}; have the bits become int64?"))
        bits = x.view(torch.int32) & -(2**16)
        lower, upper = (each.view(torch.float32)[0].item() for each in (bits, bits + 2**16))
        kinds, mean = set(got.float().unique().tolist()), got.double().mean().item()
        beside = {lower} if lower == x[0].item() else {lower, upper}
        refuse((len(beside) == 1 and kinds != beside, f"{value:g}: becomes {kinds - beside}, but is a number of BF16 itself"),
               (not kinds <= beside, f"{value:g}: becomes {kinds - beside}; of BF16's numbers {beside} are beside it"),
               (abs(mean - x[0].item()) > 0.02 * abs(upper - lower), f"{value:g}: the mean of {many:,} roundings is {mean:g}"))
    again = [function(torch.full((64,), 1.002), torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    refuse((again[0] != again[1] or again[0] == again[2], "chance is to come from `dice`: the same seed, the same bits"))
    return "always a neighbor, and right on average"
