"""The monitor shows what servers do while they do it, in a table and to Prometheus."""

# ruff: noqa: F401 - fixtures are imported, and named again as parameters

import re
import urllib.request
from typing import Any

import pytest
import torch
from launching import nothing_left
from prometheus_client.parser import text_string_to_metric_families

from d2lps import kvstore
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.network.serving import EDGES, Latencies, Meter


def worker(kv: Any, steps: int) -> None:
    out = torch.zeros(100, 10)
    kv.init("w", out)
    for _ in range(steps):
        kv.push("w", torch.ones(100, 10))
        kv.clock()
        kv.pull("w", out).wait()
        kv.comm.sleep(0.01)


@pytest.fixture(scope="module")
def watched() -> tuple[kvstore.Monitor, kvstore.ProcessesRun, list[int]]:
    monitor, seen = kvstore.Monitor(), []

    def saboteur(cluster: kvstore.Cluster) -> None:  # harms nobody, but looks
        while True:
            cluster.sleep(0.1)
            seen.append(sum(sample.received for sample in monitor.samples.values()))

    run = kvstore.run(worker, 2, 2, 60, split=1000, consistency="ssp", staleness=2, monitor=monitor, saboteur=saboteur)
    return monitor, run, seen


def test_it_is_told_during_the_run_and_at_its_end(watched: Any) -> None:
    monitor, run, seen = watched
    assert any(0 < early < seen[-1] for early in seen) and seen == sorted(seen)
    for server, report in enumerate(run.servers):
        sample = monitor.samples[server]
        assert (sample.received, sample.sent, sample.requests) == (report.received, report.sent, report.requests)
        assert sample.staleness == report.staleness and sample.waiting == 0
        assert sum(sample.latencies.counts) == report.requests.total() and sample.latencies.total > 0


def test_the_table_has_a_line_for_each_server(watched: Any) -> None:
    monitor, run, _ = watched
    head, *rows = str(monitor).splitlines()
    assert head.split() == ["server", "received", "sent", "requests", "waiting", "median", "latency", "staleness"]
    for number, row in enumerate(rows):
        report = run.servers[number]
        received, sent = (f"{nbytes / 1e6:.1f} MB" for nbytes in (report.received, report.sent))
        assert re.match(rf" +{number} +{received} +{sent} +{report.requests.total()} ", row)
    assert len(rows) == 2


def test_prometheus_reads_the_same_numbers(watched: Any) -> None:
    monitor, run, _ = watched
    with urllib.request.urlopen(monitor.serve()) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    values = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}
    for number, report in enumerate(run.servers):
        server = ("server", str(number))
        assert values["d2lps_bytes_total", ("direction", "received"), server] == report.received
        assert values["d2lps_requests_total", ("op", "push"), server] == 120
        assert values["d2lps_latency_seconds_bucket", ("le", "+Inf"), server] == report.requests.total()
        assert sum(v for (name, *labels), v in values.items() if name == "d2lps_reads_total" and server in labels) == 120


def test_latencies_by_bucket() -> None:
    latencies = Latencies()
    assert latencies.median == 0.0
    for seconds in [*EDGES, 99.0]:
        latencies.add(seconds)
    assert latencies.counts == [1] * (len(EDGES) + 1) and latencies.median == 0.03


def test_a_request_counts_once_and_a_lost_worker_waits_for_nothing() -> None:
    meter = Meter()
    for request in [(0, 0, 1), (0, 0, 1), (1, 0, 1)]:
        meter.arrived(request)
    meter.answered((0, 0, 1))
    meter.answered((0, 0, 1))
    assert sum(meter.latencies.counts) == 1 and b'"waiting": 1' in meter.said(ServerReport(0), {})
    meter.forget(1)
    assert b'"waiting": 0' in meter.said(ServerReport(0), {})
