"""Fewer bits an element: floats of 16, which can be added up; whole numbers and floats of 8 or 4 with a scale; a sign."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2lps.arguments import named, whole
from d2lps.compress.codec import Codec, as_bytes, chance, check_finite, expect, from_bytes, widened


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


LARGEST = torch.finfo(torch.float32).max
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8(format: str = "e4m3", block: int | None = None) -> Codec:
    """FP8, 1 byte an element, and 4 for the scale of each `block`, or of all: its largest element is sent as the format's.

    >>> codec = fp8()
    >>> codec.decode(codec.encode(torch.tensor([0.1, 1e6, 3e5])), torch.empty(3)).tolist()
    [0.0, 1000000.0, 285714.28125]

    "e4m3" has 4 significant bits and goes to 448, "e5m2" has 3 and goes to 57,344: with m of them, an error of at most 2^-m of
    the element, or half of the smallest step, scaled. FP8 has no addition, so it is not linear: what comes is decoded, and summed
    in FP32. Cost: ceil(n/block) 4 + n bytes for n elements. Source: Micikevicius et al. 2022.
    """
    dtype = named("format", format, FP8)
    return _made(block, dtype, torch.finfo(dtype).max)


def int8(block: int | None = 256, seed: int = 0) -> Codec:
    """Whole numbers from -127 to 127, 1 byte an element, times the block's scale; rounded up or down by chance.

    >>> codec = int8()
    >>> sent = codec.encode(torch.tensor([1.27, 0.004, -0.5]))
    >>> sent.numel(), codec.decode(sent, torch.empty(3)).mul(100).round().tolist()
    (7, [127.0, 1.0, -50.0])

    0.4 becomes 1 in 4 of 10 turns, so that the mean of many is right. The error is at most a step, the block's largest element
    divided by 127. Not linear. Cost: 4 ceil(n/block) + n bytes for n elements. Source: Alistarh et al. 2017 (QSGD).
    """
    return _made(block, torch.int8, 127, 8, seed)


def int4(block: int | None = 256, seed: int = 0) -> Codec:
    """Whole numbers from -7 to 7, half a byte an element: as `int8`, with larger steps. Cost: 4 ceil(n/block) + ceil(n/2) bytes.

    >>> int4(block=32).encode(torch.ones(64)).numel()
    40
    """
    return _made(block, torch.int8, 7, 4, seed)


def _made(block: int | None, dtype: torch.dtype, largest: float, bits: int = 8, seed: int = 0) -> Codec:
    return Blocks(block if block is None else whole("block", block), dtype, largest, bits, seed)


@dataclass(frozen=True)
class Blocks(Codec):
    block: int | None
    dtype: torch.dtype
    largest: float  # as what the largest element of a block is sent
    bits: int
    seed: int

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        check_finite(tensor)
        rows = self._rows(widened(tensor).flatten())
        scale = (rows.abs().amax(1, keepdim=True) / self.largest).clamp(max=LARGEST).float()
        scale = torch.where(scale > 0, scale, 1.0)
        scaled = rows / scale
        if self.dtype == torch.int8 and not scaled.is_meta:
            scaled = (scaled + torch.rand(scaled.shape, generator=chance(self.seed, turn)).to(scaled)).floor_()
        codes = as_bytes(scaled.clamp(-self.largest, self.largest).to(self.dtype))[: tensor.numel()]
        if self.bits == 4:
            pairs = pad(codes & 15, (0, codes.numel() % 2)).view(-1, 2)
            codes = pairs[:, 0] | pairs[:, 1] << 4
        return torch.cat([as_bytes(scale), codes])

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        count = like.numel()
        scales = 4 * -(-count // (self.block or max(1, count)))
        expect(sent, torch.uint8, scales - (-count * self.bits // 8), f"{count} elements and their scales")
        codes = sent[scales:]
        if self.bits == 4:
            upper = torch.stack([codes << 4, codes & 240], 1).flatten()[:count]
            codes = (upper.view(torch.int8) >> 4).view(torch.uint8)  # which keeps the sign
        rows = self._rows(from_bytes(codes, self.dtype).to(widened(like).dtype))
        return (rows * from_bytes(sent[:scales], torch.float32).view(-1, 1)).flatten()[:count].to(like.dtype).view(like.shape)

    def _rows(self, data: Tensor) -> Tensor:
        """A block a row, the last one filled up with zeros."""
        length = self.block or max(1, data.numel())
        return pad(data, (0, -data.numel() % length)).view(-1, length)


def one_bit() -> Codec:
    """A bit an element, its sign, and 4 bytes for the mean of their absolute values: 1/32 of FP32.

    >>> one_bit().decode(one_bit().encode(torch.tensor([3.0, -1.0])), torch.empty(2))
    tensor([ 2., -2.])

    Of little use without `ErrorFeedback`. Not linear: a sum of signs is none. Cost: ceil(n/8) + 4 bytes for n elements.
    Source: Seide et al., Interspeech 2014.
    """
    return OneBit()


@dataclass(frozen=True)
class OneBit(Codec):
    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        check_finite(tensor)
        data = tensor.detach().flatten()
        scale = (data.abs().sum(dtype=torch.float64) / max(1, data.numel())).clamp(max=LARGEST).float()
        bits = pad((data >= 0).to(torch.uint8), (0, -data.numel() % 8)).view(-1, 8)
        return torch.cat([as_bytes(scale), (bits << _places(bits)).sum(1, dtype=torch.uint8)])

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        count = like.numel()
        expect(sent, torch.uint8, 4 - (-count // 8), f"{count} signs and a magnitude")
        scale = from_bytes(sent[:4], torch.float32)
        positive = (sent[4:, None] >> _places(sent) & 1).flatten()[:count].bool()
        return torch.where(positive, scale, -scale).to(like.dtype).view(like.shape)


def _places(like: Tensor) -> Tensor:
    """Where the bits of a byte are."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)
