"""Whole numbers of 8 or 4 bits, a scale for each block, rounded up or down by chance so that nothing is lost on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d2lps.compress.blocks import Blocks
from d2lps.compress.codec import Codec, chance


def int8(block: int | None = 256, seed: int = 0) -> Codec:
    """One byte an element, -127 to 127 times the block's scale, its largest element divided by 127; rounded by chance.

    >>> codec = int8()
    >>> sent = codec.encode(torch.tensor([1.27, 0.004, -0.5]))
    >>> sent.numel(), codec.decode(sent, torch.empty(3)).mul(100).round().tolist()
    (7, [127.0, 1.0, -50.0])

    0.4 becomes 1 in 4 of 10 turns, so the mean of many is right. The error is below the scale. Cost: n/4 + 4/block bytes an
    element of n. Source: Alistarh et al. 2017 (QSGD); blocks: Dettmers et al. 2022.
    """
    return Integers(block, 8, seed)


def int4(block: int | None = 256, seed: int = 0) -> Codec:
    """Half a byte an element, -7 to 7 times the block's scale: as `int8`, with larger steps."""
    return Integers(block, 4, seed)


@dataclass(frozen=True)
class Integers(Blocks):
    bits: int
    seed: int

    @property
    def largest(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def code_bytes(self, count: int) -> int:
        return -(-count * self.bits // 8)

    def quantize(self, scaled: Tensor, turn: int) -> Tensor:
        noise = torch.empty_like(scaled)
        if not scaled.is_meta:
            noise.copy_(torch.rand(scaled.shape, generator=chance(self.seed, turn)))
        codes = (scaled + noise).floor_().clamp_(-self.largest, self.largest).to(torch.int8)
        if self.bits == 8:
            return codes.view(torch.uint8)
        pairs = torch.nn.functional.pad(codes.view(torch.uint8) & 15, (0, codes.numel() % 2)).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def restore(self, codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        if self.bits == 4:
            codes = torch.stack([codes << 4, codes & 240], 1).flatten()[:count].view(torch.int8) >> 4  # with its sign
        return codes.view(torch.int8).to(dtype)
