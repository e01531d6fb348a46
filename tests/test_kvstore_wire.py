"""What travels and what stays: several records in a message, tensors that are read where they lie, and what is not believed."""

import ctypes
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from d2lps import kvstore
from d2lps.kvstore.core.client import Session
from d2lps.kvstore.core.events import Event, Reply, Request
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.network import wire as module
from d2lps.kvstore.network.clients import Clients
from d2lps.kvstore.network.deployment import deploy
from d2lps.kvstore.network.sockets import connect
from d2lps.kvstore.network.transport import SocketAnswer
from d2lps.kvstore.network.wire import BIG, CARD, MOST, NOBODY, RemoteTensor, Wire
from d2lps.kvstore.storage.frame import NOWHERE, FrameError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
LIMIT = 1 << 20
MUTATIONS = 200_000 if os.environ.get("D2LPS_SOAK") else 5_000


@pytest.fixture
def ends() -> tuple[Wire, Wire]:
    """A worker's end and a server's."""
    return Wire(LIMIT, True), Wire(LIMIT, True)


def sent(one: Wire, other: Wire, *records: Event | Reply, near: bool = True) -> list[Any]:
    """What arrives, with the tensors read, and the bytes that travelled."""
    found: list[Any] = []
    for message in one.packed(records, near):
        for record, far in other.unpack([bytearray(part) for part in message]):
            if far is not None:
                far.read(record.value)  # type: ignore[union-attr, arg-type]
            found.append(record)
    return found


def nbytes(wire: Wire, *records: Event | Reply, near: bool = True) -> int:
    return sum(len(part) for message in wire.packed(records, near) for part in message)


# ---- messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3, 250, BIG // 4, BIG])
@pytest.mark.parametrize("near", [True, False])
def test_records_come_as_they_were_sent(ends: tuple[Wire, Wire], size: int, near: bool) -> None:
    worker, server = ends
    records: list[Event | Reply] = [
        Request("push", f"{n}", torch.full((size,), n + 0.5), torch.arange(size) if n % 2 else None, sequence=n)
        for n in range(100)
    ]
    assert sent(worker, server, *records, Request("clock", clock=3), near=near) == [*records, Request("clock", clock=3)]


def test_small_requests_share_messages() -> None:
    requests = [Request("push", f"key {number}", torch.ones(250), sequence=number) for number in range(200)]
    messages = list(Wire(LIMIT).packed(requests))
    assert len(messages) <= 200 // 24 and all(len(message) <= 1 + MOST for message in messages)
    assert [len(list(Wire(LIMIT).packed([request] * 1000))) for request in [Request("clock")]] == [-(-1000 // MOST)]


def test_a_session_is_asked_for_no_more_than_a_message_takes() -> None:
    """What has not left can still be overtaken by what is of higher priority."""
    session = Session(client=0)
    for number in range(10):
        session.put(Request("push", f"{number}", torch.ones(BIG // 4)))
    messages = Wire(1 << 20).packed(iter(session.next, None))
    next(messages)
    assert session.sent == 1


# ---- references -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, torch.tensor([3, 1, 0])])
def test_a_big_tensor_is_read_where_it_lies(ends: tuple[Wire, Wire], rows: torch.Tensor | None) -> None:
    worker, server = ends
    value = torch.randn(3, 10_000)
    request = Request("push", "w", value, rows, sequence=4)
    assert nbytes(worker, request) < 350
    assert sent(worker, server, request) == [request]
    [message] = worker.packed([request])
    [(arrived, far)] = server.unpack(message)
    value.fill_(7.0)
    assert far is not None
    far.read(arrived.value)  # type: ignore[union-attr, arg-type]
    assert arrived == request


def test_what_is_small_or_in_pieces_or_not_as_it_lies_travels(ends: tuple[Wire, Wire]) -> None:
    worker, server = ends
    whole = torch.randn(200, 200)
    conjugate = torch.randn(100, 100, dtype=torch.complex64).conj()
    for tensor in (whole[0], whole.t()[5:], torch.empty(0), whole[:0], conjugate, conjugate.imag):
        request = Request("push", "w", tensor, sequence=1)
        assert worker.where(tensor) == NOWHERE and sent(worker, server, request) == [request]
    assert worker.where(whole[20:]) != NOWHERE  # a block of rows is in one piece


def test_nothing_is_named_to_those_who_cannot_read(ends: tuple[Wire, Wire]) -> None:
    request, elsewhere = Request("push", "w", torch.ones(100_000), sequence=1), Wire(LIMIT)
    assert sent(elsewhere, elsewhere, request) == sent(ends[0], ends[1], request, near=False) == [request]
    assert nbytes(elsewhere, request) > 400_000 and nbytes(ends[0], request, near=False) > 400_000


class Comm:
    """As much of a communicator as an answer needs."""


@pytest.mark.parametrize("fits", [True, False])
def test_a_pulled_value_is_read_to_where_it_is_wanted(ends: tuple[Wire, Wire], fits: bool) -> None:
    worker, server = ends
    value, out = torch.randn(100, 100), torch.zeros(100, 100 if fits else 99)
    [message] = server.packed([Reply(0, 0, 1, "pull", "w", value)])
    [(reply, far)] = worker.unpack(message)
    assert isinstance(reply, Reply) and far is not None
    before = out._version
    fetched = SocketAnswer(Comm(), "it", None, out).fetched(reply, far)  # type: ignore[arg-type]
    assert fetched.value is not None and torch.equal(fetched.value, value)
    assert (fetched.value is out) == fits and (out._version > before) == fits  # so autograd knows that it has changed


# ---- what must not be believed --------------------------------------------------------------------------------------------


def test_a_reference_from_elsewhere_or_of_no_such_tensor_is_refused(ends: tuple[Wire, Wire]) -> None:
    worker, server = ends
    request = Request("push", "w", torch.ones(BIG), sequence=1)
    [[card, *parts]] = worker.packed([request])
    with pytest.raises(FrameError, match="reference"):  # to one who reads nothing
        list(Wire(LIMIT).unpack([card, *parts]))
    with pytest.raises(FrameError, match="reference"):  # from one who shows no card
        list(server.unpack([NOBODY + bytes(card[CARD.size :]), *parts]))
    small = Wire(LIMIT, True)
    small.where = lambda tensor: (tensor.data_ptr(), tensor.nbytes)  # type: ignore[method-assign, union-attr]
    for tensor in (torch.ones(4), torch.ones(LIMIT)):
        with pytest.raises(FrameError, match=r"reference|shape"):
            list(server.unpack(next(small.packed([Request("push", "w", tensor, sequence=1)]))))
    for message in ([], [b""], [b"x" * (CARD.size - 1)], [b"x" * (CARD.size + 1)], [card], [card, b"x"]):
        with pytest.raises(FrameError):
            list(server.unpack(message))


def test_nothing_comes_from_an_address_where_nothing_is_or_from_a_process_that_is_no_more(ends: tuple[Wire, Wire]) -> None:
    into, there, token = torch.zeros(BIG), torch.ones(BIG), ctypes.create_string_buffer(b"0123456789abcdef", 16)
    me = os.getpid(), ctypes.addressof(token), token.raw, 0
    RemoteTensor(me, there.data_ptr()).read(into)
    assert bool(into.all())
    with pytest.raises(OSError, match="process_vm_readv"):
        RemoteTensor(me, 4096).read(into)
    with pytest.raises(ProcessLookupError, match="another one by now"):  # that has the number of one that has ended
        RemoteTensor((*me[:2], b"fedcba9876543210", 0), there.data_ptr()).read(into)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        RemoteTensor((ended.pid, *me[1:]), there.data_ptr()).read(into)


def test_mutated_messages_change_nothing(ends: tuple[Wire, Wire]) -> None:
    """Nothing is believed but what was sent, and of what lies elsewhere, nothing but what the sender has."""
    worker, server = ends
    records = [Request("push", "w", torch.ones(BIG), sequence=1), Request("pull", "v", sequence=2)]
    good = [bytes(part) for part in next(worker.packed(reversed(records)))]
    chance, believed = random.Random(1), 0
    for _ in range(MUTATIONS):
        parts = [bytearray(part) for part in good]
        part = parts[chance.randrange(len(parts))]
        for _ in range(chance.randint(1, 3)):
            part[chance.randrange(len(part))] = chance.randrange(256)
        if chance.random() < 0.1:
            del part[chance.randrange(len(part)) :]
        try:
            for record, far in server.unpack(parts):
                if far is not None:
                    far.read(record.value)  # type: ignore[union-attr, arg-type]
                believed += record not in records
        except (FrameError, OSError):
            continue
    assert believed == 0


# ---- what is lent ---------------------------------------------------------------------------------------------------------


def test_a_value_stays_as_it_is_until_its_reader_has_acknowledged_it(tmp_path: Path) -> None:
    server, size = Server([0], "asp"), BIG
    with zmq.Context[zmq.Socket[bytes]]() as context:
        clients = Clients(deploy(1, 1), context, f"ipc://{tmp_path}/s")
        socket, worker = connect(context, clients.endpoint, b"0.0", 1 << 20, None), Wire(1 << 20, True)

        def ask(*requests: Request) -> list[Any]:
            """What comes back, before any of it is read."""
            for message in worker.packed(requests):
                socket.send_multipart(message)
            done, answers = 0, list[Any]()
            while done < len(requests):
                for request in clients.asked():
                    clients.answer([effect for effect in server.step(request) if isinstance(effect, Reply)])
                    done += 1
            while len(answers) < len(requests):
                message = socket.recv_multipart()
                worker.meet(message)
                answers += worker.unpack(message)
            return answers

        ask(Request("init", "w", torch.zeros(size), sequence=1))
        [(reply, far)] = ask(Request("pull", "w", sequence=2, acknowledged=2))
        ask(Request("push", "w", torch.ones(size), sequence=3, acknowledged=2))
        assert far is not None
        far.read(reply.value)
        assert reply.value.unique().tolist() == [0.0] and server.entries["w"].value.unique().tolist() == [1.0]
        [(reply, far)] = ask(Request("pull", "w", sequence=4, acknowledged=4))
        far.read(reply.value)
        ask(Request("push", "w", torch.ones(size), sequence=5, acknowledged=5))
        assert reply.value.unique().tolist() == [1.0] and server.entries["w"].value.unique().tolist() == [2.0]
        socket.close()
        clients.close()


# ---- real runs ------------------------------------------------------------------------------------------------------------


def reads_ahead(kv: Any) -> list[list[float]]:
    """Asks for values, and changes them, without waiting in between."""
    outs = [torch.full((20_000,), -1.0) for _ in range(30)]
    kv.init("w", torch.zeros(20_000))
    works = []
    for out in outs:
        works += [kv.push("w", torch.ones(20_000)), kv.pull("w", out)]
    for work in works:
        work.wait()
    return [out.unique().tolist() for out in outs]


@pytest.mark.parametrize("refused", ["nobody", "server", "worker"])
def test_answers_are_those_of_the_moment_and_whole_whoever_may_read_whom(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses is told apart by who asks; then everything travels, and the values are the same."""
    patched = refused

    def worker(kv: Any) -> list[list[float]]:
        if patched == "worker":
            refuse()
        return reads_ahead(kv)

    if refused == "server":
        monkeypatch.setitem(kvstore.core.optimizers.OPTIMIZERS, "unused", Refusing())
    assert kvstore.run(worker, 1, 1, consistency="asp") == [[[number + 1.0] for number in range(30)]]


def refuse() -> None:
    def read(process: int, address: int, into: torch.Tensor) -> None:
        raise PermissionError(1, "refused by the test")

    module.read = read  # type: ignore[attr-defined]


class Refusing:
    """What a server process unpacks, and so executes, as it starts."""

    def __reduce__(self) -> Any:
        return refuse, ()
