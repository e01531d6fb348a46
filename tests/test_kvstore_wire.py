"""Tensors that stay where they are: what worker and server say of memory that both see, and what must not be believed of it."""

import json
import os
import random
import sys
from collections.abc import Iterator

import pytest
import torch

from d2lps import sharedmemory
from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Reply, Request
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.network.sockets import BIG, Slots, Wire
from d2lps.kvstore.storage.frame import NOWHERE, FrameError, frame, seal
from d2lps.sharedmemory.arena import Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
LIMIT = 1 << 20
MUTATIONS = 200_000 if os.environ.get("D2LPS_SOAK") else 5_000


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    """A worker's end and a server's, each with a mapping of its own, as two processes have it."""
    descriptor = sharedmemory.create(2)
    yield Wire(LIMIT, Arena(descriptor, 2, 1)), Wire(LIMIT, Arena(descriptor, 2, 0))
    os.close(descriptor)


def slots(wire: Wire) -> Slots:
    assert wire.arena is not None
    return Slots(wire.arena)


# ---- references -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, torch.tensor([3, 1, 0])])
def test_a_pushed_tensor_is_read_where_it_lies(ends: tuple[Wire, Wire], rows: torch.Tensor | None) -> None:
    worker, server = ends
    value = slots(worker).copy(torch.arange(30_000.0).view(3, 10_000))
    parts = worker.pack(Request("push", "w", value, rows, sequence=4))
    assert sum(len(part) for part in parts) < 300
    arrived = server.unpack([bytes(part) for part in parts])
    assert arrived == Request("push", "w", value, rows, sequence=4)
    value.fill_(7.0)
    assert arrived.value.unique().tolist() == [7.0]


def test_a_pulled_tensor_is_written_where_it_is_wanted(ends: tuple[Wire, Wire]) -> None:
    worker, server = ends
    out = slots(worker).copy(torch.zeros(100, 100, dtype=torch.float64))
    request = server.unpack(worker.pack(Request("pull", "w", sequence=1, out=out)))
    answer = Entry("w", torch.full((100, 100), 3.0, dtype=torch.float64)).read(None, request.out)
    assert out.unique().tolist() == [3.0]
    back = server.pack(Reply(0, 0, 1, "pull", "w", answer))
    assert sum(len(part) for part in back) < 300
    reply = worker.unpack(back)
    assert reply.value.data_ptr() == out.data_ptr() and reply.value.shape == (100, 100) and reply.value.dtype == torch.float64


def test_a_place_of_another_size_is_left_alone() -> None:
    out, value = torch.zeros(5), torch.ones(4)
    assert Entry("w", value).read(None, out).tolist() == [1.0] * 4 and out.sum() == 0


def test_what_is_small_in_pieces_or_elsewhere_travels(ends: tuple[Wire, Wire]) -> None:
    worker, server = ends
    shared = slots(worker).copy(torch.ones(200, 200))
    for tensor in (shared[0], shared.t()[5:], torch.ones(200, 200), torch.empty(0), shared[:0]):
        request = Request("push", "w", tensor, sequence=1)
        assert worker.where(tensor) == NOWHERE and worker.pack(request) == frame(request)
        assert server.unpack(worker.pack(request)) == request
    assert worker.where(shared[20:]) != NOWHERE  # a block of rows is in one piece


def test_without_shared_memory_all_travels() -> None:
    request = Request("pushpull", "w", torch.ones(100_000), sequence=1, out=torch.ones(100_000))
    wire = Wire(LIMIT)
    assert wire.pack(request) == frame(request)
    assert wire.unpack(wire.pack(request)).out is None


# ---- what must not be believed --------------------------------------------------------------------------------------------


def asking(op: str, field: str, offset: int, nbytes: int) -> bytes:
    return json.dumps({"type": "Request", "op": op, "sequence": 1, field: ["uint8", [nbytes], offset]}).encode()


def test_a_reference_to_anywhere_else_is_refused(ends: tuple[Wire, Wire]) -> None:
    _, server = ends
    assert server.arena is not None
    begin, end = server.arena.layout.spaces, server.arena.layout.end
    outside = [(0, BIG), (begin - 1, BIG), (end - BIG + 4, BIG), (begin, 4), (begin, LIMIT + 4)]
    for offset, nbytes in outside:
        for field in ("value", "out"):
            with pytest.raises(FrameError, match=r"no tensor of at most|shape"):
                server.unpack([seal(asking("pushpull", field, offset, nbytes))])
    good = asking("pull", "out", begin, BIG)
    assert server.unpack([seal(good)]).out.nbytes == BIG
    with pytest.raises(FrameError, match="no tensor of at most"):  # and to one who shares nothing it means nothing
        Wire(LIMIT).unpack([seal(good)])


def test_mutated_references_change_nothing(ends: tuple[Wire, Wire]) -> None:
    worker, server = ends
    held = slots(worker)
    value, out = held.copy(torch.ones(100_000)), held.copy(torch.ones(100_000))
    good = [bytes(part) for part in worker.pack(Request("pushpull", "w", value, sequence=1, out=out))]
    wanted, chance, believed = server.unpack(good), random.Random(1), 0
    for _ in range(MUTATIONS):
        parts = [bytearray(part) for part in good]
        part = parts[0]
        for _ in range(chance.randint(1, 3)):
            part[chance.randrange(len(part))] = chance.randrange(256)
        if chance.random() < 0.1:
            del part[chance.randrange(len(part)) :]
        try:
            believed += server.unpack(parts) != wanted
        except FrameError:
            continue
    assert believed == 0


# ---- what is done with them -----------------------------------------------------------------------------------------------


def test_a_late_request_writes_nothing_into_a_place_that_has_another_tenant() -> None:
    server, place = Server([0], "asp"), torch.zeros(4)
    server.step(Request("init", "w", torch.full((4,), 5.0), sequence=1))
    pull = Request("pull", "w", sequence=2, out=place)
    assert server.step(pull)[-1].value is not None and place.tolist() == [5.0] * 4
    place.zero_()  # somebody else's by now
    [again] = server.step(pull)
    assert again.value.tolist() == [5.0] * 4 and place.tolist() == [0.0] * 4


def test_a_read_that_waits_is_written_when_it_is_answered_and_is_in_no_state() -> None:
    server, place = Server([0, 1], "bsp"), torch.zeros(2)
    for client in (0, 1):
        server.step(Request("init", "w", torch.zeros(2), client=client, sequence=1))
        server.step(Request("push", "w", torch.ones(2), client=client, sequence=2))
    server.step(Request("clock", client=0, sequence=3, clock=1))
    server.step(Request("pull", "w", client=0, sequence=4, clock=1, out=place))
    assert place.tolist() == [0.0, 0.0] and [request.out for _, request in server.state()["waiting"]] == [None]
    server.step(Request("clock", client=1, sequence=3, clock=1))
    assert place.tolist() == [2.0, 2.0]


def test_slots_are_used_again_when_the_last_view_has_gone(ends: tuple[Wire, Wire]) -> None:
    held = slots(ends[0])
    first = held.copy(torch.ones(100_000))
    where, view = first.data_ptr(), first[5:]
    del first
    other = held.like(torch.ones(100_000))
    assert other.data_ptr() != where and len(held.lent) == 2
    del view
    again = held.like(torch.ones(90_000, dtype=torch.int32))
    assert again.data_ptr() == where and len(held.lent) == 2
