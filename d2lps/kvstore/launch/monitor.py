"""What the servers of a run are doing just now: a table in the notebook, and numbers for Prometheus.

Each server counts for itself, and tells the coordinator when it is asked, a few times a second, and once more at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from d2lps.kvstore.network.serving import EDGES, Latencies

EVERY = 0.25  # seconds between two questions to the servers


@dataclass
class Sample:
    """What one server has said last."""

    received: int = 0  # bytes
    sent: int = 0
    waiting: int = 0  # requests that have no answer yet
    requests: Counter[str] = field(default_factory=Counter)  # by op
    staleness: Counter[int] = field(default_factory=Counter)  # reads, by how many clocks the slowest worker was behind
    latencies: Latencies = field(default_factory=Latencies)


class Monitor:
    """A run's servers, as they are; also a collector for prometheus_client.

    >>> monitor = kvstore.Monitor()                                     # doctest: +SKIP
    >>> kvstore.run(worker, 4, 2, monitor=monitor)                      # doctest: +SKIP
    server   received       sent   requests   waiting   median latency   staleness
         0    12.8 MB    12.8 MB        640         3          0.3 ms   0: 75%, 1: 25%
         1    12.8 MB    12.8 MB        640         1          0.3 ms   0: 78%, 1: 22%

    In a notebook the table is there while the run is under way, and changes; `print(monitor)` shows it at any time.
    `monitor.serve()` opens a port of this machine at which Prometheus, or a browser, finds the same numbers. A server that
    was restarted counts anew. Cost: one small message to each server and back, four times a second.
    """

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}  # by server
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._shown: Any = None

    def heard(self, server: int, said: str) -> None:
        """A server's counters."""
        counters = json.loads(said)
        sample = Sample(counters["received"], counters["sent"], counters["waiting"])
        sample.requests = Counter(counters["requests"])
        sample.staleness = Counter({int(clocks): reads for clocks, reads in counters["staleness"].items()})
        sample.latencies = Latencies(counters["latencies"], counters["seconds"])
        self.samples[server] = sample
        self.show()

    def __str__(self) -> str:
        head = f"{'server':>6}{'received':>11}{'sent':>11}{'requests':>11}{'waiting':>10}{'median latency':>17}   staleness"
        rows = []
        for server, sample in sorted(self.samples.items()):
            sizes = f"{server:>6}{sample.received / 1e6:>8.1f} MB{sample.sent / 1e6:>8.1f} MB"
            counts = f"{sample.requests.total():>11,}{sample.waiting:>10,}{1e3 * sample.latencies.median:>14g} ms"
            reads = sample.staleness.total()
            shares = [f"{clocks}: {count / reads:.0%}" for clocks, count in sorted(sample.staleness.items())]
            rows.append(f"{sizes}{counts}   {', '.join(shares)}")
        return "\n".join([head, *rows])

    # ---- in a notebook ----------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """The table in the cell that is running, if there is one: it was put there before, or is now."""
        try:
            from IPython.core.getipython import get_ipython
            from IPython.display import display
        except ImportError:
            return
        if get_ipython() is None:
            return
        if self._shown is None:
            self._shown = display(self, display_id=True)
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
        """What prometheus_client asks for."""
        nbytes = CounterMetricFamily("d2lps_bytes", "bytes of tensors", labels=["server", "direction"])
        requests = CounterMetricFamily("d2lps_requests", "requests that a server has had", labels=["server", "op"])
        waiting = GaugeMetricFamily("d2lps_waiting", "requests without an answer", labels=["server"])
        reads = CounterMetricFamily("d2lps_reads", "reads, by clocks behind", labels=["server", "staleness"])
        latency = HistogramMetricFamily("d2lps_latency_seconds", "from the socket to the answer", labels=["server"])
        for number, sample in sorted(self.samples.items()):
            server = str(number)
            nbytes.add_metric([server, "received"], sample.received)
            nbytes.add_metric([server, "sent"], sample.sent)
            waiting.add_metric([server], sample.waiting)
            for op, count in sorted(sample.requests.items()):
                requests.add_metric([server, op], count)
            for clocks, count in sorted(sample.staleness.items()):
                reads.add_metric([server, str(clocks)], count)
            buckets = zip([*map(str, EDGES), "+Inf"], accumulate(sample.latencies.counts), strict=True)
            latency.add_metric([server], [(edge, float(count)) for edge, count in buckets], sample.latencies.total)
        yield from (nbytes, requests, waiting, reads, latency)
