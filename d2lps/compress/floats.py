"""Floats of fewer bits: 16, which can be added up, and 8, which need a scale beside them and can't."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from d2lps.compress.blocks import Blocks
from d2lps.compress.codec import Codec, expect


def half() -> Codec:
    """FP16, 2 bytes an element: 11 significant bits, so an error of at most 2^-11 of each; from 6.1e-5 to 65,504.

    >>> half().decode(half().encode(torch.tensor([0.1, 1e6, -1e-9])), torch.empty(3)).tolist()
    [0.0999755859375, 65504.0, -0.0]

    What is finite stays so: it is cut off at 65,504, where p ranks add up at half of that divided by p. Infinities and NaN stay
    what they are, for those who scale losses and look for them. Linear; sums are rounded at every hop.
    """
    return Cast(torch.float16)


def bfloat16() -> Codec:
    """BF16, 2 bytes an element: 8 significant bits, so an error of at most 2^-8 of each; the range of FP32. Linear.

    >>> bfloat16().decode(bfloat16().encode(torch.tensor([0.1, 1e6])), torch.empty(2)).tolist()
    [0.10009765625, 999424.0]
    """
    return Cast(torch.bfloat16)


@dataclass(frozen=True)
class Cast(Codec):
    dtype: torch.dtype
    ranks: int = 1

    linear: ClassVar[bool] = True

    def among(self, ranks: int) -> Codec:
        return replace(self, ranks=ranks)

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        # Of what is added up, only half of the range is used: rounding upwards, hop by hop, shall not leave it either.
        most = torch.finfo(self.dtype).max / (1 if self.ranks == 1 else 2 * self.ranks)
        data = tensor.detach().flatten()
        return torch.where(data.isinf(), data, data.clamp(-most, most)).to(self.dtype, copy=True)

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        expect(sent, self.dtype, like.numel(), f"{like.numel()} floats")
        return sent.to(like.dtype, copy=True).view(like.shape)


def fp8(format: str = "e4m3", block: int | None = None) -> Codec:
    """FP8, 1 byte an element, and 4 for the scale of each `block`, or of all: the largest element is sent as the format's.

    >>> codec = fp8()
    >>> codec.decode(codec.encode(torch.tensor([0.1, 1e6, 3e5])), torch.empty(3)).tolist()
    [0.0, 1000000.0, 285714.28125]

    "e4m3" has 4 significant bits and goes to 448, "e5m2" has 3 and goes to 57,344: with m of them, an error of at most 2^-m of
    the element, or half of the smallest step, scaled. It has no addition, so it is not linear: what comes is decoded, and summed
    in FP32. Cost: n/4 + 4 bytes for n of FP32. Source: Micikevicius et al. 2022.
    """
    if format not in _FP8:
        raise ValueError(f"format={format!r} is unknown: choose one of {', '.join(map(repr, _FP8))}")
    return Fp8(block, _FP8[format])


_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Fp8(Blocks):
    dtype: torch.dtype

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    def quantize(self, scaled: Tensor, turn: int) -> Tensor:
        return scaled.to(self.dtype).view(torch.uint8)

    def restore(self, codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return codes.clone().view(self.dtype).to(dtype)
