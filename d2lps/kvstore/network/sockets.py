"""Sockets of workers and servers: where servers listen, who may connect, and how much they may send.

On one machine the sockets are files in a folder that nobody else can enter. A port can be reached by others, that of the
loopback interface by all users of the machine: so there every run has a secret. From it come the keys of CURVE, which
encrypts all that is sent, and with which both ends prove, before anything is read, that they know the secret.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

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

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=Known())
    return authenticator


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
