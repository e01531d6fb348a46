"""Events and replies as bytes: a fixed header, a key, a text and up to two tensors; never pickle, which runs what it reads.

    head       160 bytes (HEADER), the key and the text in UTF-8, zeros up to a multiple of 8
    rows       int64, where a request is about some rows of a tensor
    value      the tensor's bytes as they lie in memory, little-endian

The text is JSON, or the error of a reply. A frame goes out as a list of these buffers without a copy of a tensor, and comes
in as the same list, or as one buffer that holds them all (a record of the log). What comes in is checked from front to
back, and each number before it is used: a wrong frame is a FrameError, and costs nothing but its own bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from d2lps.comm.staging import stage
from d2lps.kvstore.events import OPS, Event, Joined, Lost, Membership, Reply, Request, Send, Tick
from d2lps.kvstore.log import Bytes, checksum

MAGIC, VERSION = b"d2ps", 1
HEADER = struct.Struct("<4s6BHIq7q8QQII")
CHECKED = 1  # flag: the header has a checksum of the rows and the value too
MAX_DIMS, MAX_TEXT = 8, 1 << 16
# Numbers on the wire are places in these tuples: a change of their order is another VERSION. A dtype of 0 is no tensor.
KINDS = (Request, Reply, Lost, Joined, Tick, Membership, Send)
CODES = ("", *OPS, "send")
DTYPES: tuple[torch.dtype | None, ...] = (
    None, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip


class FrameError(ValueError):
    """A frame that cannot be sent, or that must not be believed; the message names the field and its value."""


class Head(NamedTuple):
    """The header's fields in their order."""

    magic: bytes = MAGIC
    version: int = VERSION
    kind: int = 0  # of KINDS
    op: int = 0  # of CODES
    flags: int = 0
    dtype: int = 0  # of DTYPES
    dims: int = 0
    key_bytes: int = 0
    text_bytes: int = 0
    rows: int = -1  # how many rows are named; -1: the whole tensor is meant
    client: int = 0
    epoch: int = 0
    sequence: int = 0
    acknowledged: int = 0
    clock: int = 0
    priority: int = 0
    view: int = 0
    shape: tuple[int, ...] = (0,) * MAX_DIMS
    value_bytes: int = 0
    payload_checksum: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the head: of header, key and text."""
        return -(-(HEADER.size + self.key_bytes + self.text_bytes) // 8) * 8


def frame(record: Event | Reply, checked: bool = False) -> list[Bytes]:
    """The buffers of a record, to be sent one after another; the tensors are not copied, so must stay as they are until then.

    >>> buffers = frame(Request("push", "w", torch.ones(2), client=1, sequence=3), checked=True)
    >>> [len(buffer) for buffer in buffers]
    [168, 8]
    >>> parse(buffers, limit=1000).value
    tensor([1., 1.])

    checked: with a checksum of the tensors, for sockets; 0.25 s per GB at either end. FrameError for what does not fit.
    """
    said = vars(record)
    number = said.get
    try:
        if isinstance(number("event"), Send):
            wrong("event", "Send", "inside a Send is an event of another kind")
        key, text = number("key", "").encode(), text_of(record).encode()
        rows, dtype, shape, value_bytes, payload = describe(number("rows"), number("value"))
        head = Head(
            kind=KINDS.index(type(record)),
            op=CODES.index(number("op", "")),
            flags=CHECKED if checked else 0,
            dtype=dtype,
            dims=len(shape),
            key_bytes=len(key),
            text_bytes=len(text),
            rows=rows,
            client=number("client", number("worker", 0)),
            epoch=number("epoch", 0),
            sequence=number("sequence", number("number", 0)),
            acknowledged=number("acknowledged", 0),
            clock=number("clock", 0),
            priority=number("priority", 0),
            view=number("view", 0),
            shape=(*shape, *(0,) * (MAX_DIMS - len(shape))),
            value_bytes=value_bytes,
            payload_checksum=checksum(*payload) if checked else 0,
        )
        check_head(head, limit=1 << 62)
        first = seal(head, key + text)
    except (ValueError, TypeError, struct.error) as error:
        raise FrameError(f"this cannot be sent: {error}: {record!r:.200}") from error
    return [first, *payload, *(frame(record.event, checked) if isinstance(record, Send) else [])]


def parse(buffers: Sequence[Bytes], limit: int) -> Event | Reply:
    """The record of a frame of at most `limit` bytes of tensors; `frame` for an example; FrameError if it is not one.

    Its tensors share the memory of buffers that can be written to (a bytearray, what pyzmq received without a copy), and keep
    it alive; of read-only ones, such as bytes, they are copies. `limit` counts rows and value together.
    """
    try:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
    except TypeError as error:
        raise FrameError(f"buffers: {error}") from error
    return _parse(views, limit, inside=False)


def _parse(views: list[memoryview], limit: int, inside: bool) -> Event | Reply:
    head, key, text = read_head(views[0] if views else memoryview(b""), limit)
    rest = [view for view in (views[0][head.nbytes :], *views[1:]) if view.nbytes]
    if inside and KINDS[head.kind] in (Send, Reply):
        wrong("kind", KINDS[head.kind].__name__, "inside a Send is an event of another kind")
    if KINDS[head.kind] is Send:
        return Send(head.sequence, _parse(rest, limit, inside=True), head.view)  # type: ignore[arg-type]
    rows_bytes = 8 * max(0, head.rows)
    if len(rest) == 1 and rows_bytes and head.value_bytes:
        rest = [rest[0][:rows_bytes], rest[0][rows_bytes:]]
    lengths, wanted = [view.nbytes for view in rest], [n for n in (rows_bytes, head.value_bytes) if n]
    if lengths != wanted:
        wrong("payload", lengths, f"buffers of {wanted} bytes")
    if head.payload_checksum != (checksum(*rest) if head.flags & CHECKED else 0):
        wrong("payload_checksum", head.payload_checksum, "the payload has another")
    rows = tensor_of(rest.pop(0) if rows_bytes else None, torch.int64, (head.rows,)) if head.rows >= 0 else None
    dtype = DTYPES[head.dtype]
    value = tensor_of(rest[0] if rest else None, dtype, head.shape[: head.dims]) if dtype else None
    return record_of(head, key, text, rows, value)


# ---- the head -------------------------------------------------------------------------------------------------------------


def describe(rows: torch.Tensor | None, value: torch.Tensor | None) -> tuple[int, int, tuple[int, ...], int, list[memoryview]]:
    """What a head says of the tensors, from `rows` to `value_bytes`, and their bytes."""
    count, dtype, shape, payload = -1, 0, tuple[int, ...](), list[memoryview]()
    if rows is not None:
        if rows.dtype != torch.int64 or rows.dim() != 1:
            wrong("rows", rows.dtype, f"wanted int64 of one dimension, not {list(rows.shape)}")
        count = len(rows)
        payload.append(bytes_of(rows))
    if value is not None:
        if value.dtype not in DTYPES:
            wrong("value", value.dtype, f"sent are {DTYPES[1:]}")
        dtype, shape = DTYPES.index(value.dtype), tuple(value.shape)
        payload.append(bytes_of(value))
    return count, dtype, shape, payload[-1].nbytes if dtype else 0, [view for view in payload if view.nbytes]


def seal(head: Head, texts: bytes) -> bytes:
    """Header, checksum of the head, key and text, and the zeros after them."""
    begin = HEADER.pack(*head[:17], *head.shape, *head[18:], 0)[:-4]
    texts = texts.ljust(head.nbytes - HEADER.size, b"\0")
    return begin + struct.pack("<I", checksum(begin, texts)) + texts


def read_head(first: memoryview, limit: int) -> tuple[Head, str, str]:
    """The header of a frame with its key and its text, all of it checked."""
    if first.nbytes < HEADER.size:
        wrong("length", first.nbytes, f"a header has {HEADER.size} bytes")
    fields = HEADER.unpack_from(first)
    head = Head._make([*fields[:17], fields[17:25], *fields[25:27]])
    check_head(head, limit)
    if head.nbytes > first.nbytes:
        wrong("key_bytes, text_bytes", (head.key_bytes, head.text_bytes), f"the buffer has {first.nbytes} bytes")
    texts = bytes(first[HEADER.size : head.nbytes])
    if checksum(first[: HEADER.size - 4], texts) != fields[-1]:
        wrong("head checksum", fields[-1], "the head has another")
    end = head.key_bytes + head.text_bytes
    try:
        return head, texts[: head.key_bytes].decode(), texts[head.key_bytes : end].decode()
    except UnicodeDecodeError as error:
        wrong("key or text", texts, f"not UTF-8: {error}")


def check_head(head: Head, limit: int) -> None:
    """Refuse what no frame of ours can say, and tensors over the limit."""
    for field, allowed in ALLOWED.items():
        if getattr(head, field) not in allowed:
            wrong(field, getattr(head, field), f"wanted {allowed}")
    dtype, shape = DTYPES[head.dtype], head.shape[: head.dims]
    itemsize = dtype.itemsize if dtype else 0
    if any(head.shape[head.dims :]) or (shape and not dtype):
        wrong("shape", head.shape, f"{dtype} of {head.dims} dimensions")
    if math.prod(n or 1 for n in shape) * itemsize > limit:  # a 0 must not hide dimensions that no tensor can have
        wrong("shape", head.shape, f"at most {limit} bytes of {dtype}")
    if head.value_bytes != math.prod(shape) * itemsize:
        wrong("value_bytes", head.value_bytes, f"{dtype}{list(shape)}")
    if head.value_bytes + 8 * head.rows > limit:
        wrong("rows", head.rows, f"at most {limit} bytes, and the value has {head.value_bytes}")


COUNT = range(1 << 63)
ALLOWED: dict[str, Any] = {"magic": (MAGIC,), "version": (VERSION,), "kind": range(len(KINDS)), "op": range(len(CODES))}
ALLOWED |= {"flags": (0, CHECKED), "dtype": range(len(DTYPES)), "dims": range(MAX_DIMS + 1), "text_bytes": range(MAX_TEXT + 1)}
ALLOWED |= {"rows": range(-1, 1 << 40), "client": range(-1, 1 << 31)}
ALLOWED |= dict.fromkeys(("epoch", "sequence", "acknowledged", "clock", "view"), COUNT)


def wrong(field: str, value: object, why: str) -> NoReturn:
    raise FrameError(f"{field}: {value!r:.200}; {why}")


# ---- texts and tensors ----------------------------------------------------------------------------------------------------


def text_of(record: Event | Reply) -> str:
    """What a record says beside its numbers and tensors."""
    match record:
        case Request(options=options):
            return json.dumps(dict(options), allow_nan=False) if options else ""
        case Reply(error=error):
            return error
        case Tick(time=time):
            return json.dumps(time, allow_nan=False)
        case Membership(workers=workers, servers=servers):
            return json.dumps([list(workers.items()), list(servers)])
    return ""


def record_of(head: Head, key: str, text: str, rows: torch.Tensor | None, value: torch.Tensor | None) -> Event | Reply:
    """The record that a head, its text and its tensors make up."""
    numbers: dict[str, Any] = {"client": head.client, "epoch": head.epoch, "sequence": head.sequence, "clock": head.clock}
    numbers |= {"priority": head.priority, "view": head.view}
    op, kind = CODES[head.op], KINDS[head.kind]
    if kind is Reply:
        return Reply(op=op, key=key, value=value, error=text, **numbers)
    if kind is Lost:
        return Lost(head.client)
    if kind is Joined:
        return Joined(head.client, head.epoch)
    try:
        content: Any = json.loads(text) if text or kind is not Request else {}
        if kind is Tick:
            return Tick(float(content))
        if kind is Membership:
            workers, servers = content
            return Membership(head.view, {int(rank): int(epoch) for rank, epoch in workers}, tuple(map(int, servers)))
        if op not in OPS or not isinstance(content, dict):
            wrong("op, text", (op, text), "a request has an op, and options by name")
        return Request(op, key, value, rows, content, acknowledged=head.acknowledged, **numbers)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError(f"text: {text!r:.200}; {error}") from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes where they lie, in any dtype; a strided tensor is copied once, one of another device too."""
    return stage(tensor, torch.device("cpu")).view(torch.uint8).numpy().data


def tensor_of(view: memoryview | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes these are; no bytes are an empty tensor."""
    if view is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).view(shape)
