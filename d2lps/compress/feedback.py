"""What was not sent is added to what is sent next: error feedback, without which most codecs train badly or not at all."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from d2lps.comm.rank import describe
from d2lps.compress.codec import Codec, check_finite, widened

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
