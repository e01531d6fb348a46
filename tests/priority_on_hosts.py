"""An urgent message beside bulk on one cable of the shaped hosts of test_shaped_hosts: what *Topology-aware and dynamic* shows.

    python tests/priority_on_hosts.py       # as root; milliseconds of 64 KB there and 1 byte back, the median of 15

Host 0 sends to host 1 at 50 Mb/s. Streams that never end share the cable: first in one queue, then in a queue of three bands
(tc's pfifo_fast), of which the first is always served first. The urgent message goes there: its packets' headers carry the
mark "low delay".
"""

import contextlib
import socket
import statistics
import sys
import threading
import time

import test_shaped_hosts as box

STREAMS, URGENT, REPEATS = (0, 1, 4), 65_536, 15
LOW_DELAY = 0x10  # IP's type of service; pfifo_fast's first band
RATE = "tbf rate 50mbit burst 32kb latency 200ms"


def serve(listener: socket.socket) -> None:
    """Host 1: take in what comes, and answer whoever sends 64 KB with a byte."""

    def one(connection: socket.socket) -> None:
        asks, taken = connection.recv(1) == b"u", 0
        while data := connection.recv(1 << 16):
            taken += len(data)
            if asks and taken % URGENT == 0:
                connection.sendall(b".")

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=one, args=[connection], daemon=True).start()


def connected(kind: bytes) -> socket.socket:
    connection = socket.create_connection((box.address(1), 29600))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(kind)
    return connection


def flood(connection: socket.socket, stopped: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError):  # it ends in the middle of a piece
        while not stopped.is_set():
            connection.sendall(bytes(1 << 15))


def urgent(streams: int, marked: bool) -> float:
    """Milliseconds of an urgent message beside so many streams."""
    stopped, bulk = threading.Event(), [connected(b"b") for _ in range(streams)]
    threads = [threading.Thread(target=flood, args=[each, stopped], daemon=True) for each in bulk]
    asking, laps = connected(b"u"), []
    asking.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_DELAY if marked else 0)
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # until the streams have found their speed
    for _ in range(REPEATS):
        start = time.perf_counter()
        asking.sendall(bytes(URGENT))
        asking.recv(1)
        laps.append(1e3 * (time.perf_counter() - start))
    stopped.set()
    for each in (*bulk, asking):
        each.shutdown(socket.SHUT_RDWR)
    return statistics.median(laps)


def measure(hosts: list[str]) -> None:
    box.enter(hosts[1])
    listener = socket.create_server(("", 29600))
    threading.Thread(target=serve, args=[listener], daemon=True).start()
    box.enter(hosts[0])  # this thread alone moves
    for queue, kind in (("one queue", "pfifo limit 1000"), ("urgent first", "pfifo_fast")):
        box.inside(hosts[0], f"tc qdisc replace dev eth0 root handle 1: {RATE}")
        box.inside(hosts[0], f"tc qdisc replace dev eth0 parent 1:1 {kind}")
        for streams in STREAMS:
            print(f"{queue:13} {streams} streams: {urgent(streams, queue == 'urgent first'):6.1f} ms", flush=True)


if __name__ == "__main__":
    with box.shaped_hosts(2) as hosts:
        measure(hosts)
    sys.exit()
