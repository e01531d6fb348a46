"""What the tests of monitoring share: a Prometheus of their own, and exporters that replay a simulated cluster.

The GPUs and ports of a described cluster have the numbers of a run of it in virtual time: bytes on each link, time that each
device computed, memory that it held. What no simulation knows, heat and power and errors, has the values of EXAMPLES.
"""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from launching import ROOT, until
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

import d2lps
from d2lps.topology import Topology
from d2lps.trace import Trace

MONITORING = ROOT / "book" / "at_scale" / "monitoring"
MIB = 1 << 20
EXAMPLES = {
    "DCGM_FI_DEV_GPU_TEMP": 61, "DCGM_FI_DEV_POWER_USAGE": 380, "DCGM_FI_DEV_SM_CLOCK": 1410,
    "DCGM_FI_DEV_XID_ERRORS": 0, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0, "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
    "node_infiniband_link_downed_total": 0, "node_infiniband_port_errors_received_total": 0,
    "node_infiniband_port_transmit_wait_total": 0,
}  # fmt: skip


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


class Prometheus:
    """One that runs, and what it is asked."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = get(f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def alerts(self, name: str) -> list[dict[str, Any]]:
        return [alert for alert in get(f"{self.address}/api/v1/alerts")["data"]["alerts"] if alert["labels"]["alertname"] == name]


def hurried(text: str) -> str:
    """The configuration as it is, but for the time that it takes: who is asked every second is known in a few."""
    for before, after in ((r"_interval: 5s", "_interval: 1s"), (r"\[1m\]", "[5s]"), (r"for: \w+", "for: 2s")):
        text = re.sub(before, after, text)
    return text


def monitoring(folder: Path) -> Path:
    """A hurried copy of the configuration."""
    (folder / "targets").mkdir()
    for name in ("prometheus.yml", "rules.yml"):
        (folder / name).write_text(hurried((MONITORING / name).read_text()))
    return folder


@contextmanager
def engine(folder: Path, door: str, *command: str) -> Iterator[str]:
    """A program with {address} in its options, from when it answers at http://{address}{door} until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host, _, port = address.partition(":")
    words = [word.format(address=address, host=host, port=port) for word in command]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    try:
        up = until(lambda: answers(f"http://{address}{door}") or process.poll() is not None, 120)
        assert up and process.poll() is None, (folder / "log").read_text()
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def prometheus(folder: Path) -> Any:
    """One of its own, with the configuration in the folder; its data lie there, too."""
    options = ["--config.file=prometheus.yml", "--web.listen-address={address}", "--storage.tsdb.path=data"]
    return engine(folder, "/-/ready", "prometheus", *options)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


# ---- a cluster that is replayed -----------------------------------------------------------------------------------------


def simulated(topology: Topology) -> Trace:
    """Steps of a job on it: half a millisecond of computing, and a ring of 100 MB."""

    def job(comm: d2lps.Communicator) -> None:
        gradient = torch.empty(25_000_000, device="meta")
        with comm.allocate(20 << 30, "model"):
            for _ in range(2):
                with comm.compute("backward", flops=1e12):
                    pass
                d2lps.collectives.all_reduce(comm, gradient, algorithm="ring")

    return d2lps.simulate(job, topology, trace=True).trace


class Replay:
    """The counters of a run that goes on and on, at its own speed: what a collector of prometheus_client is."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.began = trace, time.monotonic()
        self.length = float(trace.messages["end"].max())  # seconds of virtual time
        self.links = trace.bytes_on_links()
        self.rates = {link: trace.topology.graph.edges[link]["bandwidth"] for link in self.links}

    def share(self, link: tuple[str, str]) -> float:
        """Of what a link could carry, how much it did."""
        return self.links[link] / self.length / self.rates[link]

    def collect(self) -> Iterator[Metric]:
        values: dict[str, Metric] = {}
        for name, labels, value in (*self.ports(), *self.gpus()):
            kind = "counter" if name.endswith("_total") else "gauge"
            family = values.setdefault(name, Metric(name.removesuffix("_total"), name, kind))
            family.add_sample(name, labels, value)
        yield from values.values()

    def ports(self) -> Iterator[tuple[str, dict[str, str], float]]:
        runs = (time.monotonic() - self.began) / self.length
        for (src, dst), nbytes in self.links.items():
            if "network" in (src, dst):
                node, device = (dst if src == "network" else src).split("/")
                labels = {"node": node, "device": device.replace("gpu", "mlx5_"), "port": "1"}
                moved = "received" if src == "network" else "transmitted"
                yield f"node_infiniband_port_data_{moved}_bytes_total", labels, runs * nbytes
                if moved == "transmitted":
                    yield "node_infiniband_rate_bytes_per_second", labels, self.rates[src, dst]
                    yield from ((name, labels, value) for name, value in EXAMPLES.items() if name.startswith("node_"))

    def gpus(self) -> Iterator[tuple[str, dict[str, str], float]]:
        spans, kinds = self.trace.spans, list(self.trace.kinds)
        memory = self.trace.topology.graph.nodes
        for rank, place in enumerate(self.trace.nodes):
            node, device = place.split("/")
            labels = {"node": node, "gpu": device.removeprefix("gpu")}
            mine = spans["rank"] == rank
            busy = mine & (spans["kind"] == kinds.index("compute"))
            computing = float((spans["end"] - spans["start"])[busy].sum()) / self.length
            used = float(spans["nbytes"][mine & (spans["kind"] == kinds.index("memory"))].max()) / MIB
            sent = sum(nbytes for (src, dst), nbytes in self.links.items() if src == place and dst != "network")
            yield "DCGM_FI_DEV_GPU_UTIL", labels, 100 * computing
            yield "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", labels, computing
            yield "DCGM_FI_DEV_FB_USED", labels, used
            yield "DCGM_FI_DEV_FB_FREE", labels, memory[place]["device"].memory / MIB - used
            yield "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", labels, sent * (time.monotonic() - self.began) / self.length
            yield from ((name, labels, value) for name, value in EXAMPLES.items() if name.startswith("DCGM"))


@contextmanager
def exporting(collector: Any, entry: Path) -> Iterator[None]:
    """A collector's numbers at a port, and an entry in the folder of targets."""
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    entry.write_text(json.dumps([{"targets": [f"127.0.0.1:{server.server_port}"]}]))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def missing(*programs: str) -> str:
    """Why a test that needs them is skipped; "" if it is not."""
    absent = [program for program in programs if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""
