"""Pushes of fewer bytes: what a worker makes of a gradient before it is sent, and a server of what has come.

A hook, with the two simplest codecs on it; one of your own is a class with `encode` and `decode`. A log holds what came, and
playing it again decodes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Refused, Request, replace

LARGEST, LARGEST32 = torch.finfo(torch.float16).max, torch.finfo(torch.float32).max


class Codec(Protocol):
    """The worker has one, which may remember; servers make others of the same name and options, which must not."""

    def check(self, key: str, tensor: torch.Tensor) -> None:
        """ValueError if this cannot be sent; asked of all tensors of a push, whole, before any part of them is encoded."""

    def encode(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """What is sent in its place. key: of this part, for what is kept until its next push."""

    def decode(self, sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The tensor to be added, of the shape and dtype of `like`, which has no contents."""


class Half(Codec):
    """Floats of 16 bits: half the bytes of float32, three digits; beyond 65,504 they are cut off.

    >>> Half().encode("w", torch.tensor([0.1, 1e6])).tolist()
    [0.0999755859375, 65504.0]
    """

    def encode(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clamp(-LARGEST, LARGEST).half()

    def decode(self, sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return sent.to(like.dtype)


class OneBit(Codec):
    """The sign of each element, and one magnitude for all: n/8 bytes and 4; what is lost is added to the next push.

    >>> codec = OneBit()
    >>> codec.decode(codec.encode("w", torch.tensor([3.0, -1.0])), torch.empty(2, device="meta"))
    tensor([ 2., -2.])
    >>> codec.left["w"]                 # what the server has not had yet
    tensor([1., 1.])

    Cost: as many floats of memory in the worker as it pushes. Source: Seide et al., Interspeech 2014.
    """

    def __init__(self) -> None:
        self.left: dict[str, torch.Tensor] = {}

    def check(self, key: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta and not bool((finite := tensor.float().isfinite()).all()):
            place = tuple((~finite).nonzero()[0].tolist())
            why = "one magnitude for all would make all of it that"
            raise ValueError(f"{key!r} has {tensor[place].item()} at {list(place)}, no finite float32: {why}")

    def encode(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return torch.empty(4 + -(-tensor.numel() // 8), dtype=torch.uint8, device="meta")
        wanted = (tensor.float().flatten() + self.left.get(key, 0.0)).clamp_(-LARGEST32, LARGEST32)
        positive = wanted >= 0
        scale = (wanted.abs().sum(dtype=torch.float64) / max(1, wanted.numel())).float()
        self.left[key] = wanted - torch.where(positive, scale, -scale)
        return torch.cat([scale.view(1).view(torch.uint8), torch.from_numpy(np.packbits(positive.numpy()))])

    def decode(self, sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if sent.is_meta:
            return torch.empty_like(like)
        count = like.numel()
        if sent.dtype != torch.uint8 or sent.numel() != 4 + -(-count // 8):
            raise ValueError(f"{count} signs and a magnitude are {4 + -(-count // 8)} bytes, not {sent.dtype}{list(sent.shape)}")
        scale = sent[:4].clone().view(torch.float32)
        positive = torch.from_numpy(np.unpackbits(sent[4:].numpy(), count=count)).bool()
        return torch.where(positive, scale, -scale).view(like.shape).to(like.dtype)


CODECS: dict[str, Any] = {"half": Half, "1bit": OneBit}


def register_codec(name: str, cls: Any) -> None:
    """Let `kv.compress(name, ...)` find a class of your own, in every process of the runs that follow.

    >>> class Rounded(Half):
    ...     def encode(self, key, tensor):
    ...         return super().encode(key, tensor.round())
    >>> register_codec("rounded", Rounded)
    """
    for method in ("encode", "decode", "check"):
        if not callable(getattr(cls, method, None)):
            raise TypeError(f"a codec needs a method {method!r}, which {cls!r} has not")
    CODECS[name] = cls


def make_codec(name: str, **options: Any) -> Codec:
    """`make_codec("half")`; ValueError for an unknown name or option."""
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown: choose {', '.join(map(repr, sorted(CODECS)))}")
    try:
        codec: Codec = CODECS[name](**options)
    except TypeError as error:
        raise ValueError(f"codec {name!r} cannot be made of {options}: {error}") from error
    return codec


def decoded(request: Request, entries: Mapping[str, Entry]) -> Request:
    """A push with the tensor that it means; Refused if that cannot be told."""
    if request.value is None or request.key not in entries:
        return request
    options: dict[str, Any] = dict(request.options)
    try:
        value = make_codec(options.pop("codec"), **options).decode(request.value, entries[request.key].like)
    except Exception as error:  # a codec is anybody's, and so is what came
        raise Refused(f"{request.op} of {request.key!r} cannot be decoded: {error}") from error
    return replace(request, value=value, options={})
