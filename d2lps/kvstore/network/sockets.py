"""Sockets of workers and servers: where servers listen, who may connect, and how much they may send.

On one machine the sockets are files in a folder that nobody else can enter. A port can be reached by others, that of the
loopback interface by all users of the machine: so there every run has a secret. From it come the keys of CURVE, which
encrypts all that is sent, and with which both ends prove, before anything is read, that they know the secret.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from d2lps.kvstore.core.events import Event, Reply
from d2lps.kvstore.storage.frame import NOWHERE, frame, parse, wrong
from d2lps.kvstore.storage.log import Bytes
from d2lps.sharedmemory.arena import Arena

LOOPBACK = "tcp://127.0.0.1"
SHORTEST_SECRET = 16
MOST_WAITING = 64  # messages that a server's socket takes in before the server has looked at them
MOST_SENT = 4  # messages that a worker's socket takes over; what is not yet sent can still be overtaken
KERNEL = 1 << 20  # bytes that the kernel keeps between two processes: fewer switches from one to the other


def new_secret() -> str:
    """One that nobody can guess: 24 random bytes."""
    return secrets.token_hex(24)


@dataclass(frozen=True)
class Keys:
    """The key pairs of servers and of clients, in Z85 as zmq has them."""

    server: tuple[bytes, bytes]
    client: tuple[bytes, bytes]


def derive_keys(secret: str) -> Keys:
    """The same keys for everybody who knows the secret; 0.1 s, which makes guessing slow.

    >>> derive_keys("correct horse battery") == derive_keys("correct horse battery")
    True
    """
    if not zmq.has("curve"):
        raise RuntimeError("this machine's libzmq was built without CURVE: only address='ipc' can be used")
    if not isinstance(secret, str) or len(secret) < SHORTEST_SECRET:
        raise ValueError(f"secret must be a text of at least {SHORTEST_SECRET} characters")
    seed = hashlib.scrypt(secret.encode(), salt=b"d2lps.kvstore", n=1 << 14, r=8, p=1, dklen=64)
    private = z85.encode(seed[:32]), z85.encode(seed[32:])
    return Keys((zmq.curve_public(private[0]), private[0]), (zmq.curve_public(private[1]), private[1]))


def check_address(address: str) -> str:
    """The address that servers bind to, "ipc" or "tcp://host"."""
    if address == "ipc":
        return address
    address = LOOPBACK if address == "tcp" else address
    host = address.removeprefix("tcp://").strip("[]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ip = ipaddress.ip_address("0.0.0.0" if host == "*" else host)
    except ValueError:
        raise ValueError(f"address={address!r} is none: choose 'ipc', 'tcp', or 'tcp://' with the number of a host") from None
    return f"tcp://[{ip}]" if ip.version == 6 else f"tcp://{ip}"


def guard(context: zmq.Context[zmq.Socket[bytes]], keys: Keys | None) -> ThreadAuthenticator | None:
    """From now on this context's servers let in only those who have the client's key; to be stopped at the end."""
    if keys is None:
        return None

    known = keys.client[0]

    class Known:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == known

    doorkeeper = ThreadAuthenticator(context)
    doorkeeper.start()
    doorkeeper.configure_curve_callback(domain="*", credentials_provider=Known())
    return doorkeeper


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def writable(socket: zmq.Socket[bytes]) -> bool:
    """Whether the socket would take a message over."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLOUT)


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, limit: int, options: dict[int, Any]) -> zmq.Socket[bytes]:
    """A socket that takes message parts of `limit` bytes at most: a longer one ends its connection."""
    socket = context.socket(kind)
    for option, value in {zmq.LINGER: 0, zmq.MAXMSGSIZE: limit, **options}.items():
        socket.set(option, value)
    return socket


def listen(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, limit: int, keys: Keys | None) -> zmq.Socket[bytes]:
    """A server's socket: it hears everybody, and answers by name."""
    options: dict[int, Any] = {
        zmq.RCVHWM: MOST_WAITING,  # beyond these the kernel's buffers fill, and then the sender has to wait
        zmq.SNDHWM: 0,  # an answer is never dropped because many are under way
        zmq.SNDBUF: KERNEL,
        zmq.RCVBUF: KERNEL,
        zmq.ROUTER_HANDOVER: 1,  # who connects anew under its own name is heard
        zmq.IPV6: int("[" in endpoint),
    }
    if endpoint.startswith("tcp"):  # milliseconds: a connection that is dead, since a cable is, must be known to be
        options |= {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 5000}
    if keys is not None:
        options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_PUBLICKEY: keys.server[0], zmq.CURVE_SECRETKEY: keys.server[1]}
    socket = new_socket(context, zmq.ROUTER, limit, options)
    socket.bind(endpoint)
    return socket


def subscribe(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, limit: int) -> zmq.Socket[bytes]:
    """A socket that hears what the coordinator tells all."""
    socket = new_socket(context, zmq.SUB, limit, {zmq.SUBSCRIBE: b""})
    socket.connect(endpoint)
    return socket


def connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: bytes, limit: int, keys: Keys | None, most: int = MOST_SENT
) -> zmq.Socket[bytes]:
    """A socket to a server, under a name; it connects by itself, and again whenever the server has been away."""
    options: dict[int, Any] = {zmq.ROUTING_ID: name, zmq.SNDHWM: most, zmq.RCVHWM: 0, zmq.SNDBUF: KERNEL, zmq.RCVBUF: KERNEL}
    options |= {zmq.RECONNECT_IVL: 10, zmq.RECONNECT_IVL_MAX: 200}  # milliseconds, at first and at most
    options |= {zmq.IPV6: int("[" in endpoint)}
    if keys is not None:
        options |= {zmq.CURVE_PUBLICKEY: keys.client[0], zmq.CURVE_SECRETKEY: keys.client[1]}
        options |= {zmq.CURVE_SERVERKEY: keys.server[0]}
    socket = new_socket(context, zmq.DEALER, limit, options)
    socket.connect(endpoint)
    return socket


# ---- what travels: records as frames, but for big tensors that both ends see -------------------------------------------------

# The processes of a run on one machine share a file (see `d2lps.sharedmemory`). A big tensor that a worker pushes stays in its
# part of that file until the answer is there, and the server reads it where it lies; for one that it pulls the worker names a
# place, into which the server writes. The frame says only where.
#
# A place may be used again as soon as its request has been answered. Nobody writes into it or reads it after that: a server
# executes a request once, and what is asked again, because an answer was lost, is answered in a frame (see `Server`).

BIG = 1 << 15  # bytes from which it is worth it


class Wire:
    """One process's end. arena: the file that it shares with those at the other ends, None if it shares none.

    limit: bytes of a record's tensors, at most. No checksums of tensors: what leaves the machine is sealed by CURVE.
    """

    def __init__(self, limit: int, arena: Arena | None = None) -> None:
        self.limit, self.arena = limit, arena

    def where(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """The offset of a tensor in the shared file, and its bytes; NOWHERE for one that is small, in pieces, or elsewhere."""
        if self.arena is None or tensor is None or tensor.nbytes < BIG or not tensor.is_contiguous():
            return NOWHERE
        offset = self.arena.offset_of(tensor)
        return (offset, tensor.nbytes) if offset >= 0 else NOWHERE

    def pack(self, record: Event | Reply) -> list[Bytes]:
        """The parts of a message; tensors are not copied, so must stay as they are until the answer is there."""
        return frame(record, where=self.where)

    def unpack(self, parts: Sequence[Bytes]) -> Event | Reply:
        """The record of a message; its tensors lie where the parts lie, or in the shared file. FrameError if it is none."""
        return parse(parts, self.limit, self._bytes)

    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        """What a reference means. It may be wrong: it must lie where the workers have their tensors."""
        arena = self.arena
        if arena is None or not (BIG <= nbytes <= self.limit and arena.layout.spaces <= offset <= arena.layout.end - nbytes):
            wrong("reference", (offset, nbytes), f"no tensor of at most {self.limit} bytes can lie there")
        return arena.bytes[offset : offset + nbytes]


def shared_memory(path: str, workers: int) -> Arena | None:
    """The workers' memory, as a server sees it; None if the path is empty."""
    if not path:
        return None
    descriptor = os.open(path, os.O_RDWR)
    try:
        return Arena(descriptor, workers, 0)
    finally:
        os.close(descriptor)


class Slots:
    """A worker's places for tensors that come and go with messages; one is free again when nobody holds its tensor, or a view.

    >>> slots = Slots(arena)                                # doctest: +SKIP
    >>> slots.copy(torch.ones(100_000)), len(slots.lent)    # doctest: +SKIP
    (tensor([1., 1., 1.,  ..., 1., 1., 1.]), 1)

    For one thread, but tensors may go in any. Sizes are powers of two. Memory that was taken once stays: for a fresh page the
    kernel takes longer than a copy does. Raises MemoryError, with the bytes, when the machine has no more.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # by size: offsets
        self.lent: set[int] = set()  # offsets

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape and dtype, its values whatever they are."""
        size = 1 << (tensor.nbytes - 1).bit_length()
        offset = self.free[size].pop() if self.free[size] else self.arena.space.take(size)
        self.lent.add(offset)
        owner = np.frombuffer(self.arena.bytes, np.uint8, tensor.nbytes, offset)
        weakref.finalize(owner, self._give, size, offset).atexit = False
        return torch.from_numpy(owner).view(tensor.dtype).view(tensor.shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor."""
        return self.like(tensor).copy_(tensor)

    def _give(self, size: int, offset: int) -> None:
        self.lent.discard(offset)
        self.free[size].append(offset)
