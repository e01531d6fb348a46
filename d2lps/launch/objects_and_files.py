"""Python objects and open files over a local socket, between a process and the ones that it starts."""

import pickle
import socket
from typing import Any

_HEADER = 8
_MOST_FILES = 16


def send(sock: socket.socket, message: Any, files: tuple[int, ...] = ()) -> None:
    """Send a picklable message and copies of some file descriptors."""
    body = pickle.dumps(message)
    socket.send_fds(sock, [len(body).to_bytes(_HEADER, "little")], files)
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its files; EOFError when the other end is gone."""
    header, files, _, _ = socket.recv_fds(sock, _HEADER, _MOST_FILES)
    header += _exactly(sock, _HEADER - len(header))
    return pickle.loads(_exactly(sock, int.from_bytes(header, "little"))), list(files)


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other end of the socket is gone")
        parts += part
    return bytes(parts)
