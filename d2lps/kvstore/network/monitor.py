"""What the servers of a run are doing just now: a table in the notebook, and numbers for Prometheus.

Each server counts for itself, and tells the coordinator when it is asked, a few times a second, and once more at the end.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.core.server import Server

EVERY = 0.25  # seconds between two questions to the servers
EDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, inf)  # seconds: the upper ends of latencies' buckets


class Counts(msgspec.Struct):
    """What a server has counted so far. Bytes are those of tensors; a latency is the time from the socket to the answer."""

    received: int
    sent: int
    requests: dict[str, int]  # by op
    reads: dict[int, int]  # by how many clocks the slowest worker was behind
    waiting: int  # requests without an answer
    latencies: list[int]  # how many requests took as long as each bucket says, see `EDGES`
    seconds: float  # all latencies together
    begun: float  # the time at which the server began to count

    def median(self) -> float:
        """The upper edge in seconds of the bucket in which the median latency lies, 0 if there is none."""
        half = sum(self.latencies) / 2
        return next(edge for edge, count in zip(EDGES, accumulate(self.latencies), strict=True) if count >= half) if half else 0.0


class Meter:
    """What a server's report counts, and beside it how long each request took, and how many wait.

    >>> meter = Meter(ServerReport(node=0, received=400), Server([0]))
    >>> meter.arrived((0, 0, 1)), meter.arrived((1, 0, 1)), meter.answered((0, 0, 1))
    (None, None, None)
    >>> counts = meter.counts()
    >>> counts.received, counts.waiting, sum(counts.latencies)
    (400, 1, 1)

    Requests go by their retry_key. Latencies include the wait for other workers. Cost: 1 us a request.
    """

    def __init__(self, report: ServerReport, server: Server) -> None:
        self.report, self.server = report, server
        self.latencies, self.seconds, self.begun = [0] * len(EDGES), 0.0, time.time()
        self._since: dict[tuple[int, int, int], float] = {}

    def arrived(self, request: tuple[int, int, int]) -> None:
        self._since.setdefault(request, time.monotonic())

    def answered(self, request: tuple[int, int, int]) -> None:
        since = self._since.pop(request, None)
        if since is not None:  # else it was answered before
            self.took(time.monotonic() - since)

    def took(self, seconds: float) -> None:
        """A request was answered after so long."""
        self.latencies[bisect_left(EDGES, seconds)] += 1
        self.seconds += seconds

    def forget(self, client: int) -> None:
        """It waits for nothing any more."""
        self._since = {request: since for request, since in self._since.items() if request[0] != client}

    def counts(self) -> Counts:
        report, waiting = self.report, len(self._since)
        counted = report.received, report.sent, report.requests, self.server.seen
        return Counts(*counted, waiting, self.latencies, self.seconds, self.begun)


class Monitor:
    """A run's servers, as they are; also a collector for prometheus_client.

    >>> monitor = kvstore.Monitor()                                     # doctest: +SKIP
    >>> kvstore.run(worker, 4, 2, monitor=monitor)                      # doctest: +SKIP
    server   received       sent   requests   waiting   median latency   staleness
         0    12.8 MB    12.8 MB        640         3          0.3 ms   0: 75%, 1: 25%
         1    12.8 MB    12.8 MB        640         1          0.3 ms   0: 78%, 1: 22%

    In a notebook the table is there while the run is under way, and changes; `print(monitor)` shows it at any time.
    `monitor.counts[0].requests["push"]` is one of server 0's numbers, see `Counts`.
    `monitor.serve()` opens a port of this machine at which Prometheus, or a browser, finds the same numbers. A server that
    was restarted counts anew. Cost: one small message to each server and back, four times a second.
    """

    def __init__(self) -> None:
        self.counts: dict[int, Counts] = {}  # by server
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._shown: Any = None

    def heard(self, server: int, said: str) -> None:
        """A server's counts, as JSON."""
        self.counts[server] = msgspec.json.decode(said, type=Counts)
        self.show()

    def __str__(self) -> str:
        head = f"{'server':>6}{'received':>11}{'sent':>11}{'requests':>11}{'waiting':>10}{'median latency':>17}   staleness"
        return "\n".join([head, *(_row(server, counts) for server, counts in sorted(self.counts.items()))])

    # ---- in a notebook ----------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """The table in the cell that is running, if there is one: it was put there before, or is now."""
        ipython: Any = sys.modules.get("IPython")  # a notebook has it
        if ipython is None or ipython.get_ipython() is None:
            return
        if self._shown is None:
            self._shown = ipython.display.display(self, display_id=True)
        else:
            self._shown.update(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    # ---- for Prometheus ---------------------------------------------------------------------------------------------------

    def serve(self, port: int = 0) -> str:
        """Open an HTTP server on the loopback interface, until this process ends; its address."""
        server, _ = start_http_server(port, "127.0.0.1", self.registry)
        return f"http://127.0.0.1:{server.server_port}/metrics"

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for: all that the servers have said, each number with its server."""
        latencies = HistogramMetricFamily("d2lps_latency_seconds", "from the socket to the answer", labels=["server"])
        nbytes = CounterMetricFamily("d2lps_bytes", "bytes of tensors", labels=["server", "direction"])
        requests = CounterMetricFamily("d2lps_requests", "requests that a server has had", labels=["server", "op"])
        reads = CounterMetricFamily("d2lps_reads", "reads, by clocks behind", labels=["server", "staleness"])
        waiting = GaugeMetricFamily("d2lps_waiting", "requests without an answer", labels=["server"])
        for number, counts in sorted(self.counts.items()):
            server = str(number)
            buckets = zip(map(floatToGoString, EDGES), accumulate(counts.latencies), strict=True)
            latencies.add_metric([server], [*buckets], counts.seconds)
            latencies.add_sample("d2lps_latency_seconds_created", {"server": server}, counts.begun)
            for family, counted in (
                (nbytes, {"received": counts.received, "sent": counts.sent}),
                (requests, counts.requests),
                (reads, counts.reads),
            ):
                for name, count in counted.items():
                    family.add_metric([server, str(name)], count)
            waiting.add_metric([server], counts.waiting)
        yield from (latencies, nbytes, requests, reads, waiting)


def _row(server: int, counts: Counts) -> str:
    sizes = f"{server:>6}{counts.received / 1e6:>8.1f} MB{counts.sent / 1e6:>8.1f} MB"
    reads = sum(counts.reads.values())
    shares = [f"{behind}: {count / reads:.0%}" for behind, count in sorted(counts.reads.items())]
    asked = f"{sum(counts.requests.values()):>11,}{counts.waiting:>10,}"
    return f"{sizes}{asked}{1e3 * counts.median():>14g} ms   {', '.join(shares)}"
