"""A sign of life: a thread of a server process that says "alive" to the coordinator, whatever the server itself is busy with."""

from __future__ import annotations

import threading

import zmq

from d2lps.kvstore.network.sockets import connect

BEAT = 0.1  # seconds between two of them
PULSE = b"pulse "  # before the node's number: the name of its socket


class Pulse:
    """Goes on while the server adds up or copies a big tensor, for hours if need be; stops when its process does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, node: int) -> None:
        self.socket = connect(context, endpoint, PULSE + str(node).encode(), 1 << 10, None)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._life, name="pulse", daemon=True)
        self.thread.start()

    def _life(self) -> None:
        while not self.over.wait(BEAT):
            if self.socket.poll(0, zmq.POLLOUT):
                self.socket.send(b"alive", zmq.NOBLOCK)
        self.socket.close(linger=0)

    def stop(self) -> None:
        self.over.set()
        self.thread.join()
