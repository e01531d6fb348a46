"""What was not sent is added to what is sent next: error feedback, without which most codecs train badly or not at all."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from d2lps.comm.rank import describe
from d2lps.compress.codec import Codec, narrow, wide


class ErrorFeedback:
    """A codec, and what it has left unsent of each tensor, by name: the only state there is.

    >>> from d2lps.compress import one_bit
    >>> feedback = ErrorFeedback(one_bit())
    >>> feedback.decode(feedback.encode("w", torch.tensor([3.0, -1.0])), torch.empty(2))
    tensor([ 2., -2.])
    >>> feedback.left["w"]                      # which the next call adds
    tensor([1., 1.])

    What was sent, and what is left, are together all that was given. `second` holds what the owner of a chunk has not handed out
    of its sum (see `all_reduce`), `kept` the Q of PowerSGD, `turns` how often each name came. Cost: as many elements of memory as
    the tensors have. Source: Seide et al. 2014; Karimireddy et al. 2019; the second residual: Tang et al. 2021 (1-bit Adam).
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.left: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.kept: dict[str, list[Tensor | None]] = {}
        self.turns: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec})"

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """What is sent in place of the tensor, and of what is left of those of that name."""
        wanted = self.owed(name, tensor)
        sent = self.codec.encode(narrow(wanted, tensor.dtype).view(tensor.shape), self.turns[name])
        self.left[name] = wanted - self.codec.decode(sent, tensor, self.turns[name]).flatten()
        self.turns[name] += 1
        return sent

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        return self.codec.decode(sent, like, turn)

    def owed(self, name: str, tensor: Tensor, left: dict[str, Tensor] | None = None) -> Tensor:
        """What should be sent: the tensor and what is left of those before, flat, in at least 32 bits. left: `self.left`.

        ValueError if the tensor is not finite, or of another size than those before.
        """
        self.codec.check(tensor, name)
        before = (self.left if left is None else left).get(name)
        data = tensor.detach().flatten().to(wide(tensor.dtype))
        if before is None:
            return data
        if before.shape != data.shape:
            had = f"has had {before.numel()} elements"
            raise ValueError(f"{name!r} is {describe(tensor)}, and {had}: residuals are kept by name, give it another")
        if not data.dtype.is_floating_point:
            return data + before
        most = torch.finfo(data.dtype).max
        return (data + before).clamp_(-most, most)
