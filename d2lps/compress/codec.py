"""What a codec is: a tensor of fewer bytes in place of a tensor, and the way back; and what all codecs share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Round(NamedTuple):
    """What is to be summed over all ranks next, and what this rank's part of it means, if that is known by now."""

    message: Tensor
    own: Callable[[], Tensor] | None = None


class Done(NamedTuple):
    """The sum of the ranks' tensors, as far as it was sent; and what the next call may like to begin with."""

    total: Tensor
    kept: Tensor | None = None


Rounds = Generator[Round, Tensor, Done]


class Codec(ABC):
    """Pure: what it gives follows from what it is given, and how many bytes that has from the shape alone.

    One of your own needs `encode` and `decode`, and works with `all_reduce`, `ErrorFeedback`, the store and DDP.
    turn: how often that was done before. What is random in a codec is drawn anew each turn, and the same at both ends.
    """

    linear: ClassVar[bool] = False
    """Whether codes of several ranks may be added up: decode(a + b) = decode(a) + decode(b). Then every all-reduce will do."""

    @abstractmethod
    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        """What is sent in its place: a new flat tensor. Meta tensors give meta tensors of as many bytes."""

    @abstractmethod
    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        """A new tensor of the shape and dtype of `like`, where `sent` is; ValueError if that can't be meant by `sent`."""

    def check(self, tensor: Tensor, name: str = "tensor") -> None:
        """ValueError if there is anything in it that would spoil what is sent with it, or what is kept of it."""
        if not tensor.is_meta and not bool((finite := tensor.isfinite()).all()):
            place = (~finite).nonzero()[0].tolist()
            raise ValueError(f"{name!r} has {tensor[tuple(place)].item()} at {place}, which would spoil the rest of it")

    def among(self, ranks: int) -> Codec:
        """The codec to use where the codes of so many ranks will be added up."""
        return self

    def rounds(self, tensor: Tensor, turn: int = 0, kept: Tensor | None = None) -> Rounds:
        """For a linear codec, what to sum over the ranks, one after another; each yield is sent the sum, and the last gives it.

        kept: what the last call gave to be kept.
        """
        sent = self.encode(tensor, turn)
        total = yield Round(sent, lambda: self.decode(sent, tensor, turn))
        return Done(self.decode(total, tensor, turn))


# ---- what they share --------------------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums and residuals are kept: floats have at least 32 bits, integers stay."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def narrow(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Back from there, cut off where it does not fit: `narrow(torch.tensor([1e6]), torch.float16)` is 65,504."""
    if data.dtype == dtype:
        return data
    most = torch.finfo(dtype).max
    return data.clamp(-most, most).to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """`as_bytes(torch.zeros(3)).shape == (12,)`"""
    return tensor.contiguous().flatten().view(torch.uint8)


def expect(sent: Tensor, dtype: torch.dtype, count: int, what: str) -> None:
    """ValueError unless that has come."""
    if sent.dtype != dtype or sent.numel() != count:
        raise ValueError(f"{what} are {count} of {dtype}, not {sent.numel()} of {sent.dtype}")


def share(fraction: float, count: int) -> int:
    """How many of `count` that is, at least one: `share(0.01, 250) == 2`"""
    return min(count, max(1, round(fraction * count)))


def check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction!r} is not above 0 and at most 1")


def chance(seed: int, turn: int) -> torch.Generator:
    """Random numbers for a turn, the same wherever they are drawn."""
    return torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a whole number from 1 up")


def rows_of(count: int, block: int) -> int:
    """How many blocks so many elements are: `rows_of(5, 4) == 2`"""
    return math.ceil(count / block)
