"""Knock too hard at what stands behind Envoy: what comes back.

    python sidecar_box.py envoy_http.yaml python knock.py       two replicas of a service: Envoy sees requests (layer 7)
    python sidecar_box.py envoy_tcp.yaml python knock.py tcp    a server whose language it does not know: connections (layer 4)
"""

import contextlib
import http.server
import re
import socket
import socketserver
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

SIDECAR, ADMIN = "http://127.0.0.1:15001", "http://127.0.0.1:15000"
PORT = 30001  # one of those that are turned to Envoy


class Replica(http.server.ThreadingHTTPServer):
    """Hands out weights, unless it is broken; /slow takes its time."""

    broken = False


class Answer(http.server.BaseHTTPRequestHandler):
    server: Replica

    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(0.5)
        self.send_response(503 if self.server.broken else 200)
        self.send_header("content-length", "7")
        self.end_headers()
        self.wfile.write(b"weights")

    def log_message(self, *words: object) -> None:
        pass


def knock(path: str = "/weights") -> int:
    """The status of one request."""
    try:
        with urllib.request.urlopen(SIDECAR + path, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def rate_limit() -> str:
    """A bucket of 60 requests, filled up every second: the others are turned away with 429 (too many requests)."""
    return str(dict(sorted(Counter(knock() for _ in range(100)).items())))


def ejection(replica: Replica) -> str:
    """One of two replicas fails: x. After three failures in a row it gets no requests any more; mended, it is asked again."""
    time.sleep(1.1)  # a full bucket
    replica.broken = True
    marks = "".join(".x"[knock() != 200] for _ in range(30))
    replica.broken = False
    return marks


def circuit_breaker() -> str:
    """Twelve at once: four are served, two wait, the others are turned away at once with 503 (unavailable)."""
    time.sleep(1.1)
    with ThreadPoolExecutor(12) as pool:
        return str(dict(sorted(Counter(pool.map(knock, ["/slow"] * 12)).items())))


class Greeting(socketserver.BaseRequestHandler):
    """A server of the store as Envoy sees it: bytes come out of a connection, until its other end is closed."""

    def handle(self) -> None:
        self.request.sendall(b"w")
        self.request.recv(1)


def call() -> socket.socket | None:
    """A connection on which the server has spoken; None if Envoy has closed it before."""
    line = socket.create_connection(("127.0.0.1", PORT), timeout=10)
    with contextlib.suppress(ConnectionError):
        if line.recv(1):
            return line
    line.close()
    return None


def calls(count: int, at_once: bool = False) -> str:
    """Which of them reach the server (.), one after the other, or all held until the last has been tried."""
    time.sleep(1.1)  # a full bucket, and nobody there
    marks, held = "", []
    for _ in range(count):
        line = call()
        marks += ".x"[line is None]
        if line and at_once:
            held.append(line)
        elif line:
            line.close()
    for line in held:
        line.close()
    return marks


@contextlib.contextmanager
def server() -> Iterator[None]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", PORT), Greeting, bind_and_activate=False) as greeter:
        greeter.allow_reuse_address = greeter.daemon_threads = True
        greeter.server_bind()
        greeter.server_activate()
        threading.Thread(target=greeter.serve_forever, daemon=True).start()
        yield
        greeter.shutdown()


def ejections() -> str:
    with urllib.request.urlopen(f"{ADMIN}/stats?filter=ejections_active") as answer:
        return re.findall(r"ejections_active: (\d+)", answer.read().decode())[0]


def over_tcp() -> None:
    with server():
        print("30 calls in a row       ", calls(30))
        print("12 calls at once        ", calls(12, at_once=True))
    print("the server is gone      ", calls(5), " ejected by Envoy:", ejections())
    with server():
        print("it is back at once      ", calls(5), " ejected by Envoy:", ejections())


def over_http() -> None:
    replicas = [Replica(("127.0.0.1", port), Answer) for port in (8001, 8002)]
    for replica in replicas:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
    print("100 requests in a row   ", rate_limit())
    print("one replica is broken   ", ejection(replicas[1]))
    print("12 slow ones at a time  ", circuit_breaker())


if __name__ == "__main__":
    over_tcp() if sys.argv[1:] == ["tcp"] else over_http()
