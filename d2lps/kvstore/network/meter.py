"""A server's numbers while it runs, as Prometheus has them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.core.server import Server

EDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)  # seconds; the last bucket has what took longer


class Meter:
    """What a server's report counts, and beside it how long each request took, and how many wait.

    >>> meter = Meter(ServerReport(node=0, received=400), Server([0]))
    >>> meter.arrived((0, 0, 1)), meter.arrived((1, 0, 1)), meter.answered((0, 0, 1))
    (None, None, None)
    >>> [line for line in meter.said().decode().splitlines() if line.startswith(("d2lps_bytes", "d2lps_waiting"))]
    ['d2lps_bytes_total{direction="received"} 400.0', 'd2lps_bytes_total{direction="sent"} 0.0', 'd2lps_waiting 1.0']

    Requests go by their retry_key. Latencies are from the socket to the answer, the wait for other workers included. Cost: 1 us
    a request.
    """

    def __init__(self, report: ServerReport, server: Server) -> None:
        self.report, self.server, self.registry = report, server, CollectorRegistry()
        told = "from the socket to the answer"
        self.latencies = Histogram("d2lps_latency_seconds", told, registry=self.registry, buckets=EDGES)
        self.registry.register(self)
        self._since: dict[tuple[int, int, int], float] = {}

    def arrived(self, request: tuple[int, int, int]) -> None:
        self._since.setdefault(request, time.monotonic())

    def answered(self, request: tuple[int, int, int]) -> None:
        since = self._since.pop(request, None)
        if since is not None:  # else it was answered before
            self.latencies.observe(time.monotonic() - since)

    def forget(self, client: int) -> None:
        """It waits for nothing any more."""
        self._since = {request: since for request, since in self._since.items() if request[0] != client}

    def said(self) -> bytes:
        """For the coordinator: all that is counted, in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for, beside the latencies."""
        counted = {"received": self.report.received, "sent": self.report.sent}
        yield _counts("d2lps_bytes", "bytes of tensors", "direction", counted)
        yield _counts("d2lps_requests", "requests that a server has had", "op", self.report.requests)
        yield _counts("d2lps_reads", "reads, by clocks behind", "staleness", self.server.seen)
        yield GaugeMetricFamily("d2lps_waiting", "requests without an answer", len(self._since))


def _counts(name: str, told: str, label: str, counts: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, told, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family
