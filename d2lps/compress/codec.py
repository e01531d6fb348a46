"""What a codec is: a tensor of fewer bytes in place of a tensor, and the way back; and what all codecs share.

A codec remembers nothing. `ErrorFeedback` does: what was not sent is added to what is sent next, without which most codecs train
badly or not at all.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from d2lps.comm.rank import describe

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


_KEPT = "left", "second", "starts", "kept", "turns"


class ErrorFeedback:
    """A codec, and what it has left unsent of each tensor, by name: the only state there is.

    >>> from d2lps.compress import one_bit
    >>> feedback = ErrorFeedback(one_bit())
    >>> feedback.codec.decode(feedback.encode("w", torch.tensor([3.0, -1.0])), torch.empty(2))
    tensor([ 2., -2.])
    >>> feedback.left["w"]                      # flat; the next call adds it
    tensor([1., 1.])

    What was sent, and what is left, are together all that was given. `second` holds what the owner of a chunk has not handed out
    of its sum (see `all_reduce`), and `starts` where in the tensor of that name this begins; `kept` the Q's of PowerSGD, `turns`
    how often each name came. unit: what the tensors that come next are multiplied by, such as a loss scale; what is kept is
    divided by it, so that it may change. Errors: ValueError for a tensor that is not finite, or of another size than before.
    Cost: as many elements of memory as the tensors have.
    Source: Seide et al. 2014; Karimireddy et al. 2019; the second residual: Tang et al. 2021 (1-bit Adam).
    """

    def __init__(self, codec: Codec) -> None:
        if not isinstance(codec, Codec):
            raise TypeError(f"codec={codec!r} is none: one is made by a call, such as d2lps.compress.int8()")
        self.codec, self.unit = codec, 1.0
        self.left: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.starts: dict[str, int] = {}
        self.kept: dict[str, list[Tensor | None]] = {}
        self.turns: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec})"

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, each rank's own, to be saved, and given to `load_state_dict` of one with the same codec."""
        return {name: dict(vars(self)[name]) for name in _KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _KEPT:
            vars(self)[name] = type(vars(self)[name])(state[name])

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """What is sent in place of the tensor, and of what is left of those of that name."""
        wanted = self.owed(self.left, name, tensor).view(tensor.shape)
        sent = self.codec.encode(wanted, self.turns[name])
        self.keep(self.left, name, wanted, lambda: self.codec.decode(sent, wanted, self.turns[name]))
        self.turns[name] += 1
        return sent

    def owed(self, left: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
        """What should be sent: the tensor and what is left of those before, flat, floats in at least 32 bits."""
        check_finite(tensor, name)
        data, before = widened(tensor).flatten(), left.get(name)
        if before is None:
            return data
        if before.shape != data.shape:
            had = f"has had {before.numel()} elements"
            raise ValueError(f"{name!r} is {describe(tensor)}, and {had}: residuals are kept by name, give it another")
        most = (torch.finfo if data.is_floating_point() else torch.iinfo)(data.dtype).max
        return (data + (before if self.unit == 1 else before * self.unit)).clamp_(-most, most)

    def keep(self, left: dict[str, Tensor], name: str, wanted: Tensor, sent: Callable[[], Tensor]) -> None:
        """Of what should have been sent, keep what was not."""
        rest = (wanted - sent()).flatten()
        left[name] = rest if self.unit == 1 else rest / self.unit

    def own(self, name: str, start: int, count: int, wanted: Tensor) -> None:
        """Of `name`, this rank hands out so many elements of the sum from now on; what it has kept of others it sends itself."""
        kept = self.second.get(name)
        if kept is not None and (self.starts[name], len(kept)) != (start, count):
            wanted[self.starts[name] :][: len(kept)] += self.second.pop(name) * self.unit
        self.starts[name] = start


class Forgetful(ErrorFeedback):
    """A codec alone, whose turns are counted: what it has not sent is lost."""

    def owed(self, left: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
        return widened(tensor).flatten()

    def keep(self, left: dict[str, Tensor], name: str, wanted: Tensor, sent: Callable[[], Tensor]) -> None:
        pass


def counting(codec: Codec | ErrorFeedback) -> ErrorFeedback:
    """What counts the turns of a codec, and keeps what it leaves if it was told to; TypeError for what is neither."""
    return codec if isinstance(codec, ErrorFeedback) else Forgetful(codec)
