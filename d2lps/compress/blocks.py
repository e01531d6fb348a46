"""Numbers in a common scale: each block of elements is divided by what makes its largest fit, and the scale is sent beside."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2lps.compress.codec import Codec, as_bytes, check_count, expect, rows_of, wide

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Blocks(Codec):
    """block: how many elements share a scale, a float of 32 bits; None: all of the tensor."""

    block: int | None

    def __post_init__(self) -> None:
        if self.block is not None:
            check_count("block", self.block)

    @property
    @abstractmethod
    def largest(self) -> float:
        """As what the largest element of a block is sent."""

    @abstractmethod
    def quantize(self, scaled: Tensor, turn: int) -> Tensor:
        """Codes, in bytes, of elements from -largest to largest."""

    @abstractmethod
    def restore(self, codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """What the codes of so many elements mean, before they are scaled."""

    def code_bytes(self, count: int) -> int:
        """Of the codes of so many elements."""
        return count

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        self.check(tensor)
        data = tensor.detach().flatten()
        rows = _rows(data.to(wide(data.dtype)), self.block)
        scale = (rows.abs().amax(1, keepdim=True) / self.largest).clamp(max=LARGEST).float()
        scale = torch.where(scale > 0, scale, 1.0)
        scaled = (rows / scale).clamp_(-self.largest, self.largest)
        return torch.cat([as_bytes(scale), self.quantize(scaled.flatten()[: data.numel()], turn)])

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        count = like.numel()
        scales = 4 * rows_of(count, self.block or max(1, count))
        expect(sent, torch.uint8, scales + self.code_bytes(count), f"{count} elements and their scales")
        rows = _rows(self.restore(sent[scales:], count, wide(like.dtype)), self.block)
        data = rows * sent[:scales].clone().view(torch.float32).view(-1, 1)
        return data.flatten()[:count].to(like.dtype).view(like.shape)


def _rows(data: Tensor, block: int | None) -> Tensor:
    """A block a row, the last one filled up with zeros."""
    length = block or max(1, data.numel())
    return pad(data, (0, -data.numel() % length)).view(-1, length)
