"""Few of the elements: the largest, with their places; or some at places that chance has drawn, the same on all ranks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from d2lps.compress.codec import Codec, as_bytes, chance, check, expect, from_bytes, widened


def top_k(fraction: float) -> Codec:
    """The elements that are largest without their signs, at least one, each with its place in 4 bytes.

    >>> codec = top_k(0.5)
    >>> sent = codec.encode(torch.tensor([1.0, -4.0, 0.0, 2.0]))
    >>> sent.numel(), codec.decode(sent, torch.empty(4))                # 8 bytes a pair
    (16, tensor([ 0., -4.,  0.,  2.]))

    Not linear: the places differ from rank to rank. Cost: 8 bytes for each of k = max(1, round(fraction n)) elements. Gathered by
    all, (p - 1) 8k bytes: that grows with the ranks, and a ring of FP32 is better from p = 1/fraction on.
    Source: Aji, Heafield 2017; Lin et al. 2018 (Deep Gradient Compression).
    """
    check("fraction", fraction, 0 < fraction <= 1, "above 0 and at most 1")
    return TopK(fraction)


def random_k(fraction: float, seed: int = 0) -> Codec:
    """The elements at random places, at least one: others each turn, the same on all ranks, so that none need be told.

    >>> codec = random_k(0.5)
    >>> sent = codec.encode(torch.tensor([1.0, -4.0, 0.0, 2.0]), turn=1)
    >>> sent, codec.decode(sent, torch.empty(4), turn=1)
    (tensor([-4.,  2.]), tensor([ 0., -4.,  0.,  2.]))

    They are sent as they are, so what arrives is too small on average, by the fraction; `ErrorFeedback` sends the rest later.
    Linear: the sum of what is sent is what is sent of the sum. Cost: 4 bytes for each of k = max(1, round(fraction n)) elements.
    Source: Stich, Cordonnier, Jaggi 2018.
    """
    check("fraction", fraction, 0 < fraction <= 1, "above 0 and at most 1")
    return RandomK(fraction, seed)


@dataclass(frozen=True)
class TopK(Codec):
    fraction: float

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        data = widened(tensor).flatten()
        check("elements", data.numel(), data.numel() < 2**31, "below 2**31, which is what places have room for: cut the tensor")
        places = data.abs().topk(_share(self.fraction, data), sorted=False).indices
        return torch.cat([as_bytes(data[places]), as_bytes(places.to(torch.int32))])

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        dtype, count = widened(like).dtype, _share(self.fraction, like)
        values = count * dtype.itemsize
        expect(sent, torch.uint8, values + 4 * count, f"{count} of {like.numel()} elements and their places")
        return _scattered(from_bytes(sent[:values], dtype), from_bytes(sent[values:], torch.int32).long(), like)


@dataclass(frozen=True)
class RandomK(Codec):
    fraction: float
    seed: int
    linear: ClassVar[bool] = True

    def _places(self, like: Tensor, device: torch.device, turn: int) -> Tensor:
        count = _share(self.fraction, like)
        if device.type == "meta":
            return torch.empty(count, dtype=torch.int64, device="meta")
        return torch.randperm(like.numel(), generator=chance(self.seed, turn))[:count].to(device)

    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        return widened(tensor).flatten()[self._places(tensor, tensor.device, turn)]

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        expect(sent, widened(like).dtype, _share(self.fraction, like), f"{self.fraction:g} of {like.numel()} elements")
        return _scattered(sent, self._places(like, sent.device, turn), like)


def _share(fraction: float, like: Tensor) -> int:
    return min(like.numel(), max(1, round(fraction * like.numel())))


def _scattered(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    nothing = torch.zeros(like.numel(), dtype=like.dtype, device=values.device)
    return nothing.scatter_(0, places, values.to(like.dtype)).view(like.shape)
