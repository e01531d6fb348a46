"""Events, replies and whole states as bytes: a head in JSON, and up to two tensors; never pickle, which runs what it reads.

    prefix     16 bytes (PREFIX): magic, version, length of the head, checksum of prefix and head; tensors are seen to by who
               carries them, a log or CURVE
    head       the record in JSON, without what is as by default, and spaces up to a multiple of 8
    tensors    their bytes as they lie in memory, little-endian, the last one first: rows, of 8 bytes each, before the value

In the head a tensor is [dtype, shape]; or [dtype, shape, offset] where it does not travel, since both ends see the memory in
which it lies (see `Wire`). A frame goes out as a list of these buffers without a copy of a tensor, and comes in as the same
list, or as one buffer that holds them all (a record of the log). What comes in is checked from front to back, and each field
before it is used, against the types of the records (see `events`): a wrong frame is a FrameError, and costs its own bytes, and
for a moment what its head is made into: up to 30 times as many, of a head of 64 KB at most.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
import torch
from msgspec import Meta, msgpack

from d2lps.comm.staging import stage
from d2lps.kvstore.core.events import Count, Event, Lost, Membership, Reply, Request, Send
from d2lps.kvstore.storage.log import Bytes, checksum

MAGIC, VERSION = b"d2ps", 5
PREFIX = struct.Struct("<4sIII")
MAX_DIMS, MAX_HEAD = 8, 1 << 16
NOWHERE = (-1, 0)  # of a tensor that travels
Where = Callable[[torch.Tensor | None], tuple[int, int]]
Lookup = Callable[[int, int], memoryview]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)}  # fmt: skip


class Said(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a head says of a tensor."""

    dtype: str
    shape: Annotated[list[Count], Meta(max_length=MAX_DIMS)]
    offset: Count | None = None  # where it lies in memory that both ends see


class FrameError(ValueError):
    """A frame that cannot be sent, or that must not be believed; the message names the field and its value."""


def wrong(field: str, value: object, why: object) -> NoReturn:
    raise FrameError(f"{field}: {value!r:.200}; {why}")


# ---- out ------------------------------------------------------------------------------------------------------------------


def frame(record: Event | Reply, where: Where = lambda tensor: NOWHERE) -> list[Bytes]:
    """The buffers of a record, to be sent one after another; the tensors are not copied, so must stay as they are until then.

    >>> buffers = frame(Request("push", "w", torch.ones(2), client=1, sequence=3))
    >>> bytes(buffers[0][PREFIX.size:]).decode().strip()
    '{"type":"Request","op":"push","key":"w","value":["float32",[2]],"client":1,"sequence":3}'
    >>> parse(buffers, limit=1000).value
    tensor([1., 1.])

    where: the address and the bytes of a value that the other end can read where it lies. FrameError for what does not fit.
    """
    payload, value = list[Bytes](), getattr(record, "value", None)

    def said(tensor: Any) -> list[Any]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{tensor!r:.200} is no tensor")
        offset = where(tensor)[0] if tensor is value else -1  # rows always travel
        if offset < 0 and tensor.numel():
            payload.insert(0, bytes_of(tensor))
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *([offset] if offset >= 0 else [])]

    try:
        head = msgspec.json.encode(record, enc_hook=said)
        if len(head) > MAX_HEAD:
            wrong("head", head, f"{len(head)} bytes, and at most {MAX_HEAD} can be sent beside the tensors")
        _HEAD.decode(head)  # as it will be held against the types where it arrives
    except (ValueError, TypeError, RuntimeError) as error:
        raise FrameError(f"this cannot be sent: {error}: {record!r:.200}") from error
    return [seal(head), *payload]


def seal(head: bytes) -> bytes:
    """A head with its prefix, and the spaces after it."""
    head += b" " * (-len(head) % 8)
    begin = PREFIX.pack(MAGIC, VERSION, len(head), 0)[:-4]
    return begin + struct.pack("<I", checksum(begin, head)) + head


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
    head = _head(views[0])
    rest = [view for view in (views[0][PREFIX.size + head.nbytes :], *views[1:]) if view.nbytes]
    _payload.rest, _payload.limit, _payload.lookup = rest, limit, lookup
    try:
        record: Event | Reply = _HEAD.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wrong("head", bytes(head), error)
    finally:
        _payload.rest = None
    if rest:
        wrong("payload", [view.nbytes for view in rest], "bytes of no tensor")
    return record


def _head(first: memoryview) -> memoryview:
    """The head of a frame."""
    if first.nbytes < PREFIX.size:
        wrong("length", first.nbytes, f"a prefix has {PREFIX.size} bytes")
    magic, version, length, own = PREFIX.unpack_from(first)
    if (magic, version) != (MAGIC, VERSION):
        wrong("magic and version", (magic, version), f"wanted {(MAGIC, VERSION)}")
    head = first[PREFIX.size :][:length]
    if length % 8 or length > MAX_HEAD + 8 or length > head.nbytes:
        wrong("head length", length, f"a multiple of 8, at most {MAX_HEAD}, and the buffer has {first.nbytes} bytes")
    if checksum(first[: PREFIX.size - 4], head) != own:
        wrong("head checksum", own, "the head has another")
    return head


class _Payload(threading.local):
    """The buffers after the head that a thread reads, from which the head's tensors take their bytes."""

    rest: list[memoryview] | None = None  # None: the head is only looked at
    limit: int
    lookup: Lookup

    def tensor(self, kind: type, said: Any) -> torch.Tensor:
        try:
            found = msgspec.convert(said, Said)
        except msgspec.ValidationError as error:
            raise FrameError(error) from error  # which msgspec gives the path of the tensor
        if found.dtype not in DTYPES:
            wrong("dtype", found.dtype, f"wanted one of {', '.join(DTYPES)}")
        if self.rest is None:
            return _NOTHING
        dtype, shape = DTYPES[found.dtype], found.shape
        if math.prod(n or 1 for n in shape) * dtype.itemsize > self.limit:  # a 0 must not hide what no tensor can have
            wrong("shape", shape, f"at most {self.limit} bytes of {dtype}")
        nbytes = math.prod(shape) * dtype.itemsize
        view = self.taken(nbytes) if found.offset is None else self.lookup(found.offset, nbytes)
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).view(shape)

    def taken(self, nbytes: int) -> memoryview:
        """The last of the bytes that are left."""
        last = self.rest.pop() if nbytes and self.rest else memoryview(b"")
        if nbytes > last.nbytes:
            wrong("payload", last.nbytes, f"wanted {nbytes} bytes")
        self.limit -= nbytes
        if self.rest is not None and last.nbytes > nbytes:
            self.rest.append(last[:-nbytes])
        return last[-nbytes:]


_NOTHING = torch.empty(0)
_payload = _Payload()
_HEAD = msgspec.json.Decoder(Request | Reply | Lost | Membership | Send, dec_hook=_payload.tensor)


# ---- a server's whole state, in its log ----------------------------------------------------------------------------------------


def pack(state: Any) -> list[Bytes]:
    """The buffers of dictionaries, lists, numbers, strings and tensors; the tensors are not copied, tuples become lists.

    >>> buffers = pack({"clocks": {0: 3}, "values": {"w": torch.ones(2)}})
    >>> unpack(bytearray(b"".join(buffers)))
    {'clocks': {0: 3}, 'values': {'w': tensor([1., 1.])}}

    After the prefix a head in MessagePack, however long, then the tensors in the order in which the head names them; the head and
    each tensor with zeros up to a multiple of 8 bytes.
    """
    payload = list[Bytes]()

    def said(tensor: Any) -> msgpack.Ext:
        payload.append(bytes_of(tensor))
        return msgpack.Ext(0, msgpack.encode([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]))

    head = msgpack.encode(state, enc_hook=said)
    prefix = PREFIX.pack(MAGIC, VERSION, len(head), 0)
    return [prefix, *(piece for data in (head, *payload) for piece in (data, bytes(-len(data) % 8)))]


def unpack(data: bytearray) -> Any:
    """The state of `pack`; its tensors share the memory of `data`. FrameError for what another version has written."""
    rest = memoryview(data)
    magic, version, length, _ = PREFIX.unpack_from(rest)
    if (magic, version) != (MAGIC, VERSION):
        wrong("magic and version of a state", (magic, version), f"wanted {(MAGIC, VERSION)}")

    def taken(nbytes: int) -> memoryview:
        nonlocal rest
        mine, rest = rest[:nbytes], rest[nbytes + -nbytes % 8 :]
        return mine

    def tensor(_: int, said: memoryview) -> torch.Tensor:
        dtype, shape = msgpack.decode(said)
        mine = taken(math.prod(shape) * DTYPES[dtype].itemsize)
        return torch.frombuffer(mine, dtype=DTYPES[dtype]).view(shape) if mine else torch.empty(shape, dtype=DTYPES[dtype])

    taken(PREFIX.size)
    return msgpack.decode(taken(length), ext_hook=tensor)
