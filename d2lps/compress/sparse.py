"""Few of the elements: the largest, with their places; or some at places that chance has drawn, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from d2lps.compress.codec import Codec, as_bytes, chance, check_fraction, expect, share


def top_k(fraction: float) -> Codec:
    """The elements that are largest without their signs, at least one, each with its place in 4 bytes.

    >>> codec = top_k(0.5)
    >>> sent = codec.encode(torch.tensor([1.0, -4.0, 0.0, 2.0]))
    >>> sent.numel(), codec.decode(sent, torch.empty(4))                # 8 bytes a pair
    (16, tensor([ 0., -4.,  0.,  2.]))

    Not linear: the places differ from rank to rank. In two stages 16 fn (p - 1)/p bytes for fraction f of n elements; gathered by
    all ("all_gather") 8 fn (p - 1), which grows with the ranks and is beaten by a ring of FP32 from p = 1/f on.
    Source: Aji, Heafield 2017; Lin et al. 2018 (Deep Gradient Compression).
    """
    return TopK(fraction)


@dataclass(frozen=True)
class TopK(Codec):
    fraction: float

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        data = tensor.detach().flatten()
        if data.numel() >= 2**31:
            raise ValueError(f"top_k counts places in 31 bits, which are too few for {data.numel()} elements: cut it")
        places = data.abs().topk(share(self.fraction, data.numel()), sorted=False).indices
        return torch.cat([as_bytes(data[places]), as_bytes(places.to(torch.int32))])

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        count = share(self.fraction, like.numel())
        values = count * like.element_size()
        expect(sent, torch.uint8, values + 4 * count, f"{count} of {like.numel()} elements and their places")
        out = torch.zeros(like.numel(), dtype=like.dtype, device=sent.device)
        places = sent[values:].clone().view(torch.int32).long()
        return out.scatter_(0, places, sent[:values].clone().view(like.dtype)).view(like.shape)


def random_k(fraction: float, seed: int = 0) -> Codec:
    """The elements at random places, at least one: others each turn, the same on all ranks, so that none has to be sent.

    >>> codec = random_k(0.5)
    >>> sent = codec.encode(torch.tensor([1.0, -4.0, 0.0, 2.0]), turn=1)
    >>> sent, codec.decode(sent, torch.empty(4), turn=1)
    (tensor([-4.,  2.]), tensor([ 0., -4.,  0.,  2.]))

    They are sent as they are, so what is decoded is too small on average, by the fraction; `ErrorFeedback` sends the rest later.
    Linear: the sum of what is sent is what is sent of the sum. Cost: fn elements in each all-reduce. Source: Stich et al. 2018.
    """
    return RandomK(fraction, seed)


@dataclass(frozen=True)
class RandomK(Codec):
    fraction: float
    seed: int

    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def _places(self, like: Tensor, device: torch.device, turn: int) -> Tensor:
        count = share(self.fraction, like.numel())
        if device.type == "meta":
            return torch.empty(count, dtype=torch.int64, device="meta")
        return torch.randperm(like.numel(), generator=chance(self.seed, turn))[:count].to(device)

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        return tensor.detach().flatten()[self._places(tensor, tensor.device, turn)]

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        expect(sent, like.dtype, share(self.fraction, like.numel()), f"{self.fraction:g} of {like.numel()} elements")
        out = torch.zeros(like.numel(), dtype=like.dtype, device=sent.device)
        return out.scatter_(0, self._places(like, sent.device, turn), sent).view(like.shape)
