"""Frames: every record comes back as it was, and whatever else arrives is a FrameError that costs nothing."""

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps.kvstore.core.events import Event, Lost, Membership, Reply, Request, Send, replace
from d2lps.kvstore.core.table import OPERATIONS
from d2lps.kvstore.storage import frame as frames
from d2lps.kvstore.storage.frame import DTYPES, MAGIC, MAX_DIMS, PREFIX, VERSION, FrameError, frame, parse

OPS = list(OPERATIONS)
LIMIT = 1 << 20
MUTATIONS = 1_000_000 if os.environ.get("D2LPS_SOAK") else 20_000
EXAMPLES = 2_000 if os.environ.get("D2LPS_SOAK") else 200


# ---- records of all kinds -------------------------------------------------------------------------------------------------

counts = st.integers(0, 2**63 - 1)
ranks = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)  # any, but half of a surrogate pair
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, zero to eight dimensions, empty ones too, and sometimes not contiguous."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=MAX_DIMS))
    tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(ranks))).to(dtype)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


rows = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda rows: torch.tensor(rows, dtype=torch.int64))
options = st.dictionaries(texts, st.one_of(st.integers(), finite, texts, st.booleans(), st.lists(finite)), max_size=3)
requests = st.builds(
    Request,
    op=st.sampled_from(OPS),
    key=texts,
    value=st.none() | tensors(),
    rows=st.none() | rows,
    options=options,
    clock=counts,
    priority=st.integers(-(2**63), 2**63 - 1),
    client=ranks,
    epoch=counts,
    sequence=counts,
    acknowledged=counts,
    view=counts,
)
replies = st.builds(
    Reply, client=st.integers(-1, 2**31 - 1), epoch=counts, sequence=counts, op=st.sampled_from(["", *OPS]), key=texts,
    value=st.none() | tensors(), error=texts, clock=counts, priority=st.integers(-9, 9), view=counts,
)  # fmt: skip
members = st.builds(Membership, view=counts, servers=st.lists(ranks, max_size=4).map(tuple))
events = requests | st.builds(Lost, ranks) | members
sends = st.builds(Send, number=counts, event=events, view=counts)
records = events | replies | sends


def test_records_are_equal_if_all_in_them_is() -> None:
    one, other = Request("push", "w", torch.ones(2), client=1), Request("push", "w", torch.ones(2), client=1)
    assert one == other and not one != other  # noqa: SIM202 - Struct has a != of its own
    assert one != replace(other, value=torch.zeros(2)) and one != Lost(1) and one != "push"
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(AttributeError):
        one.key = "v"


@settings(max_examples=EXAMPLES, deadline=None)
@given(records)
def test_every_record_comes_back_as_it_was(record: Event | Reply) -> None:
    buffers = frame(record)
    for arrived in (buffers, [bytes(buffer) for buffer in buffers], [bytearray().join(buffers)]):
        assert parse(arrived, LIMIT) == record


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    value = torch.tensor([0.1, -1.5, 3e4]).to(dtype)
    again = parse(frame(Request("push", "w", value)), LIMIT).value
    assert again.dtype == dtype and torch.equal(again.view(torch.uint8), value.view(torch.uint8))


# ---- copies ---------------------------------------------------------------------------------------------------------------


def test_a_contiguous_tensor_goes_out_and_comes_in_without_a_copy() -> None:
    value = torch.zeros(1000)
    buffers = frame(Request("push", "w", value))
    value += 1
    arrived = bytearray(buffers[1])
    parsed = parse([buffers[0], arrived], LIMIT).value
    assert parsed.sum() == 1000  # the addition came after the frame was made, and is in it
    arrived[:4] = struct.pack("<f", 5.0)
    assert parsed[0] == 5


def test_read_only_buffers_are_copied() -> None:
    first, payload = frame(Request("push", "w", torch.ones(2)))
    parsed = parse([first, bytes(payload)], LIMIT).value
    parsed += 1
    assert parsed.tolist() == [2, 2] and bytes(payload) == struct.pack("<2f", 1, 1)


def test_tensors_in_one_buffer_are_aligned() -> None:
    whole = bytearray().join(frame(Request("push", "odd", torch.ones(3), torch.tensor([1, 2, 3]))))
    request = parse([whole], LIMIT)
    assert request.value.data_ptr() % 4 == 0 and request.rows.data_ptr() % 8 == 0


# ---- what cannot be sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Request("grab it"), "matching regex .*grab it"),
        (Request("push", value=torch.ones(1, dtype=torch.uint16)), "uint16"),
        (Request("push", value=torch.ones((1,) * 9)), "length <= 8.*value"),
        (Request("push", value=torch.ones(1, device="meta")), "meta"),
        (Request("push", sequence=-1), "sequence`: .*sequence=-1"),
        (Request("push", sequence=1 << 64), "18446744073709551616"),
        (Request("push", key="k" * 70_000), "head: .*kkk.*; 70039 bytes"),
        (Request("set_optimizer", options={"lr": float("nan")}), "nan"),
        (Request("set_optimizer", options={"lr": torch.ones(1)}), r"got `array` .* tensor\(\[1.\]\)"),
        (Request("set_optimizer", options={"lr": print}), "print"),
        (Request("set_optimizer", options={"lr": None}), "lr.: None"),
        (Request("init", "half a pair: \ud800"), "surrogates not allowed: .*half a pair"),
        (Reply(0, 0, 0, error="e" * 70_000), "head: .*eee"),
        (Membership(1, (-1,)), "-1"),
        (Send(1, Send(2, Lost(0))), "Send"),
    ],
)
def test_what_cannot_be_sent_is_an_error_that_says_what(record: Event | Reply, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        frame(record)


# ---- what must not be believed --------------------------------------------------------------------------------------------


def seal(head: object, *payload: bytes) -> list[bytes]:
    """A frame with any head and a right checksum: what somebody could send who knows the format."""
    return [frames.seal(head if isinstance(head, bytes) else json.dumps(head).encode()), *payload]


def refused(buffers: Sequence[bytes], limit: int = LIMIT, most: int = 200_000) -> str:
    """The error's message; memory in use never rises by more than the few bytes of an error."""
    tracemalloc.start()
    with pytest.raises(FrameError) as caught:
        parse(buffers, limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most
    return str(caught.value)


EIGHT = b"\0" * 8


def push(**fields: object) -> dict[str, object]:
    return {"type": "Request", "op": "push", "value": ["float32", [2]]} | fields


def membership(**fields: object) -> dict[str, object]:
    return {"type": "Membership", "view": 1, "servers": []} | fields


def send(event: object, number: object = 1) -> dict[str, object]:
    return {"type": "Send", "number": number, "event": event}


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"type": "Grab"}, "'Grab' - at `$.type`"),
        ({"type": ["Request"]}, "Expected `str` - at `$.type`"),
        ({"op": "push"}, "missing required field `type`"),
        (["Request", {}], "got `array`"),
        ({}, "missing required field `type`"),
        (7, "got `int`"),
        (b"[1", "got `array`"),
        (b'{"type":"Request"', "head: b'"),
        (b"[" * 60_000, "got `array`"),
        (b"\xff", "head: b'\\xff"),
        (b'{"type":"Request","op":"push","key":"\xff"}', "head: b'"),
        (b'{"type":"Request","op":"push","key":"\\ud800"}', "head: b'"),  # half of a surrogate pair
        (b"9" * 5_000, "Number out of range"),
        (b'{"type":"Request","op":"push","sequence":' + b"9" * 5_000 + b"}", "Integer value out of range"),
        (push(op="grab!"), "matching regex"),
        (push(op=""), "matching regex"),
        (push(op=["push"]), "got `array` - at `$.op`"),
        ({"type": "Request"}, "missing required field `op`"),
        (push(speed=9), "unknown field `speed`"),
        (push(key=7), "Expected `str`, got `int` - at `$.key`"),
        (push(options=[1]), "got `array` - at `$.options`"),
        (push(options={"lr": None}), "got `null` - at `$.options[...]`"),
        (push(options={"lr": [[1]]}), "got `array` - at `$.options[...][0]`"),
        (push(client=-2), "Expected `int` >= 0 - at `$.client`"),
        (push(client=1 << 31), "Expected `int` <= 2147483647 - at `$.client`"),
        (push(client=True), "got `bool` - at `$.client`"),
        (push(sequence=-5), "Expected `int` >= 0 - at `$.sequence`"),
        (push(sequence=1.0), "got `float` - at `$.sequence`"),
        (push(sequence=1 << 63), "Expected `int` <= 9223372036854775807 - at `$.sequence`"),
        (push(sequence=1 << 64), "Expected `int` <= 9223372036854775807 - at `$.sequence`"),
        (push(priority=1.5), "got `float` - at `$.priority`"),
        (push(rows=["int64", [-2]]), "Expected `int` >= 0 - at `$[1][0]` - at `$.rows`"),
        (push(rows=["int64", [1 << 39]]), "shape: [549755813888]"),
        (push(rows="1"), "got `str` - at `$.rows`"),
        (push(value=None), "payload: [8]"),
        (push(value=[]), "at least length 2, got 0 - at `$.value`"),
        (push(value="float32"), "got `str` - at `$.value`"),
        (push(value=["object", [1]]), "dtype: 'object'; wanted one of float32"),
        (push(value=[["float32"], [2]]), "got `array` - at `$[0]` - at `$.value`"),
        (push(value=["float32", 2]), "got `int` - at `$[1]` - at `$.value`"),
        (push(value=["float32", [1] * 9]), "Expected `array` of length <= 8 - at `$[1]` - at `$.value`"),
        (push(value=["float32", []]), "payload: [4]"),
        (push(value=["float32", [3]]), "payload: 8"),
        (push(value=["float32", [-2]]), "Expected `int` >= 0 - at `$[1][0]` - at `$.value`"),
        (push(value=["float32", [2.0]]), "got `float` - at `$[1][0]` - at `$.value`"),
        (push(value=["float32", [1 << 40]]), "shape"),
        (push(value=["float32", [1 << 32, 1 << 32]]), "shape"),  # 2^64 elements are 0 in 64 bits
        (push(value=["float32", [1 << 61, 1 << 61, 0]]), "shape"),  # no elements, yet no tensor either
        (push(value=["float32", [(1 << 64) - 2]]), "at `$[1][0]` - at `$.value`"),  # -2 in two's complement
        (push(value=["float32", [1 << 63, 2]]), "at `$[1][0]` - at `$.value`"),
        (push(value=["float32", [(1 << 64) - 1, (1 << 64) - 2]]), "at `$[1][0]` - at `$.value`"),  # -1 times -2
        (push(value=["float32", [1 << 62, 1 << 62, 0]]), "shape"),
        (push(value=["float32", [2], 0]), "reference: (0, 8)"),
        (push(value=["float32", [2], 0, 0]), "at most length 3, got 4 - at `$.value`"),
        (push(value=["float32", [2], -1]), "Expected `int` >= 0 - at `$[2]` - at `$.value`"),
        (push(out=["uint8", [8], 0]), "unknown field `out`"),
        (membership(workers={}), "unknown field `workers`"),
        (membership(servers=[-1]), "Expected `int` >= 0 - at `$.servers[0]`"),
        (membership(servers=[1e999]), "head"),
        (membership(servers=1), "got `int` - at `$.servers`"),
        ({"type": "Send", "number": 1}, "missing required field `event`"),
        (send(5), "got `int` - at `$.event`"),
        (send(push(), number=-1), "Expected `int` >= 0 - at `$.number`"),
        (send(send(push())), "'Send' - at `$.event.type`"),
        (send({"type": "Reply", "client": 0, "epoch": 0, "sequence": 1}), "'Reply' - at `$.event.type`"),
    ],
)
def test_a_hostile_head_is_refused_by_name(head: object, message: str) -> None:
    assert message in refused(seal(head, EIGHT))
    assert message in refused([b"".join(seal(head, EIGHT))])


@pytest.mark.parametrize(
    "head",
    [
        b"[" + b"{}," * 21_000 + b"0]",
        b"[" + b"[]," * 21_000 + b"0]",
        b'{"type":"Send","number":1,"event":' * 1_700 + b"5" + b"}" * 1_700,
        b'{"type":"Request","op":"push","options":{"a":[' + b"1.5," * 16_000 + b"0]},x",
        b'{"type":"Request","op":"push","options":{' + b",".join(b'"%x":0' % n for n in range(7_200)) + b"},x",
        b'{"type":"Membership","view":1,"workers":{' + b",".join(b'"%d":9' % n for n in range(1000, 8_200)) + b"},x",
    ],
    ids=["dictionaries", "lists", "sends within sends", "numbers", "options", "workers"],
)
def test_a_hostile_head_costs_no_more_than_thirty_times_its_bytes(head: bytes) -> None:
    buffers = [frames.seal(head)]
    assert len(buffers[0]) <= frames.PREFIX.size + frames.MAX_HEAD
    assert "head" in refused(buffers, most=30 * len(head))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ((b"GET ", VERSION, 8), f"magic and version: (b'GET ', {VERSION})"),
        ((MAGIC, VERSION + 1, 8), f"magic and version: (b'd2ps', {VERSION + 1})"),
        ((MAGIC, VERSION, 7), "head length: 7"),
        ((MAGIC, VERSION, 1 << 31), "head length: 2147483648"),
    ],
)
def test_a_hostile_prefix_is_refused_by_name(prefix: tuple[bytes, int, int], message: str) -> None:
    magic, version, length = prefix
    head = json.dumps(push()).encode()
    head += b" " * (-len(head) % 8)
    start = PREFIX.pack(magic, version, len(head) if length == 8 else length, 0)[:-4]
    whole = start + struct.pack("<I", frames.checksum(start, head)) + head
    assert message in refused([whole, EIGHT])


def test_too_large_is_refused_before_the_payload_is_looked_at() -> None:
    buffers = frame(Request("push", "w", torch.ones(1000)))
    assert parse(buffers, limit=4000).value.numel() == 1000
    assert "shape: [1000]" in refused(buffers, limit=3999)
    both = frame(Request("push", "w", torch.ones(1000), torch.zeros(1, dtype=torch.int64)))
    assert "shape: [1]; at most 7 bytes" in refused(both, limit=4007)


def test_buffers_missing_left_over_cut_or_swapped_are_refused() -> None:
    buffers = [bytes(b) for b in frame(Request("push", "w", torch.ones(4), torch.tensor([1, 2, 3])))]
    first, rows, value = buffers
    whole = b"".join(buffers)
    short = [[], [b""], [first], [first, rows], [rows, value], [first, rows, value[:-1]]]
    for wrong in (*short, [first, value, rows], [*buffers, b"x"]):
        refused(wrong)
    assert "head length" in refused([first[: PREFIX.size], rows, value])
    for cut in range(len(whole)):
        refused([whole[:cut]])
    refused([whole + b"x"])
    refused(["not bytes"])  # type: ignore[list-item]


# ---- mutations ------------------------------------------------------------------------------------------------------------

SAMPLES: list[Event | Reply] = [
    Request("push", "w", torch.arange(6.0).view(2, 3), torch.tensor([0, 5]), client=1, epoch=2, sequence=3, clock=4),
    Request("set_optimizer", options={"name": "sgd", "lr": 0.1}),
    Reply(1, 2, 3, op="pull", key="w", value=torch.ones(4, dtype=torch.bfloat16)),
    Send(5, Request("init", "b", torch.tensor(2.0))),
    Membership(3, (0, 1)),
]


def mutate(whole: bytearray, random: random.Random) -> bytes:
    """Bits flipped, bytes set to what breaks programs, pieces cut out, doubled or put in."""
    at = random.randrange(len(whole))
    match random.randrange(6):
        case 0:
            whole[at] ^= 1 << random.randrange(8)
        case 1:
            whole[at : at + 8] = random.choice([b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80", b"\xfe" + b"\xff" * 7])
        case 2:
            del whole[at : at + random.randrange(1, 40)]
        case 3:
            whole[at:at] = whole[random.randrange(len(whole)) :][:40]
        case 4:
            whole[at:at] = random.randbytes(random.randrange(1, 40))
        case 5:
            field = random.randrange(0, PREFIX.size - 7)
            struct.pack_into("<q", whole, field, random.choice([-1, 1 << 62, -(1 << 63), random.randrange(1 << 40)]))
    return bytes(whole)


def torn(whole: bytes, random: random.Random) -> list[bytes]:
    """The same bytes in several buffers: at the places where a frame has its ends, or elsewhere."""
    places = sorted(random.sample([8, 16, 72, 80, 88, 96, 104, 112, 120, 128], 2))
    return [whole[: places[0]], whole[places[0] : places[1]], whole[places[1] :]]


def resealed(whole: bytes) -> bytes:
    """The same with a right checksum of the head, as far as it has one: what only the other checks can stop."""
    if len(whole) < PREFIX.size:
        return whole
    end = PREFIX.size + struct.unpack_from("<I", whole, 8)[0]
    sum_ = frames.checksum(whole[: PREFIX.size - 4], whole[PREFIX.size : end])
    return whole[: PREFIX.size - 4] + struct.pack("<I", sum_) + whole[PREFIX.size :]


@pytest.mark.timeout(1200)
def test_mutated_frames_change_nothing_and_cost_nothing() -> None:
    """No head gets through as another, unless its checksum is right: and then it is a record within the limit."""
    chance, through = random.Random(5), 0
    originals = [bytes(bytearray().join(frame(sample))) for sample in SAMPLES]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for count in range(MUTATIONS):
        sample = count % len(SAMPLES)
        whole = mutate(bytearray(originals[sample]), chance)
        wrong = resealed(whole) if count % 2 else whole
        try:
            record = parse([wrong] if count % 3 else torn(wrong, chance), LIMIT)
        except FrameError:
            continue
        through += 1
        if whole == wrong:
            assert frame(record)[0] == frame(SAMPLES[sample])[0], "a changed head was taken for another"
        value = getattr(record, "value", None)
        assert value is None or value.nbytes <= LIMIT
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < LIMIT and 0 < through < MUTATIONS / 2
    assert [bytearray().join(frame(sample)) for sample in SAMPLES] == originals
