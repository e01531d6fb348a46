"""What the servers of a run are doing just now: a table in the notebook, and numbers for Prometheus.

Each server counts for itself, and tells the coordinator when it is asked, a few times a second, and once more at the end.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

EVERY = 0.25  # seconds between two questions to the servers


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
        self.said: dict[int, list[Metric]] = {}  # by server: what it has counted (see `Meter`)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._shown: Any = None

    def heard(self, server: int, text: str) -> None:
        """A server's numbers, in Prometheus's text format."""
        self.said[server] = list(text_string_to_metric_families(text))
        self.show()

    def counts(self, server: int, name: str, label: str = "") -> Counter[str]:
        """`monitor.counts(0, "d2lps_requests_total", "op")["push"]`: one of a server's numbers, by the values of a label."""
        samples = [sample for family in self.said[server] for sample in family.samples if sample.name == name]
        return Counter({sample.labels.get(label, ""): int(sample.value) for sample in samples})

    def __str__(self) -> str:
        head = f"{'server':>6}{'received':>11}{'sent':>11}{'requests':>11}{'waiting':>10}{'median latency':>17}   staleness"
        return "\n".join([head, *map(self._row, sorted(self.said))])

    def _row(self, server: int) -> str:
        nbytes = self.counts(server, "d2lps_bytes_total", "direction")
        requests = self.counts(server, "d2lps_requests_total", "op").total()
        waiting = self.counts(server, "d2lps_waiting").total()
        reads = self.counts(server, "d2lps_reads_total", "staleness")
        sizes = f"{server:>6}{nbytes['received'] / 1e6:>8.1f} MB{nbytes['sent'] / 1e6:>8.1f} MB"
        shares = [f"{behind}: {reads[behind] / reads.total():.0%}" for behind in sorted(reads, key=int)]
        return f"{sizes}{requests:>11,}{waiting:>10,}{1e3 * self._median(server):>14g} ms   {', '.join(shares)}"

    def _median(self, server: int) -> float:
        """The upper edge in seconds of the bucket in which the median latency lies, 0 if there is none."""
        buckets = self.counts(server, "d2lps_latency_seconds_bucket", "le")  # each with those below it
        half = buckets["+Inf"] / 2
        return next(float(edge) for edge, count in buckets.items() if count >= half) if half else 0.0

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
        families: dict[str, Metric] = {}
        for server, said in sorted(self.said.items()):
            for family in said:
                of_all = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    of_all.add_sample(sample.name, {"server": str(server), **sample.labels}, sample.value)
        yield from families.values()
