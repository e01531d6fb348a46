"""Several machines for real: three network namespaces, each with a cable to a switch, and one rank on each.

    host 0 --- +--------+
    host 1 --- | switch |      all of them namespaces of this machine; needs Linux, root, and the `ip` command
    host 2 --- +--------+
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest
from launching import ending, environment, script, started, until
from test_shaped_hosts import address, inside, shaped_hosts, why_not

HOSTS = 3
TIMEOUT = 2  # seconds: what the script below gives to d2lps.run
PREFIX = f"d2lps-{os.getpid()}"  # of the namespaces' names


@pytest.fixture(scope="module")
def cables() -> Iterator[list[str]]:
    if reason := why_not():
        pytest.skip(reason)
    with shaped_hosts(HOSTS, "pfifo limit 1000") as hosts:  # a queue, and as fast as this machine is
        yield hosts


SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
import torch
import d2lps
from d2lps.collectives import all_reduce

folder = Path(sys.argv[1])

def bytes_sent():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

def packets_sent_again():
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])

def ring(comm):
    tensor = torch.full((3_000_000,), float(comm.rank))
    before, again = bytes_sent(), packets_sent_again()
    all_reduce(comm, tensor, algorithm="ring")
    return tensor.unique().tolist(), bytes_sent() - before, packets_sent_again() - again

def for_ever(comm):
    (folder / f"going.{{comm.rank}}").touch()
    while True:
        all_reduce(comm, torch.ones(100_000), algorithm="ring")

found = d2lps.run(ring, {HOSTS}, backend="gloo", trace=True)
try:
    d2lps.run(for_ever, {HOSTS}, backend="gloo", timeout={TIMEOUT})
except Exception as error:
    told = [time.monotonic(), type(error).__name__, str(error)]
notes = [found.results, found.trace.bytes_sent().tolist(), told]
(folder / f"notes.{{os.environ['RANK']}}").write_text(json.dumps(notes))
"""


def start(command: list[str]) -> list[subprocess.Popen[bytes]]:
    """One rank on each host, as a launcher on that host would start it."""
    processes = []
    for rank in range(HOSTS):
        job = environment(RANK=str(rank), WORLD_SIZE=str(HOSTS), MASTER_ADDR=address(0), MASTER_PORT="29500")
        job |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(["ip", "netns", "exec", f"{PREFIX}-host{rank}", *command], env=job))
    return processes


class Job(NamedTuple):
    """What came of the script: per rank its results, its trace's bytes, and when and how the second run ended."""

    results: list[list[tuple[list[float], int, int]]]
    sent: list[list[int]]
    endings: list[tuple[float, str, str]]  # seconds after the cut, the error's type, its text
    codes: list[int]
    left: set[psutil.Process]


@pytest.fixture(scope="module")
def job(cables: list[str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run the script on all hosts, and cut the cable of host 2 in the middle of its second run."""
    folder, known = tmp_path_factory.mktemp("hosts"), set(started())
    processes = start([*script(folder / "on_hosts.py", SCRIPT), str(folder)])
    with ending(processes):
        assert until(lambda: all((folder / f"going.{rank}").exists() for rank in range(HOSTS)), seconds=60)
        inside(f"{PREFIX}-switch", "ip link set port2 down")
        cut = time.monotonic()
        codes = [process.wait(60) for process in processes]
    notes = [json.loads((folder / f"notes.{rank}").read_text()) for rank in range(HOSTS)]
    endings = [(when - cut, kind, text) for _, _, (when, kind, text) in notes]
    return Job([results for results, _, _ in notes], [sent for _, sent, _ in notes], endings, codes, set(started()) - known)


def test_a_ring_goes_from_host_to_host(job: Job) -> None:
    assert [[values for values, _, _ in results] for results in job.results] == [[[3.0]] * HOSTS] * HOSTS


def test_the_cables_carried_what_the_trace_says(job: Job) -> None:
    assert job.sent == [[2 * 2 * 4_000_000] * HOSTS] * HOSTS  # 2(p - 1) messages of n/p = 4 MB
    for _, counted, again in job.results[0]:  # headers and acknowledgements come on top, and packets that TCP sends again
        assert 16e6 < counted < 1.05 * 16e6 + 1514 * again


def test_a_cut_cable_is_noticed_on_every_host(job: Job) -> None:
    for after, kind, text in job.endings:
        assert 0 < after < 60  # TCP alone goes on trying for a quarter of an hour
        assert kind in ("RankHung", "RankFailed") and " in all_reduce (in for_ever, " in text
    assert "RankHung" in {kind for _, kind, _ in job.endings}


def test_the_job_ends_and_leaves_nothing(job: Job) -> None:
    assert job.codes == [0] * HOSTS
    assert job.left == set()
