"""The monitor shows what servers do while they do it, in a table and to Prometheus."""

# ruff: noqa: F401 - fixtures are imported, and named again as parameters

import re
import urllib.request
from typing import Any

import msgspec
import pytest
import torch
from launching import nothing_left
from prometheus_client.parser import text_string_to_metric_families

from d2lps import kvstore
from d2lps.kvstore import Server
from d2lps.kvstore.core.report import ServerReport
from d2lps.kvstore.network.monitor import EDGES, Meter


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
            seen.append(sum(counts.received for counts in [*monitor.counts.values()]))

    run = kvstore.run(worker, 2, 2, 60, split=1000, consistency="ssp", staleness=2, monitor=monitor, saboteur=saboteur)
    return monitor, run, seen


def test_it_is_told_during_the_run_and_at_its_end(watched: Any) -> None:
    monitor, run, seen = watched
    assert any(0 < early < seen[-1] for early in seen) and seen == sorted(seen)
    for server, report in enumerate(run.servers):
        counts = monitor.counts[server]
        assert (counts.received, counts.sent, counts.requests) == (report.received, report.sent, report.requests)
        assert counts.reads == report.staleness
        assert counts.waiting == 0 and sum(counts.latencies) == report.requests.total()


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


def test_the_median_is_the_edge_of_its_bucket() -> None:
    meter, monitor = Meter(ServerReport(0), Server([0])), kvstore.Monitor()
    rows = []
    for latencies in ([], [*EDGES[:-1], 99.0], [99.0] * 20):
        for seconds in latencies:
            meter.took(seconds)
        monitor.heard(0, msgspec.json.encode(meter.counts()).decode())
        rows.append(str(monitor).splitlines()[1].split())
    assert rows[0] == ["0", "0.0", "MB", "0.0", "MB", "0", "0", "0", "ms"]
    assert [row[-2:] for row in rows[1:]] == [["30", "ms"], ["inf", "ms"]] and meter.latencies == [1] * 11 + [21]


def test_a_request_counts_once_and_a_lost_worker_waits_for_nothing() -> None:
    meter = Meter(ServerReport(0), Server([0]))
    for request in [(0, 0, 1), (0, 0, 1), (1, 0, 1)]:
        meter.arrived(request)
    meter.answered((0, 0, 1))
    meter.answered((0, 0, 1))
    assert (sum(meter.counts().latencies), meter.counts().waiting) == (1, 1)
    meter.forget(1)
    assert meter.counts().waiting == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"monitor": 3}, "monitor=3 is no kvstore.Monitor"),
        ({"monitor": kvstore.Monitor}, "monitor=<class .*Monitor'> is no kvstore.Monitor"),
        ({"saboteur": 3}, "saboteur=3 is no function of a kvstore.Cluster"),
    ],
)
def test_what_is_no_monitor_and_no_saboteur_is_refused_before_anything_starts(options: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        kvstore.run(worker, 2, 2, 1, folder="/nowhere", **options)  # which would be an error, too
