"""The sign of each element, and one magnitude for all."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2lps.compress.blocks import LARGEST
from d2lps.compress.codec import Codec, as_bytes, check_finite, expect, from_bytes


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
