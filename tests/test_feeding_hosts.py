"""A loader and an object store on two shaped hosts (see test_shaped_hosts): what a link of 50 Mb/s gives, predicted and measured.

This file is both: the test, and (run as a script) the job on the hosts, of which one serves over HTTP and one loads.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import pytest
import test_shaped_hosts as box

from d2lps.feeding import Loader, Storage

pytestmark = pytest.mark.slow

PORT, DISTANCE = 8077, 0.080  # seconds that the server waits before it answers, where it is said to be far
WHERE = f"http://{box.address(1)}:{PORT}"
SMALL, LARGE, SHARDS = 10_000, 250_000, 16


class Ranges(BaseHTTPRequestHandler):
    """One object, of which ranges are asked for."""

    data = bytes(range(250)) * (LARGE * SHARDS // 250)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(DISTANCE if self.path == "/far" else 0)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(self.data[first : last + 1])


class Remote:
    """Pieces of the object, one a sample."""

    def __init__(self, nbytes: int, count: int, where: str) -> None:
        self.nbytes, self.count, self.where = nbytes, count, f"{WHERE}/{where}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> bytes:
        headers = {"Range": f"bytes={i * self.nbytes}-{(i + 1) * self.nbytes - 1}"}
        with urlopen(Request(self.where, headers=headers), timeout=30) as answer:
            got = answer.read()
        assert got == Ranges.data[i * self.nbytes : (i + 1) * self.nbytes]
        return got


def least(nbytes: int, count: int, workers: int, where: str = "far") -> float:
    """Seconds a request in the best of three runs: whatever else goes on here makes a run slower, never faster."""
    return min(loaded(nbytes, count, workers, where) for _ in range(3))


def loaded(nbytes: int, count: int, workers: int, where: str = "far") -> float:
    """Seconds a request."""
    began = time.monotonic()
    assert len(list(Loader(Remote(nbytes, count, where), 1, workers=workers, ahead=workers))) == count
    return (time.monotonic() - began) / count


def reader(host: str) -> dict[str, float]:
    box.enter(host)
    until = time.monotonic() + 20
    while True:  # the server needs a moment
        try:
            loaded(SMALL, 1, 1)
            break
        except RuntimeError:
            assert time.monotonic() < until
            time.sleep(0.05)
    told = {f"{nbytes} {workers}": least(nbytes, count, workers) for nbytes, count, workers in CASES}
    told["alone"] = least(LARGE, SHARDS, 1, "near")
    other = threading.Thread(target=loaded, args=(LARGE, SHARDS, 1, "near"))  # whatever else comes over the link
    other.start()
    told["beside"] = loaded(LARGE, SHARDS // 2, 1, "near")
    other.join()
    return told


def store(host: str) -> None:
    box.enter(host)
    ThreadingHTTPServer((box.address(1), PORT), Ranges).serve_forever()


CASES = [(SMALL, 20, 1), (SMALL, 40, 4), (LARGE, SHARDS, 1), (LARGE, SHARDS, 4)]

if __name__ == "__main__":
    child = os.fork()
    if not child:
        store(sys.argv[2])
    try:
        print(json.dumps(reader(sys.argv[1])), flush=True)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    sys.exit()


# ---- the tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    if reason := box.why_not():
        pytest.skip(reason)
    with box.shaped_hosts(2) as hosts:
        return box.measure(hosts, __file__)[0]


@pytest.mark.parametrize(("nbytes", "workers"), [case[::2] for case in CASES[:3]])
def test_requests_take_as_long_as_predicted(measured: dict[str, float], nbytes: int, workers: int) -> None:
    link = Storage(workers, bandwidth=1e12, latency=DISTANCE, port=box.BANDWIDTH, private=True)
    assert measured[f"{nbytes} {workers}"] == pytest.approx(1 / link.rate(nbytes, workers), rel=0.25)
    assert measured[f"{nbytes} {workers}"] > 0.8 / link.rate(nbytes, workers)  # a bucket of 32 KB may be full at the start


def test_more_connections_fill_the_link_and_no_more(measured: dict[str, float]) -> None:
    # Four connections meet at the link's queue, new ones for each request: TCP backs off, which no formula here knows.
    fastest = LARGE / box.BANDWIDTH
    assert 0.8 * fastest < measured[f"{LARGE} 4"] < 0.85 * measured[f"{LARGE} 1"]


def test_who_shares_the_link_gets_half_of_it(measured: dict[str, float]) -> None:
    assert measured["beside"] / measured["alone"] == pytest.approx(2, rel=0.25)
