"""Two replicas of a small service behind Envoy, and three ways of knocking at it too hard: what comes back.

    python sidecar_box.py envoy_http.yaml python knock.py
"""

import http.server
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

SIDECAR = "http://127.0.0.1:15001"


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


if __name__ == "__main__":
    replicas = [Replica(("127.0.0.1", port), Answer) for port in (8001, 8002)]
    for replica in replicas:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
    print("100 requests at once    ", rate_limit())
    print("one replica is broken   ", ejection(replicas[1]))
    print("12 slow ones at a time  ", circuit_breaker())
