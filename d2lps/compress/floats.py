"""Floats of 16 bits in place of 32: half of the bytes, and codes that can be added up."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from d2lps.compress.codec import Codec, expect


def half() -> Codec:
    """FP16, 2 bytes an element: 11 significant bits, so an error of at most 2^-11 of each, from 6.1e-5 to 65,504.

    >>> half().decode(half().encode(torch.tensor([0.1, 1e6])), torch.empty(2)).tolist()
    [0.0999755859375, 65504.0]

    What is finite stays so: it is cut off at 65,504; where p ranks' codes are added up, at 65,504/2p. Infinities and NaN stay
    what they are, for those who scale a loss and look for them. Linear; sums are rounded at every hop.
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

    def among(self, ranks: int) -> Self:
        return replace(self, ranks=ranks)

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        # Of what is added up, only half of the range is used: rounding upwards, hop by hop, shall not leave it either.
        most = torch.finfo(self.dtype).max / (1 if self.ranks == 1 else 2 * self.ranks)
        data = tensor.detach().flatten()
        return torch.where(data.isinf(), data, data.clamp(-most, most)).to(self.dtype, copy=True)

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        expect(sent, self.dtype, like.numel(), "its floats")
        return sent.to(like.dtype, copy=True).view(like.shape)
