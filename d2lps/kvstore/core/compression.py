"""Pushes of fewer bytes, by the codecs of `d2lps.compress`: what a worker makes of a gradient, and a server of what has come.

A worker keeps what it has not sent, and sends it with the next push of that part. A log holds what came, and playing it again
decodes it again: with the codec's options, and the worker's turn, in which what is random in a codec was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d2lps import compress
from d2lps.compress import Codec
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Refused, Request, replace

Maker = Callable[..., Codec]
_OWN: list[Maker] = [compress.half, compress.bfloat16, compress.fp8, compress.int8, compress.int4, compress.top_k]
_OWN += [compress.random_k, compress.power_sgd]
CODECS: dict[str, Maker] = {"1bit": compress.one_bit} | {make.__name__: make for make in _OWN}


def make_codec(name: str, **options: Any) -> Codec:
    """`make_codec("half")`; ValueError for an unknown name or option."""
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown: choose {', '.join(map(repr, sorted(CODECS)))}")
    try:
        return CODECS[name](**options)
    except TypeError as error:
        raise ValueError(f"codec {name!r} cannot be made of {options}: {error}") from error


def decoded(request: Request, entries: Mapping[str, Entry]) -> Request:
    """A push with the tensor that it means; Refused if that cannot be told."""
    if request.value is None or request.key not in entries:
        return request
    options: dict[str, Any] = dict(request.options)
    try:
        turn, codec = options.pop("turn", 0), make_codec(options.pop("codec"), **options)
        value = codec.decode(request.value, entries[request.key].like, turn)
    except Exception as error:  # a codec is anybody's, and so is what came
        raise Refused(f"{request.op} of {request.key!r} cannot be decoded: {error}") from error
    return replace(request, value=value, options={})
