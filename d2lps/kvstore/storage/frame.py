"""Events and replies as bytes: a head in JSON, and up to two tensors; never pickle, which runs what it reads.

    prefix     24 bytes (PREFIX): magic, version, flags, length of the head, checksum of the tensors, checksum of prefix and head
    head       [kind, {field: value}] in JSON, without what is as by default, and spaces up to a multiple of 8
    rows       int64, where a request is about some rows of a tensor
    value      the tensor's bytes as they lie in memory, little-endian

In the head a tensor is [dtype, shape]; or [dtype, shape, offset] where it does not travel, since both ends see the memory in
which it lies (see `Wire`). A frame goes out as a list of these buffers without a copy of a tensor, and comes in as the same
list, or as one buffer that holds them all (a record of the log). What comes in is checked from front to back, and each field
before it is used: a wrong frame is a FrameError, and costs its own bytes, and for a moment what JSON makes of its head: up to
30 times as many, of a head of 64 KB at most.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn

import torch

from d2lps.comm.staging import stage
from d2lps.kvstore.core.events import OPS, Event, Lost, Membership, Reply, Request, Send
from d2lps.kvstore.storage.log import Bytes, checksum

MAGIC, VERSION = b"d2ps", 2
PREFIX = struct.Struct("<4sHHII4xI")
CHECKED = 1  # flag: there is a checksum of the tensors that follow
MAX_DIMS, MAX_HEAD = 8, 1 << 16
NOWHERE = (-1, 0)  # of a tensor that travels
Where = Callable[[torch.Tensor | None], tuple[int, int]]
Lookup = Callable[[int, int], memoryview]
KINDS = {kind.__name__: kind for kind in (Request, Reply, Lost, Membership, Send)}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)}  # fmt: skip
DEFAULTS = {
    kind: {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}
    for kind in KINDS.values()
}
REQUIRED = {kind: {name for name, default in known.items() if default is MISSING} for kind, known in DEFAULTS.items()}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_COUNT, _RANK = range(1 << 63), range(-1, 1 << 31)
NUMBERS = {"client": _RANK, "worker": _RANK, "priority": range(-(1 << 63), 1 << 63)}
NUMBERS |= dict.fromkeys(("epoch", "sequence", "acknowledged", "clock", "view", "number"), _COUNT)


class FrameError(ValueError):
    """A frame that cannot be sent, or that must not be believed; the message names the field and its value."""


def wrong(field: str, value: object, why: str) -> NoReturn:
    raise FrameError(f"{field}: {value!r:.200}; {why}")


# ---- out ------------------------------------------------------------------------------------------------------------------


def frame(record: Event | Reply, checked: bool = False, where: Where = lambda tensor: NOWHERE) -> list[Bytes]:
    """The buffers of a record, to be sent one after another; the tensors are not copied, so must stay as they are until then.

    >>> buffers = frame(Request("push", "w", torch.ones(2), client=1, sequence=3), checked=True)
    >>> bytes(buffers[0][PREFIX.size:]).decode().strip()
    '["Request",{"op":"push","key":"w","client":1,"sequence":3,"value":["float32",[2]]}]'
    >>> parse(buffers, limit=1000).value
    tensor([1., 1.])

    checked: with a checksum of the tensors, for the disk; 0.25 s per GB at either end. where: the offset and the bytes of a
    tensor in memory that both ends see. FrameError for what does not fit.
    """
    payload: list[memoryview] = []
    try:
        head = _JSON.encode(_said(record, payload, where)).encode()
    except (ValueError, TypeError, RuntimeError) as error:
        raise FrameError(f"this cannot be sent: {error}: {record!r:.200}") from error
    if len(head) > MAX_HEAD:
        wrong("head", head, f"{len(head)} bytes, and at most {MAX_HEAD} can be sent beside the tensors")
    return [seal(head, payload, checked), *payload]


def seal(head: bytes, payload: Sequence[Bytes] = (), checked: bool = False) -> bytes:
    """A head with its prefix, and the spaces after it."""
    head += b" " * (-len(head) % 8)
    begin = PREFIX.pack(MAGIC, VERSION, CHECKED * checked, len(head), checksum(*payload) if checked else 0, 0)[:-4]
    return begin + struct.pack("<I", checksum(begin, head)) + head


def _said(record: Event | Reply, payload: list[memoryview], where: Where) -> list[Any]:
    """What the head says; the tensors' bytes go into `payload`."""
    said, kind = vars(record), type(record)
    found = {name: value for name, value in said.items() if name not in _TENSORS and value != DEFAULTS[kind][name]}
    for name, value in found.items():
        if name == "event":
            found[name] = _said(value, payload, where) if type(value) in _INSIDE else wrong(name, value, "not inside a Send")
        else:
            found[name] = [list(pair) for pair in value.items()] if name == "workers" else value
            _checked(kind, name, found[name])
    rows, value, out = (said.get(name) for name in _TENSORS)
    if rows is not None:
        if rows.dtype != torch.int64 or rows.dim() != 1:
            wrong("rows", rows.dtype, f"wanted int64 of one dimension, not {list(rows.shape)}")
        found["rows"] = len(rows)
        payload.append(bytes_of(rows))
    if value is not None:
        found["value"] = _tensor(value, payload, where)
    if out is not None and where(out) != NOWHERE:
        found["out"] = where(out)
    payload[:] = [view for view in payload if view.nbytes]
    return [kind.__name__, found]


def _tensor(value: torch.Tensor, payload: list[memoryview], where: Where) -> list[Any]:
    name, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if name not in DTYPES or len(shape) > MAX_DIMS:
        wrong("value", f"{value.dtype}{shape}", f"sent are {', '.join(DTYPES)}, of at most {MAX_DIMS} dimensions")
    if where(value) != NOWHERE:
        return [name, shape, where(value)[0]]
    payload.append(bytes_of(value))
    return [name, shape]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes where they lie, in any dtype; a strided tensor is copied once, one of another device too."""
    return stage(tensor, torch.device("cpu")).view(torch.uint8).numpy().data


# ---- in -------------------------------------------------------------------------------------------------------------------


def _nowhere(offset: int, nbytes: int) -> memoryview:
    wrong("reference", (offset, nbytes), "no memory is shared here")


def parse(buffers: Sequence[Bytes], limit: int, lookup: Lookup = _nowhere) -> Event | Reply:
    """The record of a frame of at most `limit` bytes of tensors; `frame` for an example; FrameError if it is not one.

    Its tensors share the memory of buffers that can be written to (a bytearray, what pyzmq received without a copy), and keep
    it alive; of read-only ones, such as bytes, they are copies. `limit` counts rows and value together. lookup: the memory of
    an offset and a number of bytes, where the sender may speak of memory that both see.
    """
    try:
        views = [memoryview(buffer).cast("B") for buffer in buffers] or [memoryview(b"")]
    except TypeError as error:
        raise FrameError(f"buffers: {error}") from error
    head, sum_, end = _head(views[0])
    rest = [view for view in (views[0][end:], *views[1:]) if view.nbytes]
    try:
        content = json.loads(head)
    except (ValueError, RecursionError) as error:
        wrong("head", head, f"no JSON: {error}")
    payload = _Payload(rest, limit, lookup, sum_)
    record: Event | Reply = _record(content, payload, tuple(KINDS.values()))
    return record


def _head(first: memoryview) -> tuple[bytes, int | None, int]:
    """The head of a frame, the checksum of its tensors if there is one, and where the head ends."""
    if first.nbytes < PREFIX.size:
        wrong("length", first.nbytes, f"a prefix has {PREFIX.size} bytes")
    magic, version, flags, length, sum_, own = PREFIX.unpack_from(first)
    for name, value, allowed in (("magic", magic, (MAGIC,)), ("version", version, (VERSION,)), ("flags", flags, (0, CHECKED))):
        if value not in allowed:
            wrong(name, value, f"wanted {allowed}")
    end = PREFIX.size + length
    if length % 8 or length > MAX_HEAD + 8 or end > first.nbytes:
        wrong("head length", length, f"a multiple of 8, at most {MAX_HEAD}, and the buffer has {first.nbytes} bytes")
    if checksum(first[: PREFIX.size - 4], first[PREFIX.size : end]) != own:
        wrong("head checksum", own, "the head has another")
    if not flags and sum_:
        wrong("payload_checksum", sum_, "there is to be none")
    return bytes(first[PREFIX.size : end]), sum_ if flags else None, end


class _Payload:
    """The buffers after a head, and what may be made of them."""

    def __init__(self, rest: list[memoryview], limit: int, lookup: Lookup, sum_: int | None) -> None:
        self.rest, self.limit, self.lookup, self.sum = rest, limit, lookup, sum_

    def tensors(self, rows: Any, value: Any, out: Any) -> dict[str, torch.Tensor]:
        """The tensors that a head speaks of, all of it checked."""
        count = -1 if rows is None else _natural("rows", rows, 1 << 40)
        dtype, shape, offset = (None, [], None) if value is None else self._described(value)
        nbytes = math.prod(shape) * dtype.itemsize if dtype else 0
        if 8 * count + nbytes > self.limit:
            wrong("rows", count, f"at most {self.limit} bytes, and the value has {nbytes}")
        wanted = [n for n in (8 * max(0, count), nbytes if offset is None else 0) if n]
        if len(self.rest) == 1 and len(wanted) == 2:
            self.rest = [self.rest[0][: wanted[0]], self.rest[0][wanted[0] :]]
        if [view.nbytes for view in self.rest] != wanted:
            wrong("payload", [view.nbytes for view in self.rest], f"buffers of {wanted} bytes")
        if self.sum is not None and checksum(*self.rest) != self.sum:
            wrong("payload_checksum", self.sum, "the payload has another")
        found = {}
        if count >= 0:
            found["rows"] = tensor_of(self.rest[0] if count else None, torch.int64, [count])
        if dtype is not None:
            far = self.lookup(offset, nbytes) if offset is not None else self.rest[-1] if nbytes else None
            found["value"] = tensor_of(far, dtype, shape)
        if out is not None:
            if not isinstance(out, list) or len(out) != 2:
                wrong("out", out, "an offset and a number of bytes")
            found["out"] = torch.frombuffer(self.lookup(*(_natural("out", n, 1 << 63) for n in out)), dtype=torch.uint8)
        return found

    def _described(self, value: Any) -> tuple[torch.dtype, list[int], int | None]:
        if not isinstance(value, list) or not 2 <= len(value) <= 3 or not isinstance(value[1], list):
            wrong("value", value, "a dtype, a shape, and perhaps an offset")
        name, shape, *offset = value
        dtype = DTYPES.get(name) if isinstance(name, str) else wrong("dtype", name, f"wanted one of {', '.join(DTYPES)}")
        if dtype is None or len(shape) > MAX_DIMS:
            wrong("value", value, f"wanted {', '.join(DTYPES)}, of at most {MAX_DIMS} dimensions")
        for length in shape:
            _natural("shape", length, 1 << 62)
        if math.prod(n or 1 for n in shape) * dtype.itemsize > self.limit:  # a 0 must not hide what no tensor can have
            wrong("shape", shape, f"at most {self.limit} bytes of {dtype}")
        return dtype, shape, _natural("offset", offset[0], 1 << 62) if offset else None


def tensor_of(view: memoryview | None, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor whose bytes these are; no bytes are an empty tensor."""
    if view is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).view(shape)


def _record(content: Any, payload: _Payload, kinds: Sequence[type]) -> Any:
    """The record that a head and its tensors make up."""
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], str) or not isinstance(content[1], dict):
        wrong("head", content, "a kind, and fields by name")
    kind, found = KINDS.get(content[0]), content[1]
    if kind not in kinds or kind is None:
        wrong("kind", content[0], f"wanted one of {', '.join(kind.__name__ for kind in kinds)}")
    if not REQUIRED[kind] <= found.keys() <= DEFAULTS[kind].keys():
        wrong("fields", sorted(found), f"a {kind.__name__} has {', '.join(DEFAULTS[kind])}")
    if kind is Send:
        numbers = {name: _checked(kind, name, value) for name, value in found.items() if name != "event"}
        return Send(event=_record(found["event"], payload, _INSIDE), **numbers)
    plain = {name: _checked(kind, name, value) for name, value in found.items() if name not in _TENSORS}
    tensors: dict[str, Any] = payload.tensors(*map(found.get, _TENSORS))
    return kind(**plain, **tensors)


def _checked(kind: type, name: str, value: Any) -> Any:
    """A field's value as the record has it; FrameError for one that it can't have."""
    if name in NUMBERS:
        if type(value) is not int or value not in NUMBERS[name]:
            wrong(name, value, f"wanted {NUMBERS[name]}")
    elif name == "options":
        if not isinstance(value, Mapping):
            wrong(name, value, "options by name")
    elif name == "workers":
        pairs = value if isinstance(value, list) else [value]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            wrong(name, value, "pairs of rank and epoch")
        return {_natural(name, rank, 1 << 31): _natural(name, epoch, 1 << 63) for rank, epoch in pairs}
    elif name in ("servers", "owner"):
        members = value if isinstance(value, list | tuple) else wrong(name, value, "a list of numbers")
        return tuple(_natural(name, number, 1 << 63) for number in members)
    elif not isinstance(value, str) or (name == "op" and value not in (OPS if kind is Request else ("", *OPS, "send"))):
        wrong(name, value, "wanted a text" if name != "op" else f"wanted one of {', '.join(OPS)}")
    return value


def _natural(name: str, value: Any, end: int) -> int:
    return value if type(value) is int and 0 <= value < end else wrong(name, value, f"wanted a number from 0 to {end - 1}")


_TENSORS = ("rows", "value", "out")
_INSIDE = (Request, Lost, Membership)  # what a Send may carry
