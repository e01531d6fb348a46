"""What a codec is: a tensor of fewer bytes in place of a tensor, and the way back; and what all codecs share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import ClassVar, Self

import torch
from torch import Tensor

# It yields what is to be summed over all ranks next, and is sent the sum; and returns the sum of the ranks' tensors, as far as it
# was sent, how to tell this rank's part of that, and what the next call may begin with.
Rounds = Generator[Tensor, Tensor, tuple[Tensor, Callable[[], Tensor], Tensor | None]]


class Codec(ABC):
    """Pure: what it gives follows from what it is given, and how many bytes that has from the shape alone.

    One of your own needs `encode` and `decode`, and works with `all_reduce`, `ErrorFeedback`, DDP and the parameter server.
    turn: how often that was done before. What is random in a codec is drawn anew each turn, and the same at both ends.

    >>> class Rounded(Codec):
    ...     def encode(self, tensor, turn=0):
    ...         return tensor.flatten().round().to(torch.int8)
    ...     def decode(self, sent, like, turn=0):
    ...         return sent.to(like.dtype).view(like.shape)
    """

    linear: ClassVar[bool] = False  #: whether decode(a + b) = decode(a) + decode(b): then every all-reduce will do

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @abstractmethod
    def encode(self, tensor: Tensor, turn: int = 0) -> Tensor:
        """What is sent in its place: a new flat tensor. Meta tensors give meta tensors of as many bytes."""

    @abstractmethod
    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        """A new tensor of the shape and dtype of `like`, where `sent` is; ValueError if that can't be meant by `sent`."""

    def among(self, ranks: int) -> Self:
        """The codec to use where the codes of so many ranks will be added up."""
        return self

    def rounds(self, tensor: Tensor, turn: int = 0, kept: Tensor | None = None) -> Rounds:
        """For a linear codec, what is to be summed over the ranks; in several rounds if they find their codes together."""
        sent = self.encode(tensor, turn)
        total = yield sent
        return self.decode(total, tensor, turn), lambda: self.decode(sent, tensor, turn), None


# ---- what they share --------------------------------------------------------------------------------------------------


def widened(tensor: Tensor) -> Tensor:
    """In the precision in which residuals and sums are kept: floats have at least 32 bits, integers stay."""
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"a codec takes floats or integers, not {tensor.dtype}")
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Their elements, one after another, in a new tensor of the widest of their dtypes.

    >>> flat([torch.ones(2, 1), torch.zeros(1, dtype=torch.float64)])
    tensor([1., 1., 0.], dtype=torch.float64)
    """
    return torch.cat([each.detach().flatten() for each in tensors])


def as_bytes(tensor: Tensor) -> Tensor:
    """`as_bytes(torch.zeros(3)).shape == (12,)`"""
    return tensor.contiguous().flatten().view(torch.uint8)


def from_bytes(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """`from_bytes(as_bytes(torch.ones(1)), torch.float32)` is `torch.ones(1)`."""
    return sent.clone().view(dtype)


def expect(sent: Tensor, dtype: torch.dtype, count: int, what: str) -> None:
    """ValueError unless that has come."""
    if sent.dtype != dtype or sent.numel() != count:
        raise ValueError(f"{what} are {count} of {dtype}, not {sent.numel()} of {sent.dtype}")


def check_finite(tensor: Tensor, name: str = "tensor") -> None:
    """ValueError if there is anything in it that would spoil what is sent with it, or what is kept of it."""
    if not tensor.is_meta and not bool((finite := tensor.isfinite()).all()):
        place = (~finite).nonzero()[0].tolist()
        raise ValueError(f"{name!r} has {tensor[tuple(place)].item()} at {place}, which would spoil the rest of it")


def check(name: str, value: float, fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{name}={value!r} is not {what}")


def chance(seed: int, turn: int) -> torch.Generator:
    """Random numbers for a turn, the same wherever they are drawn."""
    return torch.Generator().manual_seed((seed * 1_000_003 + turn) % 2**63)
